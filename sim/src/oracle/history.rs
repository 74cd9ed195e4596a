//! O1, O2, O5, O8, I16: the run as a whole, once everything that is left has been read.

use std::collections::BTreeMap;

use common::{Code, IdempotencyId, KeyRange, Offset, Position, Ranges, StreamId, Version};

use super::consumers::Consumers;
use super::serial::LastWrites;
use super::{Judged, demand};
use crate::observe::{Observation, Submission, TxnId};

#[derive(Clone, Debug)]
struct Entry {
    submission: Submission,
    open_attempts: u32,
    committed: Option<(Position, Vec<(StreamId, Offset)>)>,
    conflicts: Vec<Version>,
}

/// What the log holds of one transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    position: Position,
    sections: Vec<(StreamId, Offset, u32)>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct History {
    /// Several resolvers are told what became of each transaction. A single one is not, and keeps the writes
    /// of one that fell with its lane.
    pub(super) is_sharded: bool,
    entries: BTreeMap<TxnId, Entry>,
    ids: BTreeMap<IdempotencyId, TxnId>,
}

impl History {
    pub(super) fn observe(&mut self, observation: &Observation) -> Judged {
        match observation {
            Observation::Submitted(submission) => self.submitted(submission),
            Observation::Committed { txn, position, offsets } => {
                let Some(entry) = self.entries.get_mut(txn) else {
                    demand!("O5.stranger", false, "{txn:?} was never submitted");
                    return Ok(());
                };
                entry.open_attempts = entry.open_attempts.saturating_sub(1);
                let now = (*position, offsets.clone());
                let earlier = entry.committed.get_or_insert_with(|| now.clone());
                // Offsets may be missing: the records were trimmed before the outcome was found out.
                let same_offsets = offsets.iter().all(|(stream, offset)| {
                    earlier.1.iter().all(|(of, at)| of != stream || at == offset)
                });
                demand!(
                    "I16.twice",
                    earlier.0 == now.0 && same_offsets,
                    "{txn:?} committed at {earlier:?} and at {now:?}"
                );
                Ok(())
            }
            Observation::NotCommitted { txn, code, version } => {
                let Some(entry) = self.entries.get_mut(txn) else {
                    demand!("O5.stranger", false, "{txn:?} was never submitted");
                    return Ok(());
                };
                entry.open_attempts = entry.open_attempts.saturating_sub(1);
                if *code == Code::Conflict {
                    entry.conflicts.push(version.unwrap_or(Version::MAX));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn submitted(&mut self, submission: &Submission) -> Judged {
        if let Some(id) = submission.id {
            let owner = *self.ids.entry(id).or_insert(submission.txn);
            demand!(
                "workload",
                owner == submission.txn,
                "{id} names {owner:?} and {:?}",
                submission.txn
            );
        }
        let entry = self.entries.entry(submission.txn).or_insert_with(|| Entry {
            submission: submission.clone(),
            open_attempts: 0,
            committed: None,
            conflicts: Vec::new(),
        });
        entry.open_attempts += 1;
        Ok(())
    }

    pub(super) fn finish(&self, consumers: &Consumers) -> Judged {
        let found = find_all(consumers)?;
        for txn in found.keys() {
            demand!(
                "O7.phantom",
                self.entries.contains_key(txn),
                "{txn:?} is in the log; nobody sent it"
            );
        }
        for (txn, entry) in &self.entries {
            entry.judge(*txn, found.get(txn), consumers)?;
        }
        self.replay(&found)?;
        self.explain_conflicts(&found)
    }

    /// O1: every committed transaction's reads were current when it committed.
    fn replay(&self, found: &BTreeMap<TxnId, Found>) -> Judged {
        let mut order: Vec<(Position, TxnId)> = Vec::new();
        for (txn, entry) in &self.entries {
            let position = entry.place(found.get(txn));
            order.extend(position.map(|position| (position, *txn)));
        }
        order.sort_unstable();
        let mut last_writes = LastWrites::new();
        for pair in order.windows(2) {
            demand!(
                "O5.one_place",
                pair[0].0 != pair[1].0,
                "{:?} and {:?} are both at {}",
                pair[0].1,
                pair[1].1,
                pair[0].0
            );
        }
        for (position, txn) in order {
            let submission = &self.entries[&txn].submission;
            for range in submission.reads.iter() {
                let newest = last_writes.newest(range);
                let read = submission.read_version;
                demand!(
                    "O1.serializable",
                    newest <= read,
                    "{txn:?} at {position} read {range:?} at {read}, but {newest} had written it"
                );
            }
            for range in submission.writes.iter() {
                last_writes.write(range, position.version);
            }
        }
        Ok(())
    }

    /// O2: no false conflicts. Somebody else wrote what a refused transaction read, above its read version,
    /// at most at the version of the verdict, and committed.
    fn explain_conflicts(&self, found: &BTreeMap<TxnId, Found>) -> Judged {
        // Looking at all transactions for each conflict would cost more than the run.
        let mut committed: Vec<(Version, TxnId)> = Vec::new();
        let mut perhaps: Vec<TxnId> = Vec::new();
        for (txn, entry) in &self.entries {
            match entry.place(found.get(txn)) {
                Some(place) => committed.push((place.version, *txn)),
                None if entry.may_have_committed() => perhaps.push(*txn),
                None if entry.submission.is_in_lane && !self.is_sharded => perhaps.push(*txn),
                None => {}
            }
        }
        committed.sort_unstable();
        for (txn, entry) in self.entries.iter().filter(|(_, entry)| !entry.conflicts.is_empty()) {
            let (reads, read) = (&entry.submission.reads, entry.submission.read_version);
            // Without reads it was the id that had been used.
            if reads.is_empty() {
                continue;
            }
            let wrote = |other: &TxnId| {
                other != txn && overlap(&self.entries[other].submission.writes, reads)
            };
            for verdict in &entry.conflicts {
                let first = committed.partition_point(|(version, _)| *version <= read);
                let end = committed.partition_point(|(version, _)| *version <= *verdict).max(first);
                let between = &committed[first..end];
                demand!(
                    "O2.unexplained",
                    between.iter().any(|(_, other)| wrote(other)) || perhaps.iter().any(wrote),
                    "{txn:?} conflicted at {verdict} reading at {read}, but nobody else who committed in \
                     between wrote what it read"
                );
            }
        }
        Ok(())
    }
}

impl History {
    /// The highest version that a client was told to have committed at.
    pub(super) fn known_to_clients(&self) -> Version {
        let committed = self.entries.values().filter_map(|entry| entry.committed.as_ref());
        committed.map(|(position, _)| position.version).max().unwrap_or_default()
    }
}

impl Entry {
    /// Where it committed, by the log or by its client's word.
    fn place(&self, found: Option<&Found>) -> Option<Position> {
        let told = self.committed.as_ref().map(|(position, _)| *position);
        found.map(|found| found.position).or(told)
    }

    /// Of one that has no place: its client does not know, and it would leave nothing in the log.
    fn may_have_committed(&self) -> bool {
        self.open_attempts > 0 && self.submission.sections.is_empty()
    }

    fn judge(&self, txn: TxnId, found: Option<&Found>, consumers: &Consumers) -> Judged {
        let expect = &self.submission.sections;
        if let Some(found) = found {
            let counts: Vec<(StreamId, u32)> =
                found.sections.iter().map(|(stream, _, count)| (*stream, *count)).collect();
            demand!(
                "O8.atomic",
                counts == *expect,
                "{txn:?} has {counts:?} in the log, of {expect:?}"
            );
        }
        let Some((position, offsets)) = &self.committed else {
            let refused = self.open_attempts == 0;
            demand!(
                "O5.refused",
                found.is_none() || !refused,
                "{txn:?} was refused, but is in the log: {found:?}"
            );
            return Ok(());
        };
        for (stream, _) in expect {
            let complete = consumers.complete(*stream);
            demand!(
                "O16.unread",
                complete >= position.version,
                "{txn:?} at {position}: {stream} was read up to {complete} only"
            );
        }
        if expect.is_empty() {
            return Ok(());
        }
        let Some(found) = found else {
            demand!(
                "O5.lost",
                false,
                "{txn:?} was acknowledged at {position} and is not in the log"
            );
            return Ok(());
        };
        demand!(
            "O5.moved",
            found.position == *position,
            "{txn:?} was acknowledged at {position} and is at {}",
            found.position
        );
        for (stream, offset) in offsets {
            let at = found.sections.iter().find(|(of, ..)| of == stream).map(|(_, at, _)| *at);
            demand!(
                "I12.told",
                at == Some(*offset),
                "{txn:?} was told {offset} of {stream} and is at {at:?}"
            );
        }
        Ok(())
    }
}

/// Each transaction's sections in the log, in the order of streams.
fn find_all(consumers: &Consumers) -> Result<BTreeMap<TxnId, Found>, super::Violation> {
    let mut all: BTreeMap<TxnId, Found> = BTreeMap::new();
    for block in consumers.blocks() {
        let mut offset = block.base_offset;
        for section in &block.sections {
            let base = offset;
            offset = offset.plus(u64::from(section.record_count));
            let Some(txn) = section.txn else { continue };
            let position = Position { version: block.version, index: section.index };
            let found = all.entry(txn).or_insert_with(|| Found { position, sections: Vec::new() });
            if found.position != position {
                let detail =
                    format!("{txn:?} is in the log at {} and at {position}", found.position);
                return Err(super::Violation { rule: "I16.twice", detail });
            }
            found.sections.push((block.stream, base, section.record_count));
        }
    }
    all.values_mut().for_each(|found| found.sections.sort_unstable());
    Ok(all)
}

fn overlap(writes: &Ranges, reads: &Ranges) -> bool {
    writes.iter().any(|write: KeyRange<'_>| reads.iter().any(|read| read.overlaps(write)))
}
