//! I4 (O4): a read version is at least every commit that was acknowledged before it was asked for, and a
//! commit comes after every read version that was known when it began.

use std::collections::BTreeMap;

use common::{Peer, Version};

use super::facts::Facts;
use super::{Judged, demand};
use crate::observe::{Observation, TxnId};

#[derive(Clone, Debug, Default)]
pub(super) struct Reads {
    /// What was acknowledged when each open question began.
    asked: BTreeMap<(Peer, u64), Version>,
    /// The newest read version that anyone got.
    newest: Version,
    /// The newest read version when a transaction was first given to a session.
    before: BTreeMap<TxnId, Version>,
}

impl Reads {
    pub(super) fn observe(
        &mut self,
        client: Peer,
        observation: &Observation,
        facts: &Facts,
    ) -> Judged {
        match observation {
            Observation::AskedReadVersion { number } => {
                self.asked.insert((client, *number), facts.acknowledged());
            }
            Observation::GotReadVersion { number, version } => {
                let floor = self.asked.remove(&(client, *number)).unwrap_or_default();
                demand!(
                    "I4.stale",
                    *version >= floor,
                    "{client:?} got read version {version}, but {floor} was acknowledged before it asked"
                );
                self.newest = self.newest.max(*version);
            }
            Observation::Submitted(submission) => {
                self.before.entry(submission.txn).or_insert(self.newest);
            }
            Observation::Committed { txn, position, .. } => {
                let before = self.before.get(txn).copied().unwrap_or_default();
                demand!(
                    "O4.order",
                    position.version > before,
                    "{txn:?} commits at {position}, but {before} had been read before it began"
                );
            }
            _ => {}
        }
        Ok(())
    }
}
