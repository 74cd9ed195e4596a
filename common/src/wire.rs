//! Frames: the bytes of a message between two processes.
//!
//! A hand-laid header, an rkyv body (`little_endian, unaligned, pointer_width_32`, always checked), then the
//! payload as it is. Little-endian:
//!
//! ```text
//! off  size  field
//!   0     4  length        of the whole frame, this field included
//!   4     4  checksum      crc32c over bytes 8..length
//!   8     2  protocol      PROTOCOL of the sender
//!  10     2  type          number of the message type
//!  12     2  header bytes  40; a larger header is skipped to its end
//!  14     2  from          role kind, role index
//!  16     2  to            role kind, role index
//!  18     2  zero
//!  20     4  body bytes    the payload begins behind the body
//!  24     8  epoch         that the sender speaks for; 0 for clients
//!  32     8  incarnation   of the receiver that is meant; 0 = whoever is there
//!  40     -  body, payload
//! ```
//!
//! A frame with a wrong checksum or a foreign shape closes its connection and nothing else; one of an unknown
//! type is refused and the connection stays.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use thiserror::Error;

use crate::message::Message;
use crate::{Code, Endpoint, Epoch, Incarnation, NodeId, Payload, Peer, Refusal, Role};

/// The protocol version of this build; the major number is in the ALPN.
pub const PROTOCOL: u16 = 1;
/// The lowest protocol version that this build can speak.
pub const PROTOCOL_MIN: u16 = 1;
/// Bytes of the header that this build writes.
pub const FRAME_HEADER_BYTES: usize = 40;
/// A frame's limit in bytes: a transaction of the largest size, its ranges and its columns.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

const CHECKED_FROM: usize = 8;
/// What most headers with their bodies fit into.
const HEAD_BYTES_USUAL: usize = 256;

/// A frame to be written: the pieces one after the other.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Header and body.
    pub head: Bytes,
    /// What follows.
    pub payload: Payload,
}

impl Frame {
    /// Bytes on the wire.
    #[must_use]
    pub fn len(&self) -> usize {
        self.head.len() + self.payload.len()
    }

    /// Whether there are no bytes; there always are.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    /// All bytes in one piece, for tests and for the simulator.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        if self.payload.is_empty() {
            return self.head.clone();
        }
        let mut out = BytesMut::with_capacity(self.len());
        out.extend_from_slice(&self.head);
        self.payload.pieces().iter().for_each(|piece| out.extend_from_slice(piece));
        out.freeze()
    }
}

/// A message with its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The sender.
    pub from: Endpoint,
    /// The receiver; incarnation 0 means whoever is there.
    pub to: Endpoint,
    /// The epoch that the sender speaks for.
    pub epoch: Epoch,
    /// What it says.
    pub message: Message,
}

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// The frame is damaged or foreign: close the connection.
    #[error("malformed frame: {0}")]
    Malformed(String),
    /// A message type that this build does not know: refuse, and go on.
    #[error("unsupported message type {number}")]
    Unsupported {
        /// The type's number.
        number: u16,
        /// The sender's role, where the refusal goes.
        from: Role,
    },
}

impl WireError {
    /// The refusal to send back.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        let code = match self {
            Self::Malformed(_) => Code::Malformed,
            Self::Unsupported { .. } => Code::Unsupported,
        };
        Refusal::new(code, self.to_string())
    }
}

/// Encodes an envelope. The payload is not copied.
#[must_use]
pub fn encode(envelope: &Envelope) -> Frame {
    let mut head = Vec::with_capacity(HEAD_BYTES_USUAL);
    head.resize(FRAME_HEADER_BYTES, 0);
    let mut head = envelope.message.encode_body(head);
    let body_bytes = head.len() - FRAME_HEADER_BYTES;
    let payload = envelope.message.payload().cloned().unwrap_or_default();
    let total = head.len() + payload.len();
    assert!(
        total <= FRAME_BYTES_MAX,
        "{} of {total} bytes is over the limit",
        envelope.message.name()
    );

    let mut header = &mut head[..FRAME_HEADER_BYTES];
    header.put_u32_le(u32::try_from(total).expect("below the frame limit"));
    header.put_u32_le(0);
    header.put_u16_le(PROTOCOL);
    header.put_u16_le(envelope.message.number());
    header.put_u16_le(FRAME_HEADER_BYTES as u16);
    header.put_slice(&encode_role(envelope.from.role));
    header.put_slice(&encode_role(envelope.to.role));
    header.put_u16_le(0);
    header.put_u32_le(u32::try_from(body_bytes).expect("below the frame limit"));
    header.put_u64_le(envelope.epoch.0);
    header.put_u64_le(envelope.to.incarnation.0);
    assert!(header.is_empty(), "the header has the size that is drawn above");

    let mut checksum = crc32c::crc32c(&head[CHECKED_FROM..]);
    for piece in payload.pieces() {
        checksum = crc32c::crc32c_append(checksum, piece);
    }
    head[4..8].copy_from_slice(&checksum.to_le_bytes());
    Frame { head: head.into(), payload }
}

/// Decodes one whole frame that came from `peer` to `node`. The payload shares the frame's bytes.
///
/// # Errors
/// [`WireError`] says whether the connection can stay.
pub fn decode(frame: &Bytes, peer: Peer, node: NodeId) -> Result<Envelope, WireError> {
    let malformed = |what: &str| WireError::Malformed(what.to_owned());
    if frame.len() < FRAME_HEADER_BYTES {
        return Err(malformed("shorter than a header"));
    }
    let mut header = &frame[..FRAME_HEADER_BYTES];
    let (length, stored) = (header.get_u32_le() as usize, header.get_u32_le());
    if length != frame.len() {
        return Err(WireError::Malformed(format!("{} bytes claim to be {length}", frame.len())));
    }
    let computed = crc32c::crc32c(&frame[CHECKED_FROM..]);
    if stored != computed {
        return Err(WireError::Malformed(format!(
            "checksum {stored:08x}, computed {computed:08x}"
        )));
    }
    let (_protocol, number) = (header.get_u16_le(), header.get_u16_le());
    let header_bytes = header.get_u16_le() as usize;
    let from = decode_role([header.get_u8(), header.get_u8()]).ok_or_else(|| malformed("role"))?;
    let to = decode_role([header.get_u8(), header.get_u8()]).ok_or_else(|| malformed("role"))?;
    let _zero = header.get_u16_le();
    let body_bytes = header.get_u32_le() as usize;
    let (epoch, incarnation) = (Epoch(header.get_u64_le()), Incarnation(header.get_u64_le()));

    let body_end = header_bytes.checked_add(body_bytes).filter(|end| *end <= frame.len());
    let Some(body_end) = body_end.filter(|_| header_bytes >= FRAME_HEADER_BYTES) else {
        return Err(malformed("the body lies outside"));
    };
    match Message::decode_body(number, &frame[header_bytes..body_end], frame.slice(body_end..)) {
        None => Err(WireError::Unsupported { number, from }),
        Some(Err(error)) => Err(WireError::Malformed(format!("type {number}: {error}"))),
        Some(Ok(message)) => {
            let to = Endpoint { node, incarnation, role: to };
            Ok(Envelope { from: peer.endpoint(from), to, epoch, message })
        }
    }
}

const fn encode_role(role: Role) -> [u8; 2] {
    match role {
        Role::Node => [0, 0],
        Role::Leader => [1, 0],
        Role::Sequencer => [2, 0],
        Role::Proxy(index) => [3, index],
        Role::Resolver(index) => [4, index],
        Role::LogServer => [5, 0],
        Role::Client => [6, 0],
    }
}

const fn decode_role(bytes: [u8; 2]) -> Option<Role> {
    Some(match bytes {
        [0, 0] => Role::Node,
        [1, 0] => Role::Leader,
        [2, 0] => Role::Sequencer,
        [3, index] => Role::Proxy(index),
        [4, index] => Role::Resolver(index),
        [5, 0] => Role::LogServer,
        [6, 0] => Role::Client,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::message::{
        CommitKind, CommitRequest, Confirm, Push, PushBlock, Resolve, ResolveTransaction, Resolved,
        SectionEntry, Settle, Settlement, Verdict,
    };
    use crate::{IdempotencyId, KeyRange, Ranges, RequestId, StreamId, Version, WallTime};

    const PEER: Peer = Peer { node: NodeId(1), incarnation: Incarnation(2) };
    const NODE: NodeId = NodeId(3);

    fn envelope(message: impl Into<Message>) -> Envelope {
        let to = Endpoint { node: NODE, incarnation: Incarnation(4), role: Role::Proxy(1) };
        Envelope { from: PEER.endpoint(Role::Client), to, epoch: Epoch(5), message: message.into() }
    }

    fn commit() -> CommitRequest {
        CommitRequest {
            request: RequestId(7),
            answered_below: RequestId(6),
            kind: CommitKind::User,
            read_version: Version(9),
            report_conflicts: true,
            id: Some(IdempotencyId([3; 16])),
            lane: None,
            reads: Ranges::from_ranges([KeyRange::point(b"k"), KeyRange::new(b"a", b"c").unwrap()]),
            writes: Ranges::default(),
            sections: vec![SectionEntry { stream: StreamId(20), record_count: 1, bytes: 4 }],
            payload: Bytes::from_static(b"data").into(),
        }
    }

    fn push() -> Push {
        let mut payload = Payload::new();
        payload.push(Bytes::from_static(b"ab"));
        payload.push(Bytes::from_static(b"c"));
        Push {
            previous_version: Version(1),
            version: Version(2),
            commit_time: WallTime(3),
            known_committed: Version(1),
            answered: Version(0),
            blocks: vec![PushBlock {
                stream: StreamId(20),
                record_count: 1,
                bytes: 3,
                checksum: 4,
            }],
            payload,
        }
    }

    #[test]
    fn messages_round_trip_and_payloads_are_not_copied() {
        for envelope in [envelope(commit()), envelope(push()), envelope(Confirm { number: 8 })] {
            let bytes = encode(&envelope).to_bytes();
            let back = decode(&bytes, PEER, NODE).unwrap();
            assert_eq!(back, envelope);
            if let Message::CommitRequest(request) = back.message {
                let piece = &request.payload.pieces()[0];
                assert!(bytes.as_ptr_range().contains(&piece.as_ptr()), "shares the frame's bytes");
            }
        }
    }

    #[test]
    fn the_bytes_of_a_frame_are_frozen() {
        let bytes = encode(&envelope(Confirm { number: 0x0102 })).to_bytes();
        let expect: &[&[u8]] = &[
            &[48, 0, 0, 0],
            &bytes[4..8],
            &[1, 0, 33, 0, 40, 0, 6, 0, 3, 1, 0, 0, 8, 0, 0, 0],
            &[5, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0],
            &[2, 1, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(bytes, expect.concat());
        assert_eq!(bytes[4..8], crc32c::crc32c(&bytes[8..]).to_le_bytes());
    }

    #[test]
    fn the_bytes_of_resolving_and_settling_are_frozen() {
        let settlement = Settlement::new(Version(0x0a), [true, false, true]);
        let transaction = ResolveTransaction {
            read_version: Version(9),
            reads: Ranges::from_ranges([KeyRange::point(b"k")]),
            writes: Ranges::from_ranges([KeyRange::new(b"a", b"b").unwrap()]),
            report_conflicts: true,
            is_final: false,
        };
        let resolve = Resolve {
            previous_version: Version(0x0a),
            version: Version(0x0b),
            answered: Version(8),
            settlements: vec![settlement.clone()],
            transactions: vec![transaction],
        };
        let conflict = Verdict::Conflict { ranges: vec![7] };
        let resolved = Resolved {
            version: Version(0x0b),
            settled: Version(0x0a),
            verdicts: vec![Verdict::Committed, conflict, Verdict::TooOld, Verdict::Yours],
        };
        let settle = Settle { settlements: vec![settlement] };
        let frozen = [
            (
                22,
                Message::from(resolve),
                "050a00000000000000f7ffffff010000006b01000000ffffffff6162010000000100000009000000\
             00000000e5ffffff01000000deffffff01000000deffffff02000000d8ffffff0100000001000a00\
             0000000000000b0000000000000008000000000000009bffffff01000000b6ffffff01000000",
            ),
            (
                23,
                Message::from(resolved),
                "0700000000000000000000000001f2ffffff01000000020000000000000000030000000000000000\
             0b000000000000000a00000000000000ccffffff04000000",
            ),
            (24, Message::from(settle), "050a00000000000000f7ffffff01000000f0ffffff01000000"),
        ];
        for (number, message, expect) in frozen {
            let envelope = envelope(message);
            let bytes = encode(&envelope).to_bytes();
            let body: String =
                bytes[FRAME_HEADER_BYTES..].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!((envelope.message.number(), &body[..]), (number, expect));
            assert_eq!(decode(&bytes, PEER, NODE).unwrap(), envelope);
        }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let bytes = encode(&envelope(commit())).to_bytes();
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(decode(&bad.into(), PEER, NODE), Err(WireError::Malformed(_))));
        }
        for cut in 0..bytes.len() {
            assert!(decode(&bytes.slice(..cut), PEER, NODE).is_err());
        }
    }

    #[test]
    fn an_unknown_type_is_told_from_garbage() {
        let mut bytes = encode(&envelope(Confirm { number: 1 })).to_bytes().to_vec();
        bytes[10..12].copy_from_slice(&999_u16.to_le_bytes());
        let checksum = crc32c::crc32c(&bytes[8..]);
        bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
        let error = decode(&bytes.into(), PEER, NODE).unwrap_err();
        assert_eq!(error, WireError::Unsupported { number: 999, from: Role::Client });
        assert_eq!(error.refusal().code(), Code::Unsupported);
    }

    proptest! {
        #[test]
        fn hostile_bodies_with_good_checksums_never_panic(
            number in 0_u16..100,
            body in prop::collection::vec(any::<u8>(), 0..200),
            split in any::<prop::sample::Index>(),
        ) {
            let mut bytes = encode(&envelope(Confirm { number: 1 })).to_bytes()[..40].to_vec();
            bytes.extend_from_slice(&body);
            let total = bytes.len() as u32;
            bytes[..4].copy_from_slice(&total.to_le_bytes());
            bytes[10..12].copy_from_slice(&number.to_le_bytes());
            let body_bytes = split.index(body.len() + 1) as u32;
            bytes[20..24].copy_from_slice(&body_bytes.to_le_bytes());
            let checksum = crc32c::crc32c(&bytes[8..]);
            bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
            if let Ok(envelope) = decode(&bytes.into(), PEER, NODE)
                && let Message::CommitRequest(request) = envelope.message {
                let _ = crate::transaction::validate(&request, &crate::Knobs::default());
            }
        }
    }
}
