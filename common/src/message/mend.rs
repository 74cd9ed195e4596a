//! Mending: a log server whose disk has lost a block gets it from another one that holds the stream.

use rkyv::{Archive, Deserialize, Serialize};

use super::Body;
use super::client::PulledBlock;
use crate::{Payload, StreamId, Version};

/// Log server to log server: a block that the asker's disk has lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct FetchBlock {
    /// The asker's number of the question.
    pub number: u64,
    /// Whose block.
    pub stream: StreamId,
    /// Of which version; it is committed.
    pub version: Version,
}

/// Log server to log server: the block, if it is there, whole, and known to be committed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct FetchedBlock {
    /// The question's.
    pub number: u64,
    /// The question's.
    pub version: Version,
    /// What it is like: the asker compares that with what it knows. `None`: not to be had here.
    pub block: Option<PulledBlock>,
    /// Its body.
    #[rkyv(with = rkyv::with::Skip)]
    pub payload: Payload,
}

impl Body for FetchBlock {}

impl Body for FetchedBlock {
    fn payload(&self) -> Option<&Payload> {
        Some(&self.payload)
    }

    fn set_payload(&mut self, payload: Payload) {
        self.payload = payload;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::message::Message;
    use crate::wire::{Envelope, decode, encode};
    use crate::{Endpoint, Epoch, Incarnation, NodeId, Offset, Peer, Role};

    const HEADER_BYTES: usize = 40;

    #[test]
    fn the_bytes_of_fetching_are_frozen() {
        let fetch = FetchBlock { number: 7, stream: StreamId(0x11), version: Version(0x0a) };
        let block = PulledBlock {
            stream: StreamId(0x11),
            base_offset: Offset(3),
            record_count: 2,
            bytes: 2,
            checksum: 0x0102_0304,
        };
        let payload = Payload::from(Bytes::from_static(b"ab"));
        let version = Version(0x0a);
        let found = FetchedBlock { number: 7, version, block: Some(block), payload };
        let none = FetchedBlock { block: None, payload: Payload::new(), ..found };
        let frozen = [
            (82, "070000000000000011000000000000000a00000000000000"),
            (
                83,
                "07000000000000000a0000000000000001110000000000000003000000000000000200000002\
             000000040302016162",
            ),
            (
                83,
                "07000000000000000a0000000000000000000000000000000000000000000000000000000000\
             00000000000000",
            ),
        ];
        let messages = [Message::from(fetch), Message::from(found), Message::from(none)];
        let peer = Peer { node: NodeId(1), incarnation: Incarnation(2) };
        let to = Endpoint { node: NodeId(3), incarnation: Incarnation(4), role: Role::LogServer };
        let encoded = messages.map(|message| {
            let from = peer.endpoint(Role::LogServer);
            let envelope = Envelope { from, to, epoch: Epoch(5), message };
            let bytes = encode(&envelope).to_bytes();
            assert_eq!(decode(&bytes, peer, NodeId(3)).unwrap(), envelope);
            let body = bytes[HEADER_BYTES..].iter().map(|byte| format!("{byte:02x}"));
            (envelope.message.number(), body.collect::<String>())
        });
        assert_eq!(encoded.each_ref().map(|(number, body)| (*number, &body[..])), frozen);
    }
}
