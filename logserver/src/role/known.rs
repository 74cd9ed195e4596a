//! The ids of recent transactions: appended in the order of versions, found by id, forgotten from the front.
//!
//! ```text
//! blocks   v10  v20  v30  v40 ...       what the log says of each version's ids, as it was pushed
//! runs     [ v10 .. v20 ][ v30 ]        (id, version), sorted; small neighbours are merged
//! young                         v40     (id, version), as they came
//! ```
//!
//! Every transaction enters an id, and hardly one is ever looked for. So entering is an append and a share in
//! sorting small runs, all in warm memory; one ordered map of millions of random ids took a fifth of a busy
//! log server's time. Looking for an id takes a look at `young` and a binary search in each run.
//!
//! # Invariants
//! ```text
//! blocks ascend; every id of a block is in `young` or in one run
//! an id whose block is gone counts as forgotten, though a run may still hold it
//! ```

use std::collections::VecDeque;

use bytes::Bytes;
use common::{IdempotencyId, Version, WallTime};

/// Ids that are not sorted, at most, unless one version alone has more.
const YOUNG_MAX: usize = 1024;
/// Runs are merged up to this length: a longer merge would take too long at once.
const RUN_MAX: usize = 64 << 10;

/// The block of a version's ids.
#[derive(Clone, Debug)]
pub(super) struct IdBlock {
    pub(super) version: Version,
    pub(super) commit_time: WallTime,
    pub(super) body: Bytes,
    count: usize,
}

/// Ordered like the id's bytes, but by two comparisons.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Key {
    id: [u64; 2],
    version: Version,
}

#[derive(Clone, Debug)]
struct Run {
    /// Ascending.
    keys: Vec<Key>,
    /// No version is above.
    last: Version,
}

/// Recent ids.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownIds {
    blocks: VecDeque<IdBlock>,
    runs: VecDeque<Run>,
    young: Vec<Key>,
    count: usize,
}

fn words(id: IdempotencyId) -> [u64; 2] {
    let both = u128::from_be_bytes(id.0);
    [(both >> 64) as u64, both as u64]
}

impl KnownIds {
    /// How many.
    pub(super) const fn len(&self) -> usize {
        self.count
    }

    /// The oldest version that has ids.
    pub(super) fn first(&self) -> Option<Version> {
        self.blocks.front().map(|block| block.version)
    }

    /// Enters the ids of a version.
    pub(super) fn enter(
        &mut self,
        version: Version,
        commit_time: WallTime,
        body: &Bytes,
        ids: &[IdempotencyId],
    ) {
        if let Some(last) = self.blocks.back() {
            assert!(last.version < version, "I1: ids of {version} after {}", last.version);
        }
        // A copy: the original would hold the whole batch in memory as long as its ids are remembered.
        let body = Bytes::copy_from_slice(body);
        self.blocks.push_back(IdBlock { version, commit_time, body, count: ids.len() });
        self.count += ids.len();
        self.young.extend(ids.iter().map(|id| Key { id: words(*id), version }));
        if self.young.len() >= YOUNG_MAX {
            self.sort_young(version);
        }
    }

    fn sort_young(&mut self, last: Version) {
        let mut run = Run { keys: core::mem::take(&mut self.young), last };
        run.keys.sort_unstable();
        while let Some(before) = self.runs.back()
            && before.keys.len() <= 2 * run.keys.len()
            && before.keys.len() + run.keys.len() <= RUN_MAX
        {
            let mut merged = self.runs.pop_back().expect("it was just looked at").keys;
            merged.append(&mut run.keys);
            // A stable sort finds the two runs and merges them.
            merged.sort();
            run.keys = merged;
        }
        self.runs.push_back(run);
    }

    /// The block of the newest version at or below `through` that has the id.
    pub(super) fn find(&self, id: IdempotencyId, through: Version) -> Option<&IdBlock> {
        let (id, first) = (words(id), self.first()?);
        let from = Key { id, version: first };
        let in_runs = self.runs.iter().flat_map(|run| {
            let place = run.keys.partition_point(|key| *key < from);
            run.keys[place..].iter().take_while(|key| key.id == id)
        });
        let in_young = self.young.iter().filter(|key| key.id == id);
        let versions = in_runs.chain(in_young).map(|key| key.version);
        let version = versions.filter(|version| (first..=through).contains(version)).max()?;
        let place = self.blocks.binary_search_by_key(&version, |block| block.version);
        Some(&self.blocks[place.expect("the blocks are remembered from the first one on")])
    }

    /// Forgets the oldest version that has ids.
    pub(super) fn forget_first(&mut self) -> Option<Version> {
        let block = self.blocks.pop_front()?;
        self.count -= block.count;
        while self.runs.front().is_some_and(|run| run.last <= block.version) {
            self.runs.pop_front();
        }
        if self.blocks.is_empty() {
            self.young.clear();
        }
        Some(block.version)
    }

    /// Versions above `version` are no part of history.
    pub(super) fn drop_above(&mut self, version: Version) {
        while let Some(block) = self.blocks.pop_back_if(|block| block.version > version) {
            self.count -= block.count;
        }
        self.young.retain(|key| key.version <= version);
        for run in self.runs.iter_mut().filter(|run| run.last > version) {
            run.keys.retain(|key| key.version <= version);
            run.last = version;
        }
        self.runs.retain(|run| !run.keys.is_empty());
    }

    /// The state's ordering chain.
    pub(super) fn check(&self) {
        assert!(
            self.young.len() < YOUNG_MAX && self.runs.len() <= 64 + self.count / (RUN_MAX / 4),
            "{} young ids and {} runs of {} ids",
            self.young.len(),
            self.runs.len(),
            self.count
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Enter(Vec<u8>),
        Many(u16),
        Forget,
        Drop(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => prop::collection::vec(any::<u8>(), 1..5).prop_map(Op::Enter),
            2 => (1..1500_u16).prop_map(Op::Many),
            3 => Just(Op::Forget),
            1 => (0..4_u64).prop_map(Op::Drop),
        ]
    }

    fn id(number: u64) -> IdempotencyId {
        IdempotencyId(u128::from(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_be_bytes())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn finds_what_a_list_finds(ops in prop::collection::vec(op(), 0..60)) {
            let (mut known, mut model) = (KnownIds::default(), Vec::new());
            let mut last = 0;
            for op in ops {
                match op {
                    Op::Enter(ids) => {
                        last += 1;
                        let ids: Vec<_> = ids.into_iter().map(u64::from).collect();
                        model.push((last, ids));
                    }
                    Op::Many(count) => {
                        last += 1;
                        model.push((last, (0..u64::from(count)).map(|at| at * 7 + last).collect()));
                    }
                    Op::Forget => {
                        let first = (!model.is_empty()).then(|| model.remove(0).0);
                        prop_assert_eq!(known.forget_first(), first.map(Version));
                        continue;
                    }
                    Op::Drop(back) => {
                        last -= back.min(last);
                        model.retain(|(version, _)| *version <= last);
                        known.drop_above(Version(last));
                        continue;
                    }
                }
                let ids: Vec<_> = model.last().unwrap().1.iter().map(|n| id(*n)).collect();
                known.enter(Version(last), WallTime(last), &Bytes::new(), &ids);
                known.check();
            }
            prop_assert_eq!(known.len(), model.iter().map(|(_, ids)| ids.len()).sum::<usize>());
            for number in 0..300 {
                for through in [last, last / 2] {
                    let has = |entry: &&(u64, Vec<u64>)| {
                        entry.0 <= through && entry.1.contains(&number)
                    };
                    let expected = model.iter().rev().find(has).map(|(version, _)| Version(*version));
                    let found = known.find(id(number), Version(through));
                    prop_assert_eq!(found.map(|block| block.version), expected);
                }
            }
        }
    }

    #[test]
    fn runs_stay_few_and_what_is_forgotten_leaves() {
        let mut known = KnownIds::default();
        for version in 1..=2000 {
            let ids: Vec<_> = (0..200).map(|at| id(version * 200 + at)).collect();
            known.enter(Version(version), WallTime(0), &Bytes::new(), &ids);
            known.check();
            if version > 500 {
                assert_eq!(known.forget_first(), Some(Version(version - 500)));
            }
        }
        let held: usize = known.runs.iter().map(|run| run.keys.len()).sum();
        assert!(
            known.runs.len() < 16 && held < 2 * RUN_MAX + 100_000,
            "{held} in {}",
            known.runs.len()
        );
        assert_eq!(
            (known.len(), known.find(id(5 * 200), Version(2000)).is_none()),
            (100_000, true)
        );
    }
}
