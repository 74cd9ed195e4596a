//! Ordered lanes: commits that are decided in the order of their calls, pipelined.
//!
//! ```text
//!  calls   0    1    2    3    4
//!         [ok] [sent][sent][unsent][unsent]        bound to one proxy on one connection
//!          '-- answered in order; the first failure ends the lane:
//!              what was sent gets its own verdict, the rest gets LaneBroken
//! ```
//!
//! A proxy remembers a whole lane for long, so a closed one is opened again rather than a new one.
//!
//! A lane never goes to a second proxy or connection, and nothing in it is sent again under another number:
//! when the connection or the epoch ends, each element's outcome is found out, and the lane is broken. So a
//! successful element proves all earlier ones committed before it.

use std::collections::VecDeque;

use common::message::LaneOrder;
use common::{Code, Cx, Endpoint, Epoch};

use super::{Answer, Item, Key, LANES_MAX, Owner, Session};
use crate::Error;

/// A lane of one session; a broken one is never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LaneId(pub(super) u64);

#[derive(Clone, Debug)]
struct Element {
    key: Key,
    owner: Owner,
    result: Option<Result<Answer, Error>>,
}

/// Elements in the order of their calls.
#[derive(Clone, Debug, Default)]
pub(super) struct Lane {
    elements: VecDeque<Element>,
    unsent: VecDeque<Key>,
    bound: Option<Bound>,
    next_sequence: u64,
    is_broken: bool,
    is_closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Bound {
    proxy: Endpoint,
    me: Endpoint,
    epoch: Epoch,
}

/// Whether it is an element's turn.
#[must_use]
pub(super) enum Turn {
    Now(Endpoint),
    Later,
    /// The lane has just been broken; the element has its answer.
    Broken,
}

pub(super) fn broken(lane: LaneId) -> Error {
    let detail = format!("an earlier commit of lane {} failed", lane.0);
    Error::new(Code::LaneBroken, detail)
}

pub(super) fn no_lane(lane: LaneId) -> Error {
    Error::new(Code::LaneBroken, format!("lane {} is closed", lane.0))
}

impl Lane {
    pub(super) const fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Whether every element has been answered.
    pub(super) fn is_settled(&self) -> bool {
        self.elements.is_empty()
    }

    /// The element goes out now.
    pub(super) fn send(&mut self, key: Key, lane: LaneId) -> LaneOrder {
        let first = self.unsent.pop_front();
        assert_eq!(first, Some(key), "elements go out in order");
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        LaneOrder { lane: lane.0, sequence }
    }

    pub(super) fn check(&self) {
        assert!(self.unsent.len() <= self.elements.len(), "an unsent element without a place");
        assert!(!self.is_broken || self.unsent.is_empty(), "a broken lane still wants to send");
        let front = self.elements.front();
        assert!(front.is_none_or(|front| front.result.is_none()), "an answer waits for nothing");
    }
}

impl Session {
    /// Opens a lane.
    ///
    /// # Errors
    /// [`Code::LimitExceeded`] when there are too many.
    pub fn open_lane(&mut self) -> Result<LaneId, Error> {
        while let Some((lane, spare)) = self.spare_lanes.pop() {
            if spare.bound.is_some_and(|bound| self.is_current(bound)) {
                self.lanes.insert(lane, Lane { is_closed: false, ..spare });
                return Ok(lane);
            }
        }
        if self.lanes.len() >= LANES_MAX {
            return Err(Error::new(Code::LimitExceeded, format!("{LANES_MAX} lanes are open")));
        }
        let lane = LaneId(self.key().0);
        self.lanes.insert(lane, Lane::default());
        Ok(lane)
    }

    /// Closes a lane; what was submitted is still answered.
    pub fn close_lane(&mut self, lane: LaneId) {
        if let Some(found) = self.lanes.get_mut(&lane) {
            found.is_closed = true;
        }
        self.retire_lane(lane);
    }

    fn retire_lane(&mut self, lane: LaneId) {
        let is_over = |found: &Lane| found.is_closed && found.is_settled();
        if !self.lanes.get(&lane).is_some_and(is_over) {
            return;
        }
        let found = self.lanes.remove(&lane).expect("looked up above");
        if !found.is_broken && self.spare_lanes.len() < LANES_MAX {
            self.spare_lanes.push((lane, found));
        }
    }

    fn is_current(&self, bound: Bound) -> bool {
        self.cluster.me_at(bound.proxy.node) == Some(bound.me)
            && self.cluster.serves(bound.proxy)
            && self.cluster.epoch() == bound.epoch
    }

    /// Takes a commit in; `false` when it has its answer already.
    pub(super) fn enter_lane(
        &mut self,
        cx: &mut Cx<'_>,
        lane: LaneId,
        key: Key,
        owner: Owner,
    ) -> bool {
        let Some(found) = self.lanes.get_mut(&lane) else {
            self.finish_unsent(cx, key, no_lane(lane));
            return false;
        };
        found.elements.push_back(Element { key, owner, result: None });
        if found.is_broken {
            self.finish_unsent(cx, key, broken(lane));
            return false;
        }
        found.unsent.push_back(key);
        true
    }

    /// Takes in one that fails before it has begun.
    pub(super) fn refuse_in_lane(
        &mut self,
        cx: &mut Cx<'_>,
        lane: LaneId,
        owner: Owner,
        error: Error,
    ) {
        let key = self.key();
        let Some(found) = self.lanes.get_mut(&lane) else {
            return self.complete_owner(cx, owner, Err(error));
        };
        found.elements.push_back(Element { key, owner, result: None });
        self.finish_in_lane(cx, lane, key, owner, Err(error));
    }

    /// Whether the commit can go out, and where.
    pub(super) fn lane_proxy(&mut self, cx: &mut Cx<'_>, lane: LaneId, key: Key) -> Turn {
        let found = &self.lanes[&lane];
        if found.unsent.front() != Some(&key) {
            return Turn::Later;
        }
        let epoch = self.cluster.epoch();
        if let Some(bound) = found.bound {
            if self.is_current(bound) {
                return Turn::Now(bound.proxy);
            }
            self.break_lane(cx, lane);
            return Turn::Broken;
        }
        let Some(proxy) = self.cluster.pick_proxy(cx.rng) else { return Turn::Later };
        let me = self.me_at(proxy.node);
        let found = self.lanes.get_mut(&lane).expect("looked up above");
        found.bound = Some(Bound { proxy, me, epoch });
        Turn::Now(proxy)
    }

    /// Nothing of the lane goes out any more.
    pub(super) fn break_lane(&mut self, cx: &mut Cx<'_>, lane: LaneId) {
        let Some(found) = self.lanes.get_mut(&lane) else { return };
        found.is_broken = true;
        for key in core::mem::take(&mut found.unsent) {
            self.finish_unsent(cx, key, broken(lane));
        }
    }

    /// Keeps an element's result until all earlier ones have theirs.
    pub(super) fn finish_in_lane(
        &mut self,
        cx: &mut Cx<'_>,
        lane: LaneId,
        key: Key,
        owner: Owner,
        result: Result<Answer, Error>,
    ) {
        let Some(found) = self.lanes.get_mut(&lane) else {
            return self.complete_owner(cx, owner, result);
        };
        let failed = result.is_err();
        // One that was found by its id has its answer without having been sent.
        found.unsent.retain(|unsent| *unsent != key);
        let element = found.elements.iter_mut().find(|element| element.key == key);
        element.expect("every element has a place").result = Some(result);
        if failed && !found.is_broken {
            self.break_lane(cx, lane);
        }
        self.answer_lane(cx, lane);
    }

    fn answer_lane(&mut self, cx: &mut Cx<'_>, lane: LaneId) {
        while let Some(found) = self.lanes.get_mut(&lane) {
            let next = found.elements.pop_front_if(|element| element.result.is_some());
            let Some(Element { owner, result: Some(result), .. }) = next else { break };
            self.complete_owner(cx, owner, result);
        }
        // The next unsent element may have been waiting for its turn.
        let Some(found) = self.lanes.get(&lane) else { return };
        if let Some(next) = found.unsent.front() {
            self.ready.insert(Item::Commit(*next));
        }
        self.retire_lane(lane);
    }
}
