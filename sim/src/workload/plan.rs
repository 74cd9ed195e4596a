//! A transaction as the application means it: what becomes of it can be compared with this.

use bytes::{BufMut, Bytes, BytesMut};
use client::Transaction;
use common::{IdempotencyId, KeyRange, Prng, Ranges, StreamId, Version};

use crate::observe::{Submission, TxnId};

/// Bytes of a transaction's name in front of each record's value.
const NAME_BYTES: usize = 8;

/// A key or a range of keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Span {
    Point(Vec<u8>),
    Range(Vec<u8>, Vec<u8>),
}

/// Whose idempotency id a transaction carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Naming {
    /// The session's own.
    Session,
    /// The application's: tried again under the same one.
    Application(IdempotencyId),
    /// None.
    None,
}

/// A record to be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Write {
    Append(Bytes),
    Put(Vec<u8>, Bytes),
}

/// A transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    pub(super) txn: TxnId,
    pub(super) naming: Naming,
    pub(super) read_version: Option<Version>,
    pub(super) reads: Vec<Span>,
    pub(super) writes: Vec<Span>,
    /// By stream, ascending.
    pub(super) records: Vec<(StreamId, Vec<Write>)>,
}

impl Plan {
    pub(super) const fn new(txn: TxnId) -> Self {
        Self {
            txn,
            naming: Naming::Session,
            read_version: None,
            reads: Vec::new(),
            writes: Vec::new(),
            records: Vec::new(),
        }
    }

    pub(super) fn transaction(&self) -> Transaction {
        let mut transaction = Transaction::new();
        match self.naming {
            Naming::Session => {}
            Naming::Application(id) => drop(transaction.idempotency_id(id)),
            Naming::None => drop(transaction.at_most_once()),
        }
        if let Some(version) = self.read_version {
            transaction.read_version(version);
        }
        for span in &self.reads {
            match span {
                Span::Point(key) => transaction.read_point(key),
                Span::Range(begin, end) => transaction.read(begin, end),
            };
        }
        for span in &self.writes {
            match span {
                Span::Point(key) => transaction.write_point(key),
                Span::Range(begin, end) => transaction.write(begin, end),
            };
        }
        for (stream, writes) in &self.records {
            for write in writes {
                match write {
                    Write::Append(value) => transaction.append(*stream, value.clone()),
                    Write::Put(key, value) => transaction.put(*stream, key.clone(), value.clone()),
                };
            }
        }
        transaction
    }

    pub(super) fn submission(&self) -> Submission {
        let id = match self.naming {
            Naming::Application(id) => Some(id),
            Naming::Session | Naming::None => None,
        };
        Submission {
            txn: self.txn,
            id,
            read_version: self.read_version.unwrap_or_default(),
            reads: ranges(&self.reads),
            writes: ranges(&self.writes),
            sections: self
                .records
                .iter()
                .map(|(stream, writes)| (*stream, writes.len() as u32))
                .collect(),
            is_in_lane: false,
        }
    }
}

fn ranges(spans: &[Span]) -> Ranges {
    let all = spans.iter().map(|span| match span {
        Span::Point(key) => KeyRange::point(key),
        Span::Range(begin, end) => KeyRange::new(begin, end).expect("the writer draws them so"),
    });
    Ranges::from_ranges(all)
}

/// The value of an event: the name, then bytes that follow from it.
pub(super) fn event_value(txn: TxnId, bytes: u64) -> Bytes {
    let mut value = vec![0; NAME_BYTES + (bytes / 8 * 8) as usize];
    let (words, _) = value.as_chunks_mut::<8>();
    let mut filler = Prng::new(txn.0);
    let name = core::iter::once(txn.0);
    for (word, drawn) in words.iter_mut().zip(name.chain(core::iter::repeat_with(|| filler.next())))
    {
        *word = drawn.to_le_bytes();
    }
    value.into()
}

/// The value of a balance: the name, then the balance.
pub(super) fn balance_value(txn: TxnId, balance: i64) -> Bytes {
    let mut value = BytesMut::with_capacity(NAME_BYTES + 8);
    value.put_u64_le(txn.0);
    value.put_i64_le(balance);
    value.freeze()
}

/// Elements that a list keeps, at most; the oldest go.
pub(super) const LIST_MAX: usize = 24;

/// The value of a list: the name, then the elements, the last of which is the name again.
pub(super) fn list_value(txn: TxnId, before: &[u64]) -> Bytes {
    let kept = &before[before.len().saturating_sub(LIST_MAX - 1)..];
    let mut value = BytesMut::with_capacity(2 * NAME_BYTES + 8 * kept.len());
    value.put_u64_le(txn.0);
    kept.iter().for_each(|element| value.put_u64_le(*element));
    value.put_u64_le(txn.0);
    value.freeze()
}

/// The elements in a value, if it is a list.
pub(super) fn list_of(value: &[u8]) -> Option<Vec<u64>> {
    let (words, rest) = value.get(NAME_BYTES..)?.as_chunks::<8>();
    rest.is_empty().then(|| words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

/// Whether a list goes on from what it was: one element more, nothing lost but the oldest.
pub(super) fn goes_on(before: &[u64], after: &[u64]) -> bool {
    let Some((_, kept)) = after.split_last() else { return false };
    let oldest = before.len().saturating_sub(LIST_MAX - 1);
    before[oldest..] == *kept
}

/// Whose record it is.
pub(super) fn txn_of(value: &[u8]) -> Option<TxnId> {
    let name = value.get(..NAME_BYTES)?.try_into().ok()?;
    Some(TxnId(u64::from_le_bytes(name)))
}

/// The balance in a value, if it is one.
pub(super) fn balance_of(value: &[u8]) -> Option<i64> {
    let bytes = value.get(NAME_BYTES..NAME_BYTES + 8)?.try_into().ok()?;
    Some(i64::from_le_bytes(bytes))
}

/// Whether an event's value is what its name says.
pub(super) fn is_whole(value: &[u8]) -> bool {
    let Some(txn) = txn_of(value) else { return false };
    let (words, rest) = value[NAME_BYTES..].as_chunks::<8>();
    let mut filler = Prng::new(txn.0);
    rest.is_empty() && words.iter().all(|word| u64::from_le_bytes(*word) == filler.next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_name_their_transaction_and_damage_shows() {
        let value = event_value(TxnId(7), 40);
        assert_eq!(txn_of(&value), Some(TxnId(7)));
        assert!(is_whole(&value));
        for at in 0..value.len() {
            let mut bad = value.to_vec();
            bad[at] ^= 1;
            assert!(!is_whole(&bad), "byte {at}");
        }
        let list = list_of(&list_value(TxnId(3), &[1, 2])).unwrap();
        assert_eq!(list, [1, 2, 3]);
        assert!(goes_on(&[1, 2], &list) && !goes_on(&[1], &list) && !goes_on(&[1, 2, 9], &list));
        let long: Vec<u64> = (0..LIST_MAX as u64).collect();
        assert!(goes_on(&long, &list_of(&list_value(TxnId(99), &long)).unwrap()));
        let value = balance_value(TxnId(8), -5);
        assert_eq!((txn_of(&value), balance_of(&value)), (Some(TxnId(8)), Some(-5)));
    }
}
