//! Read-ahead: what a consumer that catches up asks for next is read while the last answer is on its way.
//!
//! ```text
//! Pull after 10 --> read ...... --> answer through 20 --> read after 20, after 30 (ahead) --> kept
//! Pull after 20 --> kept: answer through 30 at once --> read after 40 (ahead) ...
//!               `-> still being read: the pull takes it over
//! ```
//!
//! Only pulls that were served from the disk are read ahead of, by [`ANSWERS_MAX`], and only while nobody
//! waits for a read. All of it is bounded in bytes (`read_ahead_bytes_max`): beyond it nothing is read ahead,
//! so that many consumers don't drive out what the others are about to ask for. An answer that nobody has
//! fetched for [`LIFE`] makes room. What a kept answer holds was visible when it was gathered and stays so
//! (I11); a trim is judged when it is asked for.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use common::message::Pull;
use common::{Cx, Endpoint, Mark, Peer, StreamId, Time, Version};

use super::LogServer;
use super::pull::{Gathered, READING_MAX, Reading, Wanted};

/// Answers of one consumer that are read or kept ahead of its pulls: while one is on its way, the disk must
/// have enough to do.
const ANSWERS_MAX: usize = 2;

/// Whoever has not fetched an answer for so long may have gone elsewhere: it makes room for others.
const LIFE: Duration = Duration::from_secs(1);

/// An answer that nobody has asked for yet.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    from: Endpoint,
    /// As it is expected.
    pull: Pull,
    answer: Gathered,
    bodies: Vec<Bytes>,
    bytes: u64,
    since: Time,
}

/// All answers that nobody has asked for yet, the oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Ahead {
    kept: VecDeque<Kept>,
    bytes: u64,
}

impl Ahead {
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes the answer out that this pull asks for.
    fn take(&mut self, from: Endpoint, pull: &Pull) -> Option<Kept> {
        let is_it = |kept: &Kept| kept.from == from && is_expected(&kept.pull, pull);
        let place = self.kept.iter().position(is_it)?;
        let kept = self.kept.remove(place).expect("it was just found");
        self.bytes -= kept.bytes;
        Some(kept)
    }

    /// The peer is gone.
    pub(super) fn forget(&mut self, peer: Peer) {
        self.retain(|kept| kept.from.peer() != peer);
    }

    fn retain(&mut self, is_wanted: impl Fn(&Kept) -> bool) {
        self.kept.retain(is_wanted);
        self.bytes = self.kept.iter().map(|kept| kept.bytes).sum();
    }

    pub(super) fn check(&self) {
        let bytes: u64 = self.kept.iter().map(|kept| kept.bytes).sum();
        assert_eq!(bytes, self.bytes, "what is kept counts its bytes");
    }
}

/// Whether an answer to the one is an answer to the other.
fn is_expected(expected: &Pull, pull: &Pull) -> bool {
    expected.after == pull.after
        && expected.bytes_max == pull.bytes_max
        && expected.streams == pull.streams
}

impl LogServer {
    /// Answers a pull by what was read ahead, or lets it take over the read of it. `Err` gives it back.
    pub(super) fn serve_ahead(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        pull: Pull,
    ) -> Result<(), Pull> {
        if let Some(Kept { answer, bodies, .. }) = self.pulls.ahead.take(from, &pull) {
            assert!(
                answer.through > pull.after && bodies.len() == answer.blocks.len(),
                "{} blocks through {} were read for {} after {}",
                bodies.len(),
                answer.through,
                answer.blocks.len(),
                pull.after
            );
            cx.mark(Mark::PullReadAhead);
            let through = answer.through;
            let bodies = answer.bodies(bodies);
            self.answer_pull(cx, from, &pull, answer, &bodies);
            self.read_ahead(cx, from, pull, through);
            return Ok(());
        }
        let is_it = |reading: &&mut Reading| {
            reading.wanted == Wanted::Ahead
                && reading.from == from
                && is_expected(&reading.pull, &pull)
        };
        match self.pulls.reading.values_mut().find(is_it) {
            Some(reading) => {
                (reading.pull, reading.wanted) = (pull, Wanted::Now);
                Ok(())
            }
            None => {
                self.drop_ahead(from, &pull.streams);
                Err(pull)
            }
        }
    }

    /// A consumer has gone to another place: what was read for it is of no use.
    fn drop_ahead(&mut self, from: Endpoint, streams: &[StreamId]) {
        self.pulls.ahead.retain(|kept| kept.from != from || kept.pull.streams != streams);
        for reading in self.pulls.reading.values_mut() {
            let is_its = reading.from == from && reading.pull.streams == streams;
            if is_its && reading.wanted == Wanted::Ahead {
                reading.wanted = Wanted::Never;
            }
        }
    }

    /// How many answers are ahead of a consumer that has been answered through `after`, and where they end.
    fn extent_ahead(&self, from: Endpoint, pull: &Pull, after: Version) -> (usize, Version) {
        let kept = self.pulls.ahead.kept.iter().map(|kept| (kept.from, &kept.pull, &kept.answer));
        let reading = self.pulls.reading.values();
        let reading = reading.filter(|reading| reading.wanted == Wanted::Ahead);
        let all = kept.chain(reading.map(|reading| (reading.from, &reading.pull, &reading.answer)));
        let its = all.filter(|(of, its, _)| {
            *of == from && its.after >= after && its.streams == pull.streams
        });
        its.fold((0, after), |(count, end), (_, _, answer)| (count + 1, end.max(answer.through)))
    }

    /// Begins to read what the consumer will ask for behind `after`, if it is on the disk and nobody waits.
    pub(super) fn read_ahead(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        pull: Pull,
        after: Version,
    ) {
        assert!(after >= pull.after, "{after} lies before the pull's {}", pull.after);
        if pull.wait_ms == 0 {
            return;
        }
        let (count, mut end) = self.extent_ahead(from, &pull, after);
        for _ in count..ANSWERS_MAX {
            let is_busy = self.pulls.has_queue() || self.pulls.reading.len() >= READING_MAX / 2;
            let pull = Pull { after: end, ..pull.clone() };
            if is_busy || self.judge_trims(&pull).is_err() {
                return;
            }
            let answer = self.plan(cx, &pull);
            let is_on_disk = !answer.blocks.is_empty() && !self.has_in_tail(&answer);
            if !is_on_disk || !self.has_room_ahead(cx, answer.bytes()) {
                return;
            }
            end = answer.through;
            let id = self.log.read(cx, answer.blocks.clone());
            self.pulls.reading.insert(id, Reading { from, pull, answer, wanted: Wanted::Ahead });
        }
    }

    /// Whether so many bytes more may be read ahead.
    fn has_room_ahead(&mut self, cx: &Cx<'_>, bytes: u64) -> bool {
        let reading = self.pulls.reading.values();
        let reading = reading.filter(|reading| reading.wanted != Wanted::Now);
        let reading_bytes: u64 = reading.map(|reading| reading.answer.bytes()).sum();
        let wanted = reading_bytes + bytes;
        if self.pulls.ahead.bytes + wanted > cx.knobs.read_ahead_bytes_max {
            self.pulls.ahead.retain(|kept| kept.since.plus(LIFE) > cx.now);
        }
        self.pulls.ahead.bytes + wanted <= cx.knobs.read_ahead_bytes_max
    }

    /// The disk has answered a read that nobody has asked for yet.
    pub(super) fn keep_ahead(
        &mut self,
        cx: &Cx<'_>,
        from: Endpoint,
        pull: Pull,
        answer: Gathered,
        bodies: Vec<Bytes>,
    ) {
        let bytes = answer.bytes();
        let ahead = &mut self.pulls.ahead;
        assert!(
            ahead.bytes + bytes <= cx.knobs.read_ahead_bytes_max && answer.through > pull.after,
            "{} bytes through {} are kept beside {}, {} may be",
            bytes,
            answer.through,
            ahead.bytes,
            cx.knobs.read_ahead_bytes_max
        );
        ahead.bytes += bytes;
        ahead.kept.push_back(Kept { from, pull, answer, bodies, bytes, since: cx.now });
    }
}
