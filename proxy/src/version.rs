//! Versioning: a batch's place in the chain of all proxies.
//!
//! Requests are numbered like the batches, dense from 1. Replies may come in any order; the same number gets
//! the same pair however often it is asked for.

use common::message::{VersionReply, VersionRequest};
use common::{Cx, Endpoint};

use crate::Proxy;
use crate::batch::Pair;

impl Proxy {
    pub(crate) fn ask_version(&self, cx: &mut Cx<'_>, number: u64) {
        // All replies below the first that is missing have come (I15).
        let missing = self.batches.iter().find(|batch| batch.pair.is_none());
        let answered = missing.map_or(self.next_number, |batch| batch.number) - 1;
        assert!(answered < number, "batch {number} asks for what it has: {answered}");
        cx.send(self.plan.sequencer, self.plan.epoch, VersionRequest { number, answered });
    }

    pub(crate) fn handle_version_reply(
        &mut self,
        _cx: &mut Cx<'_>,
        from: Endpoint,
        reply: VersionReply,
    ) {
        if from != self.plan.sequencer {
            return;
        }
        let VersionReply { number, previous_version: previous, version, commit_time } = reply;
        assert!(number < self.next_number, "reply {number}, asked below {}", self.next_number);
        assert!(version >= self.plan.first_version && previous < version, "I1: {reply:?}");
        let Some(batch) = self.batches.iter_mut().find(|batch| batch.number == number) else {
            return;
        };
        let pair = Pair { previous, version, commit_time };
        let earlier = batch.pair.replace(pair);
        assert!(earlier.is_none_or(|earlier| earlier == pair), "I15: {earlier:?}, then {pair:?}");
    }
}
