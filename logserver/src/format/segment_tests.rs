//! Headers, footers and trailers of segments.

use proptest::prelude::*;

use super::*;

const NODE: NodeId = NodeId(0x0102);
const SEGMENT: SegmentId = SegmentId(0x0304);

fn header() -> SegmentHeader {
    SegmentHeader {
        node: NODE,
        segment: SEGMENT,
        segment_bytes: 0x4_0000,
        first_sequence: Sequence(0x0506),
        previous_hash: 0x0708_090a,
        epoch: Epoch(11),
        previous_version: Version(0x0c0d),
    }
}

fn entry(stream: u64, offset: u64, bytes: u32) -> FooterEntry {
    FooterEntry {
        stream: StreamId(stream),
        epoch: Epoch(12),
        version: Version(0x1112),
        commit_time: WallTime(0x1314),
        base_offset: Offset(0x1516),
        record_count: 3,
        offset,
        bytes,
        checksum: 0x1718_191a,
    }
}

fn footer() -> Footer {
    Footer {
        node: NODE,
        segment: SEGMENT,
        frames_end: 0x2100,
        first_sequence: Sequence(0x0506),
        last_sequence: Sequence(0x0507),
        last_hash: 0x2122_2324,
        last_version: Version(0x1112),
        last_epoch: Epoch(12),
        last_known_committed: Version(0x0c0e),
        last_commit_time: WallTime(0x1314),
        epoch_starts: vec![EpochStart { epoch: Epoch(12), previous_version: Version(0x0c0f) }],
        entries: vec![entry(20, 0x1100, 0x10), entry(21, 0x1110, 0x20)],
    }
}

fn assert_golden(page: &[u8], fields: &[&[u8]], checksum: u32) {
    let mut golden = fields.concat();
    golden[4..8].copy_from_slice(&checksum.to_le_bytes());
    assert_eq!(checksum, crc32c::crc32c(&golden[8..]));
    assert_eq!(page[..golden.len()], golden);
    assert!(page[golden.len()..].iter().all(|byte| *byte == 0));
    assert!((page.len() as u64).is_multiple_of(PAGE_BYTES));
}

#[test]
fn the_bytes_of_a_segment_header_are_frozen() {
    let fields: &[&[u8]] = &[
        b"MRSG\0\0\0\0",
        &[1, 0, 0, 0, 0x0a, 0x09, 0x08, 0x07],
        &[2, 1, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0],
        &[0, 0, 4, 0, 0, 0, 0, 0, 6, 5, 0, 0, 0, 0, 0, 0],
        &[11, 0, 0, 0, 0, 0, 0, 0, 0x0d, 0x0c, 0, 0, 0, 0, 0, 0],
        &[0; 16],
    ];
    assert_golden(&header().encode(), fields, GOLDEN_CHECKSUMS[0]);
}

#[test]
fn the_bytes_of_a_trailer_are_frozen() {
    let trailer = Trailer {
        node: NODE,
        segment: SEGMENT,
        footer_offset: 0x3000,
        footer_bytes: 0x0110,
        footer_checksum: 0x2526_2728,
    };
    let fields: &[&[u8]] = &[
        b"MRTR\0\0\0\0",
        &[1, 0, 0, 0, 0x28, 0x27, 0x26, 0x25],
        &[2, 1, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0],
        &[0, 0x30, 0, 0, 0, 0, 0, 0, 0x10, 1, 0, 0, 0, 0, 0, 0],
    ];
    assert_golden(&trailer.encode(), fields, GOLDEN_CHECKSUMS[1]);
    assert_eq!(Trailer::decode(&trailer.encode(), 0x4_0000), Ok(trailer));
    let outside = SegmentError::Contradiction { what: "the footer lies outside" };
    assert_eq!(Trailer::decode(&trailer.encode(), 0x4000), Err(outside));
}

#[test]
fn the_bytes_of_a_footer_are_frozen() {
    let entry = |stream: u8, at: u8, bytes: u8| {
        [
            &[stream, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0][..],
            &[0x12, 0x11, 0, 0, 0, 0, 0, 0, 0x14, 0x13, 0, 0, 0, 0, 0, 0],
            &[0x16, 0x15, 0, 0, 0, 0, 0, 0, at, 0x11, 0, 0, 0, 0, 0, 0],
            &[3, 0, 0, 0, bytes, 0, 0, 0, 0x1a, 0x19, 0x18, 0x17, 0, 0, 0, 0],
        ]
        .concat()
    };
    let fields: &[&[u8]] = &[
        b"MRFT\0\0\0\0",
        &[1, 0, 0, 0, 0x24, 0x23, 0x22, 0x21],
        &[2, 1, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0],
        &[0x10, 1, 0, 0, 0, 0, 0, 0, 0, 0x21, 0, 0, 0, 0, 0, 0],
        &[6, 5, 0, 0, 0, 0, 0, 0, 7, 5, 0, 0, 0, 0, 0, 0],
        &[0x12, 0x11, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0],
        &[0x0e, 0x0c, 0, 0, 0, 0, 0, 0, 0x14, 0x13, 0, 0, 0, 0, 0, 0],
        &[1, 0, 0, 0, 2, 0, 0, 0],
        &[0; 24],
        &[12, 0, 0, 0, 0, 0, 0, 0, 0x0f, 0x0c, 0, 0, 0, 0, 0, 0],
        &entry(20, 0, 0x10),
        &entry(21, 0x10, 0x20),
    ];
    let encoded = footer().encode();
    assert_golden(&encoded, fields, GOLDEN_CHECKSUMS[2]);
    let trailer = footer().trailer(0x3000, &encoded);
    assert_eq!(trailer.footer_bytes, 0x0110);
    assert_eq!(trailer.footer_checksum, GOLDEN_CHECKSUMS[2]);
}

/// Header, trailer, footer.
const GOLDEN_CHECKSUMS: [u32; 3] = [0x4e44_ece4, 0x34be_f7d2, 0xeed6_1074];

#[test]
fn every_flipped_bit_is_noticed() {
    let (page, foot) = (header().encode(), footer().encode());
    let trail = footer().trailer(0x3000, &foot).encode();
    for bit in 0..0x0110 * 8 {
        let flip = |bytes: &[u8]| {
            let mut bad = bytes.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            bad
        };
        assert!(matches!(Footer::decode(&flip(&foot)), Err(SegmentError::Flaw(_))), "{bit}");
        if bit < HEADER_BYTES * 8 {
            assert!(SegmentHeader::decode(&flip(&page)).is_err(), "{bit}");
        }
        if bit < TRAILER_FIELD_BYTES * 8 {
            assert!(Trailer::decode(&flip(&trail), 0x4_0000).is_err(), "{bit}");
        }
    }
}

#[test]
fn a_structure_of_another_segment_or_node_is_told_apart() {
    assert_eq!(header().belongs(NODE, SEGMENT), Ok(()));
    let other = SegmentError::OtherSegment { found: SEGMENT };
    assert_eq!(footer().belongs(NODE, SegmentId(9)), Err(other));
    let other = SegmentError::OtherNode { found: NODE };
    assert_eq!(header().belongs(NodeId(9), SEGMENT), Err(other));
    let blank = Err(SegmentError::Flaw(Flaw::Blank));
    assert_eq!(Trailer::decode(&[0; 4096], 0x4_0000), blank);
}

#[test]
fn the_room_kept_for_a_footer_is_what_it_takes() {
    for entries in [0, 1, 61, 62, 63, 500] {
        let footer =
            Footer { entries: (0..entries).map(|i| entry(i, 0x1100, 1)).collect(), ..footer() };
        assert_eq!(footer.encode().len() as u64, footer_bytes(entries as usize, 1));
    }
}

proptest! {
    #[test]
    fn footers_round_trip(
        numbers in prop::array::uniform6(any::<u64>()),
        count in 0_u64..200,
        starts in prop::collection::btree_map(any::<u64>(), any::<u64>(), 0..4),
        blocks in prop::collection::vec((any::<u64>(), 0_u32..9), 0..70),
    ) {
        let mut end = SEGMENT_HEADER_BYTES;
        let mut entries = vec![];
        for (stream, bytes) in blocks {
            entries.push(entry(stream, end, bytes));
            end += u64::from(bytes);
        }
        let [node, segment, first, version, epoch, committed] = numbers;
        let epoch_starts = starts
            .into_iter()
            .map(|(epoch, version)| EpochStart {
                epoch: Epoch(epoch),
                previous_version: Version(version),
            })
            .collect();
        let first = first >> 1;
        let written = Footer {
            node: NodeId(node),
            segment: SegmentId(segment),
            frames_end: end,
            first_sequence: Sequence(first + 1),
            last_sequence: Sequence(first + count),
            last_version: Version(version),
            last_epoch: Epoch(epoch),
            last_known_committed: Version(committed),
            epoch_starts,
            entries,
            ..footer()
        };
        prop_assert_eq!(Footer::decode(&written.encode()), Ok(written));
    }

    #[test]
    fn hostile_bytes_never_panic(
        mut bytes in prop::collection::vec(any::<u8>(), 0..400),
        counts in any::<Option<(u32, u32)>>(),
    ) {
        for magic in [HEADER_MAGIC, FOOTER_MAGIC, TRAILER_MAGIC] {
            if bytes.len() >= 128 {
                bytes[..4].copy_from_slice(&magic);
                bytes[8..12].copy_from_slice(&[1, 0, 0, 0]);
                if let Some((starts, entries)) = counts {
                    bytes[96..100].copy_from_slice(&starts.to_le_bytes());
                    bytes[100..104].copy_from_slice(&entries.to_le_bytes());
                } else {
                    bytes[96..104].fill(0);
                }
                let end = match magic {
                    HEADER_MAGIC => HEADER_BYTES,
                    FOOTER_MAGIC => FOOTER_HEAD_BYTES,
                    _ => TRAILER_FIELD_BYTES,
                };
                seal(&mut bytes[..end]);
            }
            let _ = SegmentHeader::decode(&bytes);
            let _ = Footer::decode(&bytes);
            let _ = Trailer::decode(&bytes, 0x4_0000);
        }
    }
}
