//! Single keys: a hash table from keys to the last batch that wrote them.
//!
//! ```text
//! bucket, one cache line      tags  6 x 16 bits | spilled | numbers  6 x 32 bits | keys  6 x 32 bits
//!
//! place of a hash   | 0 | 1 | 2 | 3 | 4 | 5 |         linear hashing: 6 buckets are the first 4 and the
//!                     ^split: 0 and 1 are done        halves of 0 and 1; the next split parts bucket 2
//! ```
//!
//! A slot with a number at or below the window's dead ones is free: eviction of points costs nothing, and
//! sweeping only counts. A match of 16 bits is settled by the key itself, in the log; so no verdict depends
//! on the hash. What doesn't fit its bucket spills into an ordered map: rare with good hashes, and with
//! hostile keys the worst case is the map's.
//!
//! # Invariants
//! - a key is in one live slot at most: of its bucket or of the spill
//! - `spilled` of a bucket counts the keys of the spill that belong to it
//! - `occupied` counts the slots with a number, dead ones included

use std::collections::BTreeMap;

use super::hash::hash;
use super::keylog::{KeyLog, KeyRef};
use super::window::Seq;

const SLOTS: usize = 6;
/// Buckets that are allocated together.
const SEGMENT: usize = 1 << SEGMENT_BITS;
const SEGMENT_BITS: u32 = 12;
/// Occupied slots for two buckets: more, and the table grows; fewer than a fourth, and it shrinks.
const LOAD_OF_TWO: usize = 5;
/// Bytes of an entry of the spill besides its key, about.
const SPILL_OVERHEAD_BYTES: usize = 120;

#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket {
    tags: [u16; SLOTS],
    spilled: u32,
    seqs: [Seq; SLOTS],
    keys: [KeyRef; SLOTS],
}

const _: () = assert!(size_of::<Bucket>() == 64);

/// Where the keys of a hash are; good until the table grows or shrinks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place(u32);

#[derive(Clone, Debug)]
pub(super) struct Points {
    segments: Vec<Vec<Bucket>>,
    buckets: usize,
    occupied: usize,
    /// By the hash with its bits reversed, so that the keys of a bucket are neighbours.
    spill: BTreeMap<u64, BTreeMap<Box<[u8]>, Seq>>,
    spilled: usize,
    spilled_bytes: usize,
    /// The next bucket that the sweep looks at.
    sweep_at: usize,
    /// Where the sweep of the spill goes on.
    spill_at: u64,
}

impl Points {
    pub(super) fn new() -> Self {
        Self {
            segments: vec![vec![Bucket::default()]],
            buckets: 1,
            occupied: 0,
            spill: BTreeMap::new(),
            spilled: 0,
            spilled_bytes: 0,
            sweep_at: 0,
            spill_at: 0,
        }
    }

    /// Keys, those that left the window but were not swept yet included.
    pub(super) const fn len(&self) -> usize {
        self.occupied + self.spilled
    }

    pub(super) const fn memory_bytes(&self) -> usize {
        self.buckets * size_of::<Bucket>()
            + self.spilled_bytes
            + self.spilled * SPILL_OVERHEAD_BYTES
    }

    pub(super) fn place(&self, hash: u64) -> Place {
        // Whole powers of two first; what lies beyond the table is not split yet.
        let round = self.buckets.next_power_of_two();
        let place = hash as usize & (round - 1);
        Place(if place < self.buckets { place } else { place & (round / 2 - 1) } as u32)
    }

    fn bucket(&self, place: Place) -> &Bucket {
        let place = place.0 as usize;
        &self.segments[place >> SEGMENT_BITS][place & (SEGMENT - 1)]
    }

    fn bucket_mut(&mut self, place: Place) -> &mut Bucket {
        let place = place.0 as usize;
        &mut self.segments[place >> SEGMENT_BITS][place & (SEGMENT - 1)]
    }

    /// The line of a bucket, so that it is near when it is needed.
    pub(super) fn touch(&self, place: Place) -> u32 {
        self.bucket(place).spilled
    }

    /// The line of the key that a write or a reader behind `seen` will compare with.
    pub(super) fn touch_key(&self, place: Place, hash: u64, seen: Seq, log: &KeyLog) -> usize {
        let (bucket, tag) = (self.bucket(place), tag(hash));
        let slot = (0..SLOTS).find(|slot| bucket.tags[*slot] == tag && bucket.seqs[*slot] > seen);
        slot.map_or(0, |slot| log.touch(bucket.keys[slot]))
    }

    /// The last batch after `seen` that wrote `key`; none if there was none. `seen` must not be dead.
    pub(super) fn newer(
        &self,
        place: Place,
        hash: u64,
        key: &[u8],
        seen: Seq,
        log: &KeyLog,
    ) -> Seq {
        let (bucket, tag) = (self.bucket(place), tag(hash));
        for slot in 0..SLOTS {
            if bucket.seqs[slot] > seen
                && bucket.tags[slot] == tag
                && log.key(bucket.keys[slot]) == key
            {
                return bucket.seqs[slot];
            }
        }
        if bucket.spilled == 0 {
            return Seq::NONE;
        }
        let spilled = self.spill.get(&hash.reverse_bits()).and_then(|keys| keys.get(key));
        spilled.copied().filter(|seq| *seq > seen).unwrap_or_default()
    }

    /// Batch `seq` writes `key`. Returns where the log has it now; nothing if the batch wrote it before.
    pub(super) fn write(
        &mut self,
        (place, hash, key): (Place, u64, &[u8]),
        (seq, dead): (Seq, Seq),
        log: &mut KeyLog,
    ) -> Option<KeyRef> {
        let tag = tag(hash);
        let bucket = self.bucket_mut(place);
        let mut free = None;
        for slot in 0..SLOTS {
            if bucket.seqs[slot] <= dead {
                free = free.or(Some(slot));
            } else if bucket.tags[slot] == tag && log.key(bucket.keys[slot]) == key {
                if bucket.seqs[slot] == seq {
                    return None;
                }
                let at = log.append(key, seq);
                (bucket.seqs[slot], bucket.keys[slot]) = (seq, at);
                return Some(at);
            }
        }
        if bucket.spilled > 0 && self.unspill(place, hash, key) == seq {
            self.spill(place, hash, key, seq);
            return None;
        }
        let at = log.append(key, seq);
        match free {
            Some(slot) => {
                let bucket = self.bucket_mut(place);
                let is_new = bucket.seqs[slot] == Seq::NONE;
                (bucket.tags[slot], bucket.seqs[slot], bucket.keys[slot]) = (tag, seq, at);
                self.occupied += usize::from(is_new);
            }
            None => self.spill(place, hash, key, seq),
        }
        Some(at)
    }

    fn spill(&mut self, place: Place, hash: u64, key: &[u8], seq: Seq) {
        let before = self.spill.entry(hash.reverse_bits()).or_default().insert(key.into(), seq);
        assert_eq!(before, None, "a key spills once, at {seq:?}");
        self.spilled += 1;
        self.spilled_bytes += key.len();
        self.bucket_mut(place).spilled += 1;
    }

    /// Takes a key out of the spill: the batch that wrote it, or none.
    fn unspill(&mut self, place: Place, hash: u64, key: &[u8]) -> Seq {
        let Some(keys) = self.spill.get_mut(&hash.reverse_bits()) else { return Seq::NONE };
        let Some(seq) = keys.remove(key) else { return Seq::NONE };
        if keys.is_empty() {
            self.spill.remove(&hash.reverse_bits());
        }
        self.spilled -= 1;
        self.spilled_bytes -= key.len();
        self.bucket_mut(place).spilled -= 1;
        seq
    }

    /// Makes room for `more` keys.
    pub(super) fn grow(&mut self, more: usize, dead: Seq, log: &KeyLog) {
        let wanted = (self.len() + more) * 2 / LOAD_OF_TWO;
        while self.buckets < wanted {
            self.split(dead, log);
        }
    }

    /// Adds a bucket and gives it its half of the one that had its keys so far.
    fn split(&mut self, dead: Seq, log: &KeyLog) {
        let (parted, bits) = self.half(self.buckets);
        if self.segments.last().is_none_or(|segment| segment.len() == SEGMENT) {
            self.segments.push(Vec::new());
        }
        self.segments.last_mut().expect("one was pushed").push(Bucket::default());
        self.buckets += 1;
        let bucket = core::mem::take(self.bucket_mut(parted));
        self.lay_again(&[bucket], parted, bits, dead, log);
    }

    /// Takes the last bucket away and gives its keys back to the one that it was parted from.
    fn join(&mut self, dead: Seq, log: &KeyLog) {
        assert!(self.buckets > 1, "the last of {} buckets", self.buckets);
        self.buckets -= 1;
        let segment = self.segments.last_mut().expect("there is a bucket");
        let gone = segment.pop().expect("no segment is empty");
        if segment.is_empty() {
            self.segments.pop();
        }
        let (joined, bits) = self.half(self.buckets);
        let bucket = core::mem::take(self.bucket_mut(joined));
        self.lay_again(&[bucket, gone], joined, bits, dead, log);
    }

    /// The bucket that shares the keys of bucket `added`, and how many low bits of their hashes are alike.
    fn half(&self, added: usize) -> (Place, u32) {
        let bits = added.ilog2();
        (Place((added - (1 << bits)) as u32), bits)
    }

    /// Puts the keys of buckets that were taken out where they belong now.
    fn lay_again(&mut self, buckets: &[Bucket], place: Place, bits: u32, dead: Seq, log: &KeyLog) {
        let spilled: usize = buckets.iter().map(|bucket| bucket.spilled as usize).sum();
        let drained = if spilled > 0 { self.drain_spill(place, bits) } else { Vec::new() };
        assert_eq!(drained.len(), spilled, "spilled keys of {place:?}");
        for (bucket, slot) in buckets.iter().flat_map(|b| (0..SLOTS).map(move |slot| (b, slot))) {
            let (seq, at) = (bucket.seqs[slot], bucket.keys[slot]);
            self.occupied -= usize::from(seq != Seq::NONE);
            if seq > dead {
                self.put(hash(log.key(at)), at, seq, log);
            }
        }
        for (hash, key, seq) in drained {
            if seq > dead {
                self.spill(self.place(hash), hash, &key, seq);
            }
        }
    }

    /// Empties the spill of the keys whose hashes have the low `bits` of `place`.
    fn drain_spill(&mut self, place: Place, bits: u32) -> Vec<(u64, Box<[u8]>, Seq)> {
        let first = u64::from(place.0).reverse_bits();
        let last = first | u64::MAX.checked_shr(bits).unwrap_or(0);
        let hashes: Vec<u64> = self.spill.range(first..=last).map(|(hash, _)| *hash).collect();
        let mut drained = Vec::new();
        for reversed in hashes {
            let keys = self.spill.remove(&reversed).expect("it was there");
            for (key, seq) in keys {
                self.spilled -= 1;
                self.spilled_bytes -= key.len();
                drained.push((reversed.reverse_bits(), key, seq));
            }
        }
        drained
    }

    fn put(&mut self, hash: u64, at: KeyRef, seq: Seq, log: &KeyLog) {
        let place = self.place(hash);
        let bucket = self.bucket_mut(place);
        match (0..SLOTS).find(|slot| bucket.seqs[*slot] == Seq::NONE) {
            Some(slot) => {
                (bucket.tags[slot], bucket.seqs[slot], bucket.keys[slot]) = (tag(hash), seq, at);
                self.occupied += 1;
            }
            None => self.spill(place, hash, log.key(at), seq),
        }
    }

    /// Looks at `buckets` buckets and as many spilled hashes, forgets what is dead, and makes the table
    /// smaller by up to a fourth as many buckets if it is far too large.
    pub(super) fn sweep(&mut self, dead: Seq, log: &KeyLog, buckets: usize) {
        for _ in 0..buckets.min(self.buckets) {
            self.sweep_at = if self.sweep_at + 1 < self.buckets { self.sweep_at + 1 } else { 0 };
            let bucket = self.bucket_mut(Place(self.sweep_at as u32));
            let mut gone = 0;
            for seq in &mut bucket.seqs {
                if *seq != Seq::NONE && *seq <= dead {
                    *seq = Seq::NONE;
                    gone += 1;
                }
            }
            self.occupied -= gone;
        }
        self.sweep_spill(dead, buckets);
        for _ in 0..buckets.div_ceil(4) {
            if self.buckets == 1 || self.buckets <= self.len() * 8 / LOAD_OF_TWO {
                break;
            }
            self.join(dead, log);
        }
    }

    fn sweep_spill(&mut self, dead: Seq, hashes: usize) {
        if self.spilled == 0 {
            return;
        }
        let looked_at: Vec<u64> =
            self.spill.range(self.spill_at..).take(hashes).map(|(hash, _)| *hash).collect();
        self.spill_at = match looked_at.last() {
            Some(last) if looked_at.len() == hashes => last.wrapping_add(1),
            _ => 0,
        };
        for reversed in looked_at {
            let keys = &self.spill[&reversed];
            let gone: Vec<_> = keys.iter().filter(|(_, seq)| **seq <= dead).collect();
            let gone: Vec<Box<[u8]>> = gone.into_iter().map(|(key, _)| key.clone()).collect();
            let hash = reversed.reverse_bits();
            for key in gone {
                self.unspill(self.place(hash), hash, &key);
            }
        }
    }

    /// Takes `by` off the numbers of the batches; those that end up below 1 are free.
    pub(super) fn renumber(&mut self, by: u32) {
        for bucket in self.segments.iter_mut().flatten() {
            for seq in &mut bucket.seqs {
                let was = core::mem::replace(seq, Seq(seq.0.saturating_sub(by)));
                self.occupied -= usize::from(was != Seq::NONE && *seq == Seq::NONE);
            }
        }
        for seq in self.spill.values_mut().flat_map(BTreeMap::values_mut) {
            seq.0 = seq.0.saturating_sub(by);
        }
    }

    /// All keys with the last batch that wrote them, in no order.
    pub(super) fn iter<'a>(
        &'a self,
        dead: Seq,
        log: &'a KeyLog,
    ) -> impl Iterator<Item = (&'a [u8], Seq)> {
        let in_buckets = self.segments.iter().flatten().flat_map(move |bucket| {
            (0..SLOTS)
                .filter(move |slot| bucket.seqs[*slot] > dead)
                .map(move |slot| (log.key(bucket.keys[slot]), bucket.seqs[slot]))
        });
        let spilled = self.spill.values().flatten().map(|(key, seq)| (&**key, *seq));
        in_buckets.chain(spilled.filter(move |(_, seq)| *seq > dead))
    }

    pub(super) fn check(&self, window: (Seq, Seq), log: &KeyLog) {
        let (dead, newest) = window;
        let mut keys = std::collections::BTreeSet::new();
        for (key, seq) in self.iter(dead, log) {
            assert!(seq <= newest, "{key:?} of {seq:?}, newest {newest:?}");
            assert!(keys.insert(key), "{key:?} is there twice");
            assert_eq!(self.newer(self.place(hash(key)), hash(key), key, dead, log), seq);
        }
        let buckets: usize = self.segments.iter().map(Vec::len).sum();
        assert_eq!(buckets, self.buckets, "buckets of the segments");
        let all = self.segments.iter().flatten();
        let occupied = all.clone().flat_map(|b| b.seqs).filter(|seq| *seq != Seq::NONE).count();
        assert_eq!(occupied, self.occupied, "occupied slots");
        assert_eq!(all.map(|b| b.spilled as usize).sum::<usize>(), self.spilled, "spilled keys");
        assert_eq!(self.spill.values().map(BTreeMap::len).sum::<usize>(), self.spilled);
    }
}

/// The bits of a hash that a slot keeps; the place has the low ones.
const fn tag(hash: u64) -> u16 {
    (hash >> 48) as u16
}
