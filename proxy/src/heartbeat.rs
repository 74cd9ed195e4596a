//! What time brings: requests that went unanswered are sent again, and an idle proxy commits an empty batch.
//!
//! The empty batch moves versions on, and with them windows, consumers and trims; it also finds out soon when
//! a role that it passes has died. It begins with the epoch's service: the first version belongs to the
//! recovery transaction.

use core::time::Duration;

use common::{Cx, Mark, Plant};

use crate::batch::Phase;
use crate::read_version::Asker;
use crate::{HEARTBEAT, Proxy, TICK};

impl Proxy {
    pub(crate) fn arm_tick(&self, cx: &mut Cx<'_>) {
        let pause_us = (cx.knobs.retransmit_ms * 500).max(1);
        let pause_us = if cx.planted(Plant::Storm) { 0 } else { pause_us };
        cx.arm_after(TICK, Duration::from_micros(pause_us));
    }

    pub(crate) fn arm_heartbeat(&self, cx: &mut Cx<'_>) {
        cx.arm_after(HEARTBEAT, Duration::from_millis(cx.knobs.heartbeat_ms.max(1)));
    }

    pub(crate) fn handle_heartbeat(&mut self, cx: &mut Cx<'_>) {
        self.arm_heartbeat(cx);
        let quiet = cx.now.since(self.gathering.closed_at);
        let is_idle = self.batches.is_empty() && self.gathering.transactions.is_empty();
        let is_live = self.is_serving && !self.is_fenced;
        if is_live && is_idle && quiet.as_millis() >= u128::from(cx.knobs.heartbeat_ms) {
            cx.mark(Mark::Heartbeat);
            self.open_batch(cx, Vec::new());
        }
    }

    /// Looks at everything that waits for somebody else.
    pub(crate) fn handle_tick(&mut self, cx: &mut Cx<'_>) {
        self.arm_tick(cx);
        if self.is_fenced {
            return;
        }
        let patience = Duration::from_millis(cx.knobs.retransmit_ms);
        for place in 0..self.batches.len() {
            let batch = &mut self.batches[place];
            if cx.now.since(batch.sent_at) >= patience {
                batch.sent_at = cx.now;
                self.ask_again(cx, place);
            }
        }
        self.settle_again(cx);
        self.retry_round(cx);
        self.retry_catalog(cx);
    }

    fn ask_again(&mut self, cx: &mut Cx<'_>, place: usize) {
        let batch = &self.batches[place];
        let number = batch.number;
        match batch.phase {
            Phase::Versioning if batch.pair.is_none() => {
                cx.mark(Mark::Retransmit);
                self.ask_version(cx, number);
            }
            Phase::Resolving => {
                let resolution = batch.resolution.as_ref().expect("the batch is resolving");
                let silent: Vec<usize> = resolution.silent().collect();
                for resolver in silent {
                    cx.mark(Mark::Retransmit);
                    self.ask_resolver(cx, place, resolver, Vec::new());
                }
            }
            Phase::Pushing => match (&batch.pushed, batch.version()) {
                (Some(pushed), Some(version)) => {
                    let silent: Vec<usize> = self.silent_servers(pushed, version).collect();
                    for server in silent {
                        cx.mark(Mark::Retransmit);
                        self.push_to(cx, place, server);
                    }
                }
                // Others' commits move the known committed version, but what was said of them may be lost.
                _ if batch.is_held && self.reads.waiting_count() == 0 => {
                    self.reads.ask(Asker::Stalled);
                }
                _ => {}
            },
            Phase::Batching | Phase::Versioning | Phase::Replying => {}
        }
    }
}
