//! What a consumer finds in the log.

use std::collections::BTreeMap;

use client::face::{Client, Pull};
use common::{Offset, Position, StreamId, Version};

/// One record and its places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its stream.
    pub stream: StreamId,
    /// Its transaction's place.
    pub position: Position,
    /// Its own place in the stream.
    pub offset: Offset,
    /// Its key as text.
    pub key: String,
    /// Its value as text.
    pub value: String,
}

/// What a consumer has pulled, in the order in which it came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records {
    all: Vec<Found>,
}

impl Records {
    /// Everything of these streams through what is committed now.
    ///
    /// # Panics
    /// When the log can't be pulled.
    pub async fn of(client: &Client, streams: &[StreamId]) -> Self {
        let until = client.read_version().await.unwrap();
        let mut pull = client.pull(streams.iter().copied(), Version::ZERO).await.unwrap();
        let mut records = Self::default();
        while records.take(&mut pull, until).await < until {}
        records
    }

    /// Takes the next answer of a pull, which waits no longer than until `want` is known. Says through which
    /// version the consumer knows everything then.
    ///
    /// # Panics
    /// When the log can't be pulled, or a position is not above the one before.
    pub async fn take(&mut self, pull: &mut Pull, want: Version) -> Version {
        let pulled = pull.next_until(want).await.unwrap();
        for batch in &pulled.batches {
            for delivered in batch.records().unwrap() {
                let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
                let found = Found {
                    stream: delivered.stream,
                    position: delivered.position,
                    offset: delivered.offset,
                    key: text(&delivered.record.key),
                    value: text(&delivered.record.value),
                };
                if let Some(last) = self.all.last() {
                    let (before, now) = (last.position, found.position);
                    assert!(before <= now, "{now} came after {before}");
                }
                self.all.push(found);
            }
        }
        pulled.through
    }

    /// All of them, in the order in which they came.
    #[must_use]
    pub fn all(&self) -> &[Found] {
        &self.all
    }

    /// Those of one stream.
    pub fn stream(&self, stream: StreamId) -> impl Iterator<Item = &Found> {
        self.all.iter().filter(move |found| found.stream == stream)
    }

    /// The values of one stream.
    #[must_use]
    pub fn values(&self, stream: StreamId) -> Vec<&str> {
        self.stream(stream).map(|found| found.value.as_str()).collect()
    }

    /// The places of each value in a stream.
    #[must_use]
    pub fn by_value(&self) -> BTreeMap<(StreamId, &str), Vec<(Position, Offset)>> {
        let mut places: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for Found { stream, position, offset, value, .. } in &self.all {
            places.entry((*stream, value.as_str())).or_default().push((*position, *offset));
        }
        places
    }

    /// Stops the test where a stream's offsets are not 0, 1, 2 ...
    ///
    /// # Panics
    /// Then.
    pub fn check_offsets(&self) {
        let mut next: BTreeMap<StreamId, u64> = BTreeMap::new();
        for found in &self.all {
            let next = next.entry(found.stream).or_default();
            assert_eq!(found.offset.0, *next, "a gap or a repetition: {found:?}");
            *next += 1;
        }
    }
}
