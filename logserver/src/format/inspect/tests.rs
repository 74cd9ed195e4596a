//! Offline inspection of good and damaged directories.

use std::fs;

use common::catalog::StreamDefinition;
use common::disk::{File, PAGE_BYTES};

use super::*;
use crate::format::meta::StreamTrim;
use crate::format::sample::{Image, NODE, section, section_of};
use crate::format::segment::{EpochStart, SEGMENT_HEADER_BYTES, trailer_offset};

const SEGMENT_BYTES: u64 = 12 * PAGE_BYTES;
const PAGE: usize = PAGE_BYTES as usize;

/// Two sealed segments and a live one, with an epoch that begins below what the one before had accepted.
struct Log {
    images: [Image; 3],
    meta: Meta,
}

impl Log {
    fn new() -> Self {
        let mut first = Image::new(4, SEGMENT_BYTES);
        first.group(&[vec![(20, section(0, &["a", "b"])), (21, section(0, &["x"]))]]);
        first.group(&[vec![(20, section(3, &["c"]))], vec![]]);
        first.seal();
        let mut second = first.next(5);
        second.group(&[vec![(20, section(0, &["d"]))], vec![(20, section(0, &["lost"]))]]);
        // The recovery version lies below the last frame: its record's offset comes again.
        second.begin_epoch(3, second.built[0].header.version, &[(20, 4)]);
        second.group(&[vec![(20, section(1, &["e"]))], vec![(21, section(0, &["y"]))]]);
        second.seal();
        let mut third = second.next(7);
        third.group(&[vec![(20, section(0, &["f"]))]]);
        third.group(&[vec![(21, section(0, &["z"]))]]);
        let epoch =
            EpochStart { epoch: Epoch(3), previous_version: second.built[0].header.version };
        let trim = StreamTrim {
            stream: StreamId(20),
            through: first.built[0].header.version,
            first_offset: Offset(2),
            next_offset_hint: Offset(2),
        };
        let meta = Meta {
            generation: 2,
            node: NODE,
            locked: Epoch(3),
            epochs: vec![epoch],
            trims: vec![trim],
            clean_shutdown: None,
        };
        Self { images: [first, second, third], meta }
    }

    fn write(&self) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for image in &self.images {
            let name = File::Segment(image.header.segment).name();
            fs::write(directory.path().join(name), &image.bytes).unwrap();
        }
        let write = |name: String, bytes: &[u8]| fs::write(directory.path().join(name), bytes);
        write(File::Meta(0).name(), &self.meta.encode()).unwrap();
        write(File::Spare(1).name(), &vec![0; SEGMENT_BYTES as usize]).unwrap();
        write("notes.txt".to_owned(), b"?").unwrap();
        directory
    }

    fn verify(&self) -> Vec<Finding> {
        verify(self.write().path()).unwrap()
    }

    #[track_caller]
    fn assert_only(&self, kind: FindingKind, segment: usize, word: &str) {
        let findings = self.verify();
        let name = File::Segment(self.images[segment].header.segment).name();
        let [finding] = &findings[..] else { panic!("one finding of {kind:?}: {findings:?}") };
        assert_eq!((finding.kind, &finding.file), (kind, &name), "{finding}");
        assert!(finding.to_string().contains(word), "{finding}");
    }
}

#[test]
fn a_good_directory_has_no_finding_and_is_summed_up() {
    let log = Log::new();
    assert_eq!(log.verify(), []);
    let report = inspect(log.write().path()).unwrap();
    assert_eq!(report.node, Some(NODE));
    assert!(matches!(&report.meta, MetaChoice::Found { meta, other: None } if *meta == log.meta));
    assert_eq!(report.spares, [(File::Spare(1).name(), SEGMENT_BYTES)]);
    assert_eq!(report.foreign, ["notes.txt"]);
    let [first, second, third] = &report.segments[..] else { panic!("three segments") };
    assert_eq!(first.frames.frame_count, 3);
    assert_eq!((first.frames.block_count, first.frames.record_count), (3, 4));
    assert_eq!(first.frames.sequences, Some((Sequence(1), Sequence(3))));
    assert_eq!(first.frames.versions, Some((Version(110), Version(130))));
    let trimmed = section(0, &["a", "b"]).len() as u64;
    assert_eq!(first.frames.body_bytes - first.frames.live_bytes, trimmed);
    assert!(first.live_ratio() > 0.0 && first.live_ratio() < 1.0);
    assert!(matches!(&first.seal, Seal::Sealed(footer) if *footer == log.images[0].footer()));
    assert_eq!(second.frames.epochs, Some((Epoch(1), Epoch(3))));
    assert_eq!((&third.seal, third.live_ratio()), (&Seal::Open, 1.0));
    assert_eq!(third.end, Some(ScanEnd::Whole { next_offset: 3 * PAGE_BYTES }));
}

#[test]
fn frames_and_records_are_listed_in_the_order_of_the_log() {
    let log = Log::new();
    let directory = log.write();
    let mut sequences = vec![];
    frames(directory.path(), None, |_, frame| {
        sequences.push(frame.header.sequence.0);
        if sequences.len() == 8 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap();
    assert_eq!(sequences, [1, 2, 3, 4, 5, 6, 7, 8]);
    let mut in_one = vec![];
    frames(directory.path(), Some(SegmentId(5)), |segment, frame| {
        in_one.push((segment.0, frame.header.sequence.0));
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(in_one, [(5, 4), (5, 5), (5, 6), (5, 7)]);

    let mut lines = vec![];
    records(directory.path(), Some(StreamId(20)), |line| {
        assert_eq!(line.stream, StreamId(20));
        let value = String::from_utf8(line.record.value.to_vec()).unwrap();
        lines.push((line.offset.0, line.position.index, value));
        ControlFlow::Continue(())
    })
    .unwrap();
    let expected = [(0, 0, "a"), (1, 0, "b"), (2, 3, "c"), (3, 0, "d"), (4, 0, "lost")];
    let behind = [(4, 1, "e"), (5, 0, "f")];
    let expected: Vec<_> = expected
        .into_iter()
        .chain(behind)
        .map(|(offset, index, value)| (offset, index, value.to_owned()))
        .collect();
    assert_eq!(lines, expected);
}

#[test]
fn streams_are_summed_up_over_all_segments() {
    let mut log = Log::new();
    let definition = StreamDefinition { name: "orders".to_owned(), stream: StreamId(20) };
    let body = section_of(0, &[definition.to_record()]);
    log.images[2].group(&[vec![(StreamId::CATALOG.0, body)]]);
    let directory = log.write();
    let reports = streams(directory.path()).unwrap();
    assert_eq!(reports.keys().map(|stream| stream.0).collect::<Vec<_>>(), [1, 20, 21]);
    let orders = &reports[&StreamId(20)];
    assert_eq!(orders.name.as_deref(), Some("orders"));
    assert_eq!((orders.segment_count, orders.block_count, orders.record_count), (3, 6, 7));
    assert_eq!(orders.offsets, Some((Offset(0), Offset(6))));
    assert_eq!(
        orders.versions.map(|(first, _)| first),
        Some(log.images[0].built[0].header.version)
    );
    let trimmed = section(0, &["a", "b"]).len() as u64;
    assert_eq!(orders.body_bytes - orders.live_bytes, trimmed);
    assert_eq!(orders.trimmed_through, Some(log.images[0].built[0].header.version));
    let other = &reports[&StreamId(21)];
    assert_eq!(
        (other.name.as_deref(), other.live_ratio(), other.trimmed_through),
        (None, 1.0, None)
    );
    let mut all = 0;
    records(directory.path(), None, |_| {
        all += 1;
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(all, reports.values().map(|report| report.record_count).sum::<u64>());
}

#[test]
fn a_damaged_frame_is_rot_by_name() {
    for segment in 0..2 {
        for index in 0..2 {
            let mut log = Log::new();
            let image = &mut log.images[segment];
            let built = image.built[index].clone();
            image.bytes[built.end() as usize - 1] ^= 4;
            log.assert_only(FindingKind::Rot, segment, &format!(" {} ", built.header.sequence));
        }
    }
    // The last frame of an unsealed segment is durable as soon as a later segment exists.
    let mut log = Log::new();
    let image = &mut log.images[1];
    let last = image.built.last().unwrap().clone();
    image.bytes[last.offset as usize + 60] ^= 4;
    let trailer = trailer_offset(SEGMENT_BYTES) as usize;
    image.bytes[trailer..].fill(0);
    log.assert_only(FindingKind::Rot, 1, &last.header.sequence.to_string());
    // And so is the log's last one after a clean shutdown.
    let mut log = Log::new();
    let image = &mut log.images[2];
    let last = image.built.last().unwrap().clone();
    image.bytes[last.offset as usize..].fill(0);
    assert_eq!(log.verify(), [], "a torn tail");
    log.meta.clean_shutdown = Some(last.header.sequence);
    log.assert_only(FindingKind::Rot, 2, &last.header.sequence.to_string());
}

#[test]
fn damage_around_the_frames_is_found() {
    let mut log = Log::new();
    log.images[1].bytes[40] ^= 1;
    log.assert_only(FindingKind::Header, 1, "its frames are good");

    let mut log = Log::new();
    log.images[0].bytes[40] ^= 1;
    log.assert_only(FindingKind::Header, 0, "checksum");

    for at in [log.images[0].end as usize + 200, trailer_offset(SEGMENT_BYTES) as usize + 20] {
        let mut log = Log::new();
        log.images[0].bytes[at] ^= 1;
        log.assert_only(FindingKind::Footer, 0, "checksum");
    }

    let mut log = Log::new();
    let mut footer = log.images[0].footer();
    footer.entries[1].base_offset = Offset(9);
    let end = log.images[0].end;
    let encoded = footer.encode();
    let trailer = footer.trailer(end, &encoded).encode();
    let bytes = &mut log.images[0].bytes;
    bytes[end as usize..end as usize + encoded.len()].copy_from_slice(&encoded);
    bytes[trailer_offset(SEGMENT_BYTES) as usize..].copy_from_slice(&trailer);
    log.assert_only(FindingKind::Footer, 0, "entry 1");

    let mut log = Log::new();
    log.images[2].bytes.truncate(8 * PAGE);
    log.assert_only(FindingKind::Length, 2, "by its header");
}

#[test]
fn a_missing_segment_breaks_the_chain() {
    let log = Log::new();
    let directory = log.write();
    fs::remove_file(directory.path().join(File::Segment(SegmentId(5)).name())).unwrap();
    let findings = verify(directory.path()).unwrap();
    assert_eq!(findings[0].kind, FindingKind::Chain, "{findings:?}");
    assert_eq!(findings[0].file, File::Segment(SegmentId(7)).name());
}

#[test]
fn wrong_offsets_and_wrong_counts_are_found() {
    let mut log = Log::new();
    log.images[2].set_offset(21, 7);
    log.images[2].group(&[vec![(21, section(0, &["gap"]))]]);
    log.assert_only(FindingKind::Offsets, 2, "starts at o7, not o3");

    let mut log = Log::new();
    log.meta.epochs.clear();
    log.meta.trims[0].first_offset = Offset(3);
    log.meta.trims[0].next_offset_hint = Offset(3);
    log.assert_only(FindingKind::Offsets, 0, "trimmed to o3");

    let mut log = Log::new();
    let mut body = section(0, &["one"]);
    body[4] = 2;
    log.images[2].group(&[vec![(22, body)]]);
    log.assert_only(FindingKind::Records, 2, "1 records counted as 2");
}

#[test]
fn damaged_meta_slots_are_found() {
    let log = Log::new();
    let directory = log.write();
    let mut newer = Meta { generation: 3, ..log.meta }.encode().to_vec();
    newer[50] ^= 1;
    fs::write(directory.path().join("meta-1"), &newer).unwrap();
    let findings = verify(directory.path()).unwrap();
    assert_eq!((findings.len(), findings[0].kind), (1, FindingKind::Meta));
    assert_eq!(findings[0].file, "meta-1");
    fs::write(directory.path().join("meta-0"), &newer).unwrap();
    assert!(verify(directory.path()).unwrap().len() >= 2);
}

#[test]
fn prepared_torn_and_empty_files_are_no_findings() {
    let log = Log::new();
    let directory = log.write();
    let path = |segment| directory.path().join(File::Segment(SegmentId(segment)).name());
    fs::write(path(8), vec![0; SEGMENT_BYTES as usize]).unwrap();
    assert_eq!(verify(directory.path()).unwrap(), []);
    fs::write(path(8), &log.images[0].bytes).unwrap();
    assert_eq!(verify(directory.path()).unwrap(), [], "a recycled one");
    fs::write(path(9), [1; 100]).unwrap();
    assert_eq!(verify(directory.path()).unwrap()[0].kind, FindingKind::Length);
    assert_eq!(SEGMENT_HEADER_BYTES, PAGE_BYTES);
}
