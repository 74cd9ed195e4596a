//! The scanner on whole, torn and rotten segments.

use proptest::prelude::*;

use super::super::sample::{Built, Image, body, chunks};
use super::*;

const PAGE: usize = PAGE_BYTES as usize;
const SEGMENT_BYTES: u64 = 20 * PAGE_BYTES;

/// Five groups: tiny frames that share a page, headers across page borders, frames of several pages, no
/// blocks.
fn sample() -> Image {
    let mut image = Image::new(3, SEGMENT_BYTES);
    image.group(&[vec![(20, body(10, 1))]]);
    image.group(&[
        vec![(20, body(3000, 2)), (21, body(5, 3))],
        vec![],
        vec![(22, body(800, 4)), (30, body(0, 0)), (31, body(9000, 5))],
        vec![(20, body(3, 6))],
    ]);
    image.group(&[vec![]]);
    image.group(&[
        vec![(20, body(3960 - 128 - 40, 7))],
        vec![(21, body(4000, 8)), (40, body(4096, 9))],
        vec![(20, body(70, 10))],
    ]);
    image.group(&[
        vec![(20, body(50, 11)), (22, body(60, 12))],
        vec![(21, body(3900, 13))],
        vec![],
        vec![(20, body(1, 14))],
    ]);
    image
}

fn start(image: &Image) -> ScanStart {
    ScanStart::from(&image.header)
}

fn scan_from(start: ScanStart, bytes: &[u8], chunk: usize) -> (Vec<ScannedFrame>, ScanEnd) {
    let mut scanner = Scanner::new(start);
    let frames = chunks(bytes, chunk).flat_map(|piece| scanner.feed(piece)).collect();
    (frames, scanner.finish())
}

fn scan(image: &Image, bytes: &[u8]) -> (Vec<ScannedFrame>, ScanEnd) {
    scan_from(start(image), bytes, bytes.len().max(PAGE))
}

/// What was yielded are the first `count` frames as they were built.
#[track_caller]
fn assert_frames(image: &Image, frames: &[ScannedFrame], count: usize) {
    assert_eq!(frames.len(), count);
    for (frame, built) in frames.iter().zip(&image.built) {
        assert_eq!((frame.offset, frame.hash), (built.offset, built.hash));
        assert_eq!((&frame.header, &frame.entries), (&built.header, &built.entries));
        assert_eq!(frame.bodies.len(), frame.entries.len());
        for (index, body) in frame.bodies.iter().enumerate() {
            let at = frame.body_offset(index) as usize;
            assert_eq!(body, &image.bytes[at..at + body.len()]);
        }
    }
}

fn last_group_start(image: &Image) -> usize {
    let last = image.built.last().unwrap().group;
    image.built.iter().find(|built| built.group == last).unwrap().offset as usize
}

fn whole_before(image: &Image, at: usize) -> usize {
    image.built.iter().filter(|built| built.end() <= at as u64).count()
}

#[test]
fn a_whole_segment_is_read_however_it_is_cut() {
    let image = sample();
    for chunk in [PAGE, 2 * PAGE, 5 * PAGE, SEGMENT_BYTES as usize] {
        let (frames, end) = scan_from(start(&image), &image.bytes, chunk);
        assert_frames(&image, &frames, image.built.len());
        assert_eq!(end, ScanEnd::Whole { next_offset: image.end });
    }
    let (frames, end) = scan(&image, &image.bytes[..image.end as usize]);
    assert_frames(&image, &frames, image.built.len());
    assert_eq!(end, ScanEnd::Whole { next_offset: image.end });
}

#[test]
fn bodies_in_one_piece_are_not_copied() {
    let image = sample();
    let file = Bytes::copy_from_slice(&image.bytes);
    let mut scanner = Scanner::new(start(&image));
    let frames = scanner.feed(file.clone());
    assert_eq!(scanner.header(), &HeaderState::Good(image.header));
    for body in frames.iter().flat_map(|frame| &frame.bodies).filter(|body| !body.is_empty()) {
        assert!(file.as_ptr_range().contains(&body.as_ptr()));
    }
}

#[test]
fn an_empty_segment_and_a_sealed_one_end_whole() {
    let blank = vec![0; SEGMENT_BYTES as usize];
    let mut image = Image::new(3, SEGMENT_BYTES);
    assert_eq!(scan(&image, &blank), (vec![], ScanEnd::Whole { next_offset: 0 }));
    assert_eq!(scan(&image, &[]), (vec![], ScanEnd::Whole { next_offset: 0 }));
    let end = ScanEnd::Whole { next_offset: PAGE_BYTES };
    assert_eq!(scan(&image, &image.bytes), (vec![], end));

    image.group(&[vec![(20, body(9000, 1))]]);
    image.seal();
    let (frames, end) = scan(&image, &image.bytes);
    assert_frames(&image, &frames, 1);
    assert_eq!(end, ScanEnd::Whole { next_offset: image.end });
}

/// Checks a scan after damage that only touched the last group, from `at` on.
#[track_caller]
fn assert_last_group_torn(image: &Image, bytes: &[u8], at: usize, case: &str) {
    let (frames, end) = scan(image, bytes);
    let expected = whole_before(image, at);
    assert_eq!(frames.len(), expected, "{case} at {at}");
    assert_frames(image, &frames, expected);
    let next = image.header.first_sequence.plus(frames.len() as u64);
    match end {
        ScanEnd::Torn { sequence, frames_cut, .. } => {
            assert_eq!(sequence, next, "{case} at {at}");
            assert!(frames_cut >= 1, "{case} at {at}");
        }
        ScanEnd::Whole { next_offset } => {
            assert!(next_offset as usize >= last_group_start(image), "{case} at {at}");
        }
        ScanEnd::Rot(report) => panic!("{case} at {at}: {report}"),
    }
    if !at.is_multiple_of(7) {
        return;
    }
    // Proof from outside turns the same bytes into rot; proof of the frames that are there does not.
    let proven = ScanStart { durable_at_least: next, ..start(image) };
    let ScanEnd::Rot(report) = scan_from(proven, bytes, bytes.len()).1 else {
        panic!("{case} at {at}: {next} was durable")
    };
    assert_eq!(report.sequence, next, "{case} at {at}");
    let harmless = ScanStart { durable_at_least: next.minus_saturating(1), ..start(image) };
    assert!(!matches!(scan_from(harmless, bytes, bytes.len()).1, ScanEnd::Rot(_)));
}

#[test]
fn any_damage_in_the_last_group_costs_only_what_it_touches() {
    let image = sample();
    for at in last_group_start(&image)..image.end as usize {
        let mut flipped = image.bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        let is_padding = image.built.last().unwrap().end() as usize <= at;
        let touched = image.built.iter().rfind(|built| built.offset as usize <= at).unwrap();
        let first_bad = if is_padding { at } else { touched.offset as usize };
        assert_last_group_torn(&image, &flipped, first_bad, "flip");
    }
}

#[test]
fn any_cut_in_the_last_group_costs_only_what_it_touches() {
    let image = sample();
    let mut stale = Image::new(1, SEGMENT_BYTES);
    for i in 0..15 {
        stale.group(&[vec![(20, body(1000 + 100 * i, 1))]]);
    }
    let trailer = trailer_offset(SEGMENT_BYTES) as usize;
    for at in last_group_start(&image)..image.built.last().unwrap().end() as usize {
        let first_bad = |bytes: &[u8]| {
            let differs = bytes[at..].iter().zip(&image.bytes[at..]).position(|(a, b)| a != b);
            at + differs.expect("the cut lies before the last byte, which is not zero")
        };
        let mut zeroed = image.bytes.clone();
        zeroed[at..].fill(0);
        let zeroed_from = first_bad(&zeroed);
        assert_last_group_torn(&image, &zeroed, zeroed_from, "zero");

        let mut recycled = image.bytes.clone();
        recycled[at..trailer].copy_from_slice(&stale.bytes[at..trailer]);
        assert_last_group_torn(&image, &recycled, first_bad(&recycled), "stale");

        if at.is_multiple_of(5) || at.is_multiple_of(PAGE) {
            let pages = at.next_multiple_of(PAGE);
            assert_last_group_torn(&image, &zeroed[..pages], zeroed_from.min(pages), "cut");
        }
    }
}

/// Checks a scan after damage to a durable frame; `touched` are the damaged bytes.
#[track_caller]
fn assert_rot(
    image: &Image,
    (frames, end): (Vec<ScannedFrame>, ScanEnd),
    touched: core::ops::Range<usize>,
) {
    let index = image
        .built
        .iter()
        .position(|b| (b.offset as usize) < touched.end && b.end() as usize > touched.start)
        .unwrap();
    let bad = &image.built[index];
    assert_frames(image, &frames, index);
    let ScanEnd::Rot(report) = end else {
        panic!("{touched:?} of {} gave {end:?}", bad.header.sequence)
    };
    assert_eq!(report.sequence, bad.header.sequence, "{report}");
    assert_eq!(report.segment, image.header.segment);
    assert_eq!(report.after, bad.header.previous_version, "{report}");
    let group_end = image.built.iter().rfind(|b| b.group == bad.group).unwrap();
    let through = report.through.expect("a later frame tells at least an upper bound");
    assert!((bad.header.version..=group_end.header.version).contains(&through), "{report}");
    assert!(report.next_good > Some(bad.header.sequence), "{report}");

    let table = bad.offset as usize + FRAME_HEADER_BYTES;
    let expected: Vec<_> = (0..bad.entries.len())
        .filter(|i| {
            let entry = table + i * BLOCK_ENTRY_BYTES..table + (i + 1) * BLOCK_ENTRY_BYTES;
            entry.start >= touched.end || entry.end <= touched.start
        })
        .map(|i| bad.entries[i].stream)
        .collect();
    assert_eq!(report.streams, expected, "{report}");
    for stream in expected {
        assert!(report.to_string().contains(&format!(" {stream}")), "{report}");
    }
    if touched.start >= table {
        assert_eq!(through, bad.header.version, "the header is good: {report}");
    }
}

#[test]
fn any_flip_in_an_earlier_group_is_rot_by_name() {
    let image = sample();
    let in_head = |at: usize| {
        let head = |b: &Built| b.offset..b.offset + frame::head_bytes(b.entries.len()) as u64;
        image.built.iter().any(|b| head(b).contains(&(at as u64)))
    };
    for at in (PAGE..last_group_start(&image)).filter(|at| at.is_multiple_of(17) || in_head(*at)) {
        let mut flipped = image.bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        let in_frame = image.built.iter().any(|b| (b.offset..b.end()).contains(&(at as u64)));
        if in_frame {
            assert_rot(&image, scan(&image, &flipped), at..at + 1);
        } else {
            let (frames, end) = scan(&image, &flipped);
            assert_frames(&image, &frames, image.built.len());
            assert_eq!(end, ScanEnd::Whole { next_offset: image.end }, "padding at {at}");
        }
    }
}

#[test]
fn any_lost_page_of_an_earlier_group_is_rot_by_name() {
    let image = sample();
    for page in 1..last_group_start(&image) / PAGE {
        let touched = page * PAGE..(page + 1) * PAGE;
        let mut zeroed = image.bytes.clone();
        zeroed[touched.clone()].fill(0);
        assert_rot(&image, scan(&image, &zeroed), touched.clone());

        let mut garbage = image.bytes.clone();
        garbage[touched.clone()].fill(0xa5);
        assert_rot(&image, scan(&image, &garbage), touched.clone());

        for chunk in [PAGE, 3 * PAGE] {
            let mut scanner = Scanner::new(start(&image));
            let mut frames = vec![];
            let before = chunks(&image.bytes[..touched.start], chunk);
            before.for_each(|piece| frames.extend(scanner.feed(piece)));
            frames.extend(scanner.hole(PAGE_BYTES));
            let behind = chunks(&image.bytes[touched.end..], chunk);
            behind.for_each(|piece| frames.extend(scanner.feed(piece)));
            assert_rot(&image, (frames, scanner.finish()), touched.clone());
        }
    }
}

#[test]
fn a_lost_segment_header_costs_no_frame() {
    let image = sample();
    let mut zeroed = image.bytes.clone();
    zeroed[..PAGE].fill(0);
    let mut scanner = Scanner::new(start(&image));
    let frames = scanner.feed(zeroed.into());
    assert_eq!(scanner.header(), &HeaderState::Bad(Flaw::Blank.into()));
    assert_frames(&image, &frames, image.built.len());
    assert_eq!(scanner.finish(), ScanEnd::Whole { next_offset: image.end });
}

#[test]
fn frames_that_were_never_flushed_may_tear_in_any_order() {
    let mut image = Image::new(3, SEGMENT_BYTES);
    image.group(&[vec![(20, body(10, 1))]]);
    image.group(&[vec![(20, body(10, 2))], vec![(21, body(20, 3))]]);
    image.group_in_flight(&[vec![(20, body(10, 4))], vec![(21, body(5000, 5))]]);
    let at = image.built[1].offset as usize;
    let mut torn = image.bytes.clone();
    torn[at..at + PAGE].fill(0);
    let (frames, end) = scan(&image, &torn);
    assert_frames(&image, &frames, 1);
    let expected = ScanEnd::Torn { offset: at as u64, sequence: Sequence(2), frames_cut: 4 };
    assert_eq!(end, expected);
}

#[test]
fn leftovers_of_a_recycled_file_end_the_log() {
    let mut stale = Image::new(1, SEGMENT_BYTES);
    for i in 0..15 {
        stale.group(&[vec![(20, body(100 * i, 1))], vec![(21, body(300, 2))]]);
    }
    stale.seal();
    let mut image = sample();
    let end = image.end as usize;
    image.bytes[end..].copy_from_slice(&stale.bytes[end..]);
    let (frames, judged) = scan(&image, &image.bytes);
    assert_frames(&image, &frames, image.built.len());
    assert_eq!(judged, ScanEnd::Whole { next_offset: image.end });

    let (frames, judged) = scan(&image, &stale.bytes);
    assert_frames(&image, &frames, 0);
    assert_eq!(judged, ScanEnd::Whole { next_offset: 0 }, "a spare that was only renamed");
}

#[test]
fn rot_is_settled_before_the_end_of_the_file() {
    let mut image = sample();
    image.bytes[image.built[1].offset as usize + 700] ^= 1;
    let mut scanner = Scanner::new(start(&image));
    let mut fed = chunks(&image.bytes, PAGE);
    while !scanner.is_settled() {
        scanner.feed(fed.next().expect("a later group proves it"));
    }
    assert!(scanner.fed_bytes() < image.end);
    assert!(matches!(scanner.finish(), ScanEnd::Rot(_)));
}

proptest! {
    #[test]
    fn damage_anywhere_never_panics_nor_depends_on_chunks(
        spots in prop::collection::vec(
            (any::<prop::sample::Index>(), 1_usize..6000, any::<Option<u8>>()),
            0..4,
        ),
        holes in prop::collection::btree_set(0_usize..20, 0..3),
        pages in 1_usize..9,
        fed_pages in prop_oneof![Just(20_usize), 0_usize..20],
        moved in any::<Option<(prop::sample::Index, prop::sample::Index)>>(),
    ) {
        let image = sample();
        let mut bytes = image.bytes.clone();
        for (at, len, fill) in spots {
            let at = at.index(bytes.len());
            let end = (at + len).min(bytes.len());
            match fill {
                Some(byte) => bytes[at..end].fill(byte),
                None => bytes[at] ^= 0x10,
            }
        }
        if let Some((from, to)) = moved {
            let (from, to) = (from.index(20) * PAGE, to.index(20) * PAGE);
            bytes.copy_within(from..from + PAGE, to);
        }
        bytes.truncate(fed_pages * PAGE);
        let run = |pages: usize| {
            let mut scanner = Scanner::new(start(&image));
            let mut frames = vec![];
            for (index, piece) in chunks(&bytes, pages * PAGE).enumerate() {
                for (inner, page) in chunks(&piece, PAGE).enumerate() {
                    if holes.contains(&(index * pages + inner)) {
                        frames.extend(scanner.hole(PAGE_BYTES));
                    } else if holes.is_empty() && inner == 0 {
                        frames.extend(scanner.feed(piece.clone()));
                        break;
                    } else {
                        frames.extend(scanner.feed(page));
                    }
                }
            }
            (frames, scanner.finish())
        };
        let (frames, end) = run(pages);
        assert_frames(&image, &frames, frames.len());
        prop_assert_eq!(run(1), (frames, end));
    }

    #[test]
    fn hostile_frames_with_good_checksums_never_panic(
        block_count in any::<u32>(),
        frame_bytes in prop_oneof![any::<u64>(), 0_u64..200_000],
        durable in any::<u64>(),
        sequence in prop_oneof![any::<u64>(), 1_u64..20],
        at in 1_usize..19,
    ) {
        let mut image = sample();
        let spot = &mut image.bytes[at * PAGE..at * PAGE + FRAME_HEADER_BYTES];
        spot.copy_from_slice(&sample().bytes[PAGE..PAGE + FRAME_HEADER_BYTES]);
        spot[24..32].copy_from_slice(&sequence.to_le_bytes());
        spot[36..40].copy_from_slice(&block_count.to_le_bytes());
        spot[40..48].copy_from_slice(&frame_bytes.to_le_bytes());
        spot[48..56].copy_from_slice(&durable.to_le_bytes());
        super::super::flaw::seal(spot);
        let bytes = image.bytes.clone();
        let _ = scan(&image, &bytes);
        let _ = scan_from(start(&image), &bytes, PAGE);
    }
}
