//! Single keys: a hash table from keys to the last batch that wrote them.
//!
//! ```text
//! bucket, one cache line      tags  6 x 16 bits | spilled | numbers  6 x 32 bits | keys  6 x 32 bits
//!
//! place of a hash   | 0 | 1 | 2 | 3 | 4 | 5 |         growing from 4 to 8: 0 and 1 are split already, into
//!                             ^next to be split       themselves and 4 and 5; a few in each batch
//! ```
//!
//! A slot with a number at or below the dead ones is free: eviction of points costs nothing, the number of
//! live ones is known since each batch's are counted. A match of 16 bits is settled by the key itself, in the
//! log; so no verdict depends on the hash. What doesn't fit its bucket spills into an ordered map: rare with
//! good hashes, and with hostile keys the worst case is the map's. Only the spill has to be swept.
//!
//! # Invariants
//! - a key is live in one place at most: in its bucket or in the spill
//! - `spilled` of a bucket counts the keys of the spill that belong to it, dead ones included
//! - `written` has for each batch of the window how many keys it was the last to write; `live` is their sum

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::hash::hash;
use super::keylog::{KeyLog, KeyRef};
use super::window::Seq;

const SLOTS: usize = 6;
/// Buckets that are allocated together: 4 MiB, so that most of it can be huge pages.
const SEGMENT: usize = 1 << SEGMENT_BITS;
const SEGMENT_BITS: u32 = if cfg!(test) { 1 } else { 16 };
/// Live keys for two buckets: more, and the table grows to twice its size; fewer than a sixth, and it
/// shrinks. In tests many keys spill.
const LOAD_OF_TWO: usize = if cfg!(test) { 16 } else { 5 };
/// Buckets that a batch splits while the table grows, and for each point that it writes.
const SPLITS_MIN: usize = if cfg!(test) { 1 } else { 64 };
const SPLITS_PER_WRITE: usize = 1;
/// Splits whose keys are asked for together.
const SPLITS_NEAR: usize = 8;
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

/// A key that found no room in its bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Spilled {
    seq: Seq,
    at: KeyRef,
}

/// Where the keys of a hash are; good until the table grows or shrinks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place(u32);

#[derive(Clone, Debug)]
pub(super) struct Points {
    segments: Vec<Vec<Bucket>>,
    buckets: usize,
    dead: Seq,
    /// For each batch from `dead` on; the first place is always 0.
    written: VecDeque<u32>,
    live: usize,
    /// By the hash with its bits reversed, so that the keys of a bucket are neighbours.
    spill: BTreeMap<u64, BTreeMap<Box<[u8]>, Spilled>>,
    spilled: usize,
    spilled_bytes: usize,
    /// Where the sweep of the spill goes on.
    spill_at: u64,
}

impl Points {
    pub(super) fn new() -> Self {
        Self {
            segments: vec![vec![Bucket::default()]],
            buckets: 1,
            dead: Seq::NONE,
            written: VecDeque::from([0]),
            live: 0,
            spill: BTreeMap::new(),
            spilled: 0,
            spilled_bytes: 0,
            spill_at: 0,
        }
    }

    /// Keys that were written in the window.
    pub(super) const fn len(&self) -> usize {
        self.live
    }

    /// Whether nothing dead is left where it takes memory.
    pub(super) fn is_swept(&self) -> bool {
        self.spilled <= self.live && self.buckets <= Self::buckets_max(self.live)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.buckets * size_of::<Bucket>()
            + self.spilled_bytes
            + self.spilled * SPILL_OVERHEAD_BYTES
            + self.written.len() * size_of::<u32>()
    }

    /// The buckets beyond which the table shrinks.
    const fn buckets_max(live: usize) -> usize {
        live * 12 / LOAD_OF_TWO + 1
    }

    /// Forgets the batches up to `dead`.
    pub(super) fn expire(&mut self, dead: Seq) {
        while self.dead < dead {
            self.dead = self.dead.next();
            self.written.pop_front();
            if let Some(first) = self.written.front_mut() {
                self.live -= core::mem::take(first) as usize;
            } else {
                self.written.push_back(0);
            }
        }
    }

    /// The numbers of the batches begin behind `dead`. The table must be empty.
    #[cfg(test)]
    pub(super) fn start_at(&mut self, dead: Seq) {
        assert_eq!(self.live, 0, "keys have numbers");
        self.dead = dead;
    }

    /// Counts a key that `seq` writes and that `before` wrote last, or nobody alive.
    fn count(&mut self, before: Seq, seq: Seq) {
        let dead = self.dead;
        let place = |seq: Seq| (seq.0 - dead.0) as usize;
        if before > dead {
            self.written[place(before)] -= 1;
            self.live -= 1;
        }
        if self.written.len() <= place(seq) {
            self.written.resize(place(seq) + 1, 0);
        }
        self.written[place(seq)] += 1;
        self.live += 1;
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
    #[inline]
    pub(super) fn touch(&self, place: Place) -> u32 {
        self.bucket(place).spilled
    }

    /// The key that a write, or a reader behind `seen`, will be compared with.
    #[inline]
    pub(super) fn key_to_compare(&self, place: Place, hash: u64, seen: Seq) -> Option<KeyRef> {
        let (bucket, tag) = (self.bucket(place), tag(hash));
        let slot =
            (0..SLOTS).find(|slot| bucket.tags[*slot] == tag && bucket.seqs[*slot] > seen)?;
        Some(bucket.keys[slot])
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
        spilled.map(|spilled| spilled.seq).filter(|seq| *seq > seen).unwrap_or_default()
    }

    /// Batch `seq` writes `key`. Returns where the log has it now; nothing if the batch wrote it before.
    pub(super) fn write(
        &mut self,
        (place, hash, key): (Place, u64, &[u8]),
        seq: Seq,
        log: &mut KeyLog,
    ) -> Option<KeyRef> {
        let (tag, dead) = (tag(hash), self.dead);
        let bucket = self.bucket_mut(place);
        let mut free = None;
        for slot in 0..SLOTS {
            let before = bucket.seqs[slot];
            if before <= dead {
                free = Some(slot);
            } else if bucket.tags[slot] == tag && log.key(bucket.keys[slot]) == key {
                if before == seq {
                    return None;
                }
                let at = log.append(key, seq);
                (bucket.seqs[slot], bucket.keys[slot]) = (seq, at);
                self.count(before, seq);
                return Some(at);
            }
        }
        let mut before = Seq::NONE;
        if bucket.spilled > 0
            && let Some(spilled) = self.unspill(place, hash, key)
        {
            before = spilled.seq;
            if before == seq {
                self.spill(place, hash, key, spilled);
                return None;
            }
        }
        let at = log.append(key, seq);
        self.count(before, seq);
        match free {
            Some(slot) => {
                let bucket = self.bucket_mut(place);
                (bucket.tags[slot], bucket.seqs[slot], bucket.keys[slot]) = (tag, seq, at);
            }
            None => self.spill(place, hash, key, Spilled { seq, at }),
        }
        Some(at)
    }

    fn spill(&mut self, place: Place, hash: u64, key: &[u8], spilled: Spilled) {
        let keys = self.spill.entry(hash.reverse_bits()).or_default();
        let before = keys.insert(key.into(), spilled);
        assert_eq!(before, None, "a key spills once, at {spilled:?}");
        self.spilled += 1;
        self.spilled_bytes += key.len();
        self.bucket_mut(place).spilled += 1;
    }

    /// Takes a key out of the spill, if it is there.
    fn unspill(&mut self, place: Place, hash: u64, key: &[u8]) -> Option<Spilled> {
        let keys = self.spill.get_mut(&hash.reverse_bits())?;
        let spilled = keys.remove(key)?;
        if keys.is_empty() {
            self.spill.remove(&hash.reverse_bits());
        }
        self.spilled -= 1;
        self.spilled_bytes -= key.len();
        self.bucket_mut(place).spilled -= 1;
        Some(spilled)
    }

    /// Makes room for `more` keys, in a bounded step. The table grows to the next power of two: until then
    /// some buckets have twice the keys of others.
    pub(super) fn grow(&mut self, more: usize, log: &KeyLog) {
        let is_growing = !self.buckets.is_power_of_two();
        let wanted = (self.live + more) * 2 / LOAD_OF_TWO;
        if is_growing || self.buckets < wanted {
            let splits = SPLITS_MIN + more * SPLITS_PER_WRITE;
            let end = self.buckets.next_power_of_two() * if is_growing { 1 } else { 2 };
            let end = end.min(self.buckets + splits);
            while self.buckets < end {
                if self.buckets.is_multiple_of(SPLITS_NEAR) {
                    self.bring_near(log);
                }
                self.split(log);
            }
        }
    }

    /// Asks for the keys of the buckets that are split next, so that their misses overlap.
    fn bring_near(&self, log: &KeyLog) {
        let (first, _) = self.half(self.buckets);
        let buckets = (first.0..first.0 + SPLITS_NEAR as u32).map(Place);
        let buckets = buckets.filter(|place| (place.0 as usize) < self.buckets);
        let mut sum = 0;
        for bucket in buckets.map(|place| self.bucket(place)) {
            for (seq, key) in bucket.seqs.iter().zip(&bucket.keys) {
                sum ^= if *seq > self.dead { log.touch(*key) } else { 0 };
            }
        }
        core::hint::black_box(sum);
    }

    /// Adds a bucket and gives it its half of the one that had its keys so far.
    fn split(&mut self, log: &KeyLog) {
        let (parted, bits) = self.half(self.buckets);
        if self.segments.last().is_none_or(|segment| segment.len() == SEGMENT) {
            self.segments.push(Vec::with_capacity(SEGMENT));
        }
        self.segments.last_mut().expect("one was pushed").push(Bucket::default());
        self.buckets += 1;
        let bucket = core::mem::take(self.bucket_mut(parted));
        self.lay_again(&[bucket], parted, bits, log);
    }

    /// Takes the last bucket away and gives its keys back to the one that it was parted from.
    fn join(&mut self, log: &KeyLog) {
        assert!(self.buckets > 1, "the last of {} buckets", self.buckets);
        self.buckets -= 1;
        let segment = self.segments.last_mut().expect("there is a bucket");
        let gone = segment.pop().expect("no segment is empty");
        if segment.is_empty() {
            self.segments.pop();
        }
        let (joined, bits) = self.half(self.buckets);
        let bucket = core::mem::take(self.bucket_mut(joined));
        self.lay_again(&[bucket, gone], joined, bits, log);
    }

    /// The bucket that shares the keys of bucket `added`, and how many low bits of their hashes are alike.
    fn half(&self, added: usize) -> (Place, u32) {
        let bits = added.ilog2();
        (Place((added - (1 << bits)) as u32), bits)
    }

    /// Puts the keys of buckets that were taken out where they belong now.
    fn lay_again(&mut self, buckets: &[Bucket], place: Place, bits: u32, log: &KeyLog) {
        let spilled: usize = buckets.iter().map(|bucket| bucket.spilled as usize).sum();
        let drained = if spilled > 0 { self.drain_spill(place, bits) } else { Vec::new() };
        assert_eq!(drained.len(), spilled, "spilled keys of {place:?}");
        for (bucket, slot) in buckets.iter().flat_map(|b| (0..SLOTS).map(move |slot| (b, slot))) {
            let (seq, at) = (bucket.seqs[slot], bucket.keys[slot]);
            if seq > self.dead {
                self.put(hash(log.key(at)), at, seq, log);
            }
        }
        for (hash, Spilled { seq, at }) in drained {
            if seq > self.dead {
                self.put(hash, at, seq, log);
            }
        }
    }

    /// Empties the spill of the keys whose hashes have the low `bits` of `place`.
    fn drain_spill(&mut self, place: Place, bits: u32) -> Vec<(u64, Spilled)> {
        let first = u64::from(place.0).reverse_bits();
        let last = first | u64::MAX.checked_shr(bits).unwrap_or(0);
        let hashes: Vec<u64> = self.spill.range(first..=last).map(|(hash, _)| *hash).collect();
        let mut drained = Vec::new();
        for reversed in hashes {
            let keys = self.spill.remove(&reversed).expect("it was there");
            for (key, spilled) in keys {
                self.spilled -= 1;
                self.spilled_bytes -= key.len();
                drained.push((reversed.reverse_bits(), spilled));
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
            }
            None => self.spill(place, hash, log.key(at), Spilled { seq, at }),
        }
    }

    /// Looks at up to `entries` spilled hashes, forgets what is dead there, and takes away up to as many
    /// buckets if the table is far too large.
    pub(super) fn sweep(&mut self, log: &KeyLog, entries: usize) {
        if self.spilled > 0 {
            self.sweep_spill(entries);
        }
        for _ in 0..entries {
            if self.buckets <= Self::buckets_max(self.live) {
                break;
            }
            self.join(log);
        }
    }

    fn sweep_spill(&mut self, hashes: usize) {
        let looked_at: Vec<u64> =
            self.spill.range(self.spill_at..).take(hashes).map(|(hash, _)| *hash).collect();
        self.spill_at = match looked_at.last() {
            Some(last) if looked_at.len() == hashes => last.wrapping_add(1),
            _ => 0,
        };
        for reversed in looked_at {
            let dead = self.spill[&reversed].iter().filter(|(_, spilled)| spilled.seq <= self.dead);
            let gone: Vec<Box<[u8]>> = dead.map(|(key, _)| key.clone()).collect();
            let hash = reversed.reverse_bits();
            for key in gone {
                self.unspill(self.place(hash), hash, &key);
            }
        }
    }

    /// Takes `by` off the numbers of the batches; those that end up below 1 are free.
    pub(super) fn renumber(&mut self, by: u32) {
        assert!(by <= self.dead.0, "{by} is above the dead {:?}", self.dead);
        self.dead.0 -= by;
        for bucket in self.segments.iter_mut().flatten() {
            for seq in &mut bucket.seqs {
                seq.0 = seq.0.saturating_sub(by);
            }
        }
        for spilled in self.spill.values_mut().flat_map(BTreeMap::values_mut) {
            spilled.seq.0 = spilled.seq.0.saturating_sub(by);
        }
    }

    /// All live keys with the last batch that wrote them, in no order.
    pub(super) fn iter<'a>(&'a self, log: &'a KeyLog) -> impl Iterator<Item = (&'a [u8], Seq)> {
        let dead = self.dead;
        let in_buckets = self.segments.iter().flatten().flat_map(move |bucket| {
            (0..SLOTS)
                .filter(move |slot| bucket.seqs[*slot] > dead)
                .map(move |slot| (log.key(bucket.keys[slot]), bucket.seqs[slot]))
        });
        let spilled = self.spill.values().flatten().map(|(key, spilled)| (&**key, spilled.seq));
        in_buckets.chain(spilled.filter(move |(_, seq)| *seq > dead))
    }

    pub(super) fn check(&self, window: (Seq, Seq), log: &KeyLog) {
        assert_eq!(window.0, self.dead, "the dead of the window");
        let mut written = vec![0; self.written.len()];
        let mut keys = BTreeSet::new();
        for (key, seq) in self.iter(log) {
            assert!(seq <= window.1, "{key:?} of {seq:?}, newest {:?}", window.1);
            assert!(keys.insert(key), "{key:?} is there twice");
            assert_eq!(self.newer(self.place(hash(key)), hash(key), key, self.dead, log), seq);
            written[(seq.0 - self.dead.0) as usize] += 1;
        }
        assert_eq!(keys.len(), self.live, "live keys");
        assert_eq!(self.written, written, "keys by batch");
        let buckets: usize = self.segments.iter().map(Vec::len).sum();
        assert_eq!(buckets, self.buckets, "buckets of the segments");
        let spilled = self.segments.iter().flatten().map(|b| b.spilled as usize).sum::<usize>();
        assert_eq!(spilled, self.spilled, "spilled keys");
        assert_eq!(self.spill.values().map(BTreeMap::len).sum::<usize>(), self.spilled);
    }
}

/// The bits of a hash that a slot keeps; the place has the low ones.
const fn tag(hash: u64) -> u16 {
    // In tests different keys have equal tags.
    (hash >> 48) as u16 & if cfg!(test) { 1 } else { u16::MAX }
}
