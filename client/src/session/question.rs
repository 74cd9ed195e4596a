//! One request to one role, asked until it is answered.
//!
//! ```text
//!  ask --> ready --place--> sent --answer--> owner
//!            ^                |-- refused for a while: wait, another target
//!            |                |-- no answer: send again, then another target
//!            `-- woken -------'-- deadline: TimedOut to the owner
//! ```
//!
//! Every question can be asked twice without harm. A question to *one* log server goes back to its owner as
//! [`Reply::Lost`] when that server is gone, since only the owner can choose another.

use core::time::Duration;

use common::membership::MemberChange;
use common::message::{
    ChangeMember, Describe, FindCluster, FindId, Message, Pull, ReadVersionRequest, Status, Trim,
};
use common::{
    Backoff, Class, Code, Cx, Endpoint, Epoch, IdempotencyId, NodeId, Refusal, RequestId, Role,
    StreamId, Time, Version,
};

use super::{Answer, Item, Key, Owner, Session, patience_ms};

/// Between two candidates that are asked whether they lead.
const ELSEWHERE_WAIT: Duration = Duration::from_millis(5);

/// What to ask.
#[derive(Clone, Debug)]
pub(super) enum Ask {
    ReadVersion,
    Cluster,
    Status,
    /// Whoever leads.
    ChangeMember {
        node: NodeId,
        change: MemberChange,
    },
    /// Any log server that holds the ids.
    FindId {
        id: IdempotencyId,
        at_least: Version,
    },
    Trim {
        at: Endpoint,
        stream: StreamId,
        through: Version,
    },
    Describe {
        at: Endpoint,
        streams: Vec<StreamId>,
    },
    Pull {
        at: Endpoint,
        streams: Vec<StreamId>,
        after: Version,
        bytes_max: u64,
        wait_ms: u64,
        want: Version,
    },
}

impl Ask {
    const fn fixed_target(&self) -> Option<Endpoint> {
        match self {
            Self::Trim { at, .. } | Self::Describe { at, .. } | Self::Pull { at, .. } => Some(*at),
            _ => None,
        }
    }

    /// How long the receiver may wait by request.
    const fn wait_ms(&self) -> u64 {
        match self {
            Self::Pull { wait_ms, .. } => *wait_ms,
            _ => 0,
        }
    }

    fn message(&self, request: RequestId) -> Message {
        let clamp = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        match self {
            Self::ReadVersion => ReadVersionRequest { request }.into(),
            Self::Cluster => FindCluster { request }.into(),
            Self::Status => Status { request }.into(),
            Self::ChangeMember { node, change } => {
                ChangeMember { request, node: *node, change: *change }.into()
            }
            Self::FindId { id, at_least } => {
                FindId { request, id: *id, at_least: *at_least }.into()
            }
            Self::Trim { stream, through, .. } => {
                Trim { request, stream: *stream, through: *through }.into()
            }
            Self::Describe { streams, .. } => Describe { request, streams: streams.clone() }.into(),
            Self::Pull { streams, after, bytes_max, wait_ms, want, .. } => Pull {
                request,
                streams: streams.clone(),
                after: *after,
                bytes_max: clamp(*bytes_max),
                wait_ms: clamp(*wait_ms),
                want: *want,
            }
            .into(),
        }
    }
}

/// What came of a question.
#[derive(Clone, Debug)]
pub(super) enum Reply {
    Message(Message),
    Refused(Refusal),
    /// The log server that was asked is not there any more, or does not answer.
    Lost,
}

/// A question on its way.
#[derive(Clone, Debug)]
pub(super) struct Question {
    owner: Owner,
    ask: Ask,
    number: RequestId,
    target: Option<Endpoint>,
    first_sent: Time,
    wait: Duration,
    backoff: Backoff,
    /// Which of the possible targets is next.
    rotation: usize,
    /// How often a target did not answer in time.
    timeouts: u32,
    deadline: Option<Time>,
}

impl Question {
    pub(super) const fn owner(&self) -> Owner {
        self.owner
    }
}

impl Session {
    pub(super) fn ask(
        &mut self,
        cx: &mut Cx<'_>,
        owner: Owner,
        ask: Ask,
        deadline: Option<Time>,
    ) -> Key {
        let (key, number) = (self.key(), self.number_question());
        self.asked.insert(number, key);
        self.questions.insert(
            key,
            Question {
                owner,
                ask,
                number,
                target: None,
                first_sent: cx.now,
                wait: Duration::ZERO,
                backoff: Backoff::default(),
                rotation: 0,
                timeouts: 0,
                deadline,
            },
        );
        self.ready.insert(Item::Question(key));
        if let Some(deadline) = deadline {
            self.alarms.set(Item::Question(key), deadline);
        }
        key
    }

    /// Forgets a question; an answer passes by.
    pub(super) fn forget_question(&mut self, key: Key) -> Option<Question> {
        let question = self.questions.remove(&key)?;
        self.asked.remove(&question.number);
        self.alarms.clear(Item::Question(key));
        self.ready.remove(&Item::Question(key));
        Some(question)
    }

    pub(super) fn place_question(&mut self, cx: &mut Cx<'_>, key: Key) -> bool {
        let Some(question) = self.questions.get(&key) else { return true };
        let target = match &question.ask {
            Ask::ReadVersion => self.cluster.pick_proxy(cx.rng),
            Ask::Cluster | Ask::Status => self.cluster.any_node(cx.rng),
            Ask::ChangeMember { .. } => {
                self.cluster.nth_node(question.rotation).map(|node| node.with_role(Role::Leader))
            }
            Ask::FindId { .. } => {
                let holders = self.cluster.holders(StreamId::IDS);
                let place = question.rotation % holders.len().max(1);
                holders.get(place).copied()
            }
            fixed => fixed.fixed_target().filter(|at| self.cluster.reaches(*at)),
        };
        let Some(target) = target else {
            if question.ask.fixed_target().is_some() {
                self.deliver(cx, key, Reply::Lost);
                return true;
            }
            if let Some(deadline) = question.deadline {
                self.alarms.set(Item::Question(key), deadline);
            }
            return false;
        };
        self.send_question(cx, key, target);
        true
    }

    fn send_question(&mut self, cx: &mut Cx<'_>, key: Key, target: Endpoint) {
        let question = self.questions.get_mut(&key).expect("the caller has looked it up");
        if question.target != Some(target) {
            question.target = Some(target);
            question.first_sent = cx.now;
            question.wait = Duration::from_millis(cx.knobs.retransmit_ms);
        } else {
            question.wait *= 2;
        }
        let patience = question.wait + Duration::from_millis(question.ask.wait_ms());
        let mut wake = cx.now.plus(patience);
        if let Some(deadline) = question.deadline {
            wake = wake.min(deadline);
        }
        // A trim must reach all that hold the stream in the epoch that serves: who knows an older one is
        // told.
        let epoch = match question.ask {
            Ask::Trim { .. } => self.cluster.epoch(),
            _ => Epoch::ZERO,
        };
        cx.send(target, epoch, question.ask.message(question.number));
        self.alarms.set(Item::Question(key), wake);
    }

    pub(super) fn handle_question_alarm(&mut self, cx: &mut Cx<'_>, key: Key) {
        let Some(question) = self.questions.get_mut(&key) else { return };
        if question.deadline.is_some_and(|deadline| deadline <= cx.now) {
            let detail = "no answer within client_timeout_ms";
            return self.deliver(cx, key, Reply::Refused(Refusal::new(Code::TimedOut, detail)));
        }
        let patience_ms = patience_ms(cx, question.timeouts) + question.ask.wait_ms();
        let given_up = Duration::from_millis(patience_ms);
        if question.target.is_some() && cx.now.since(question.first_sent) >= given_up {
            question.timeouts += 1;
            return self.retarget(cx, key, Duration::ZERO, true);
        }
        self.ready.insert(Item::Question(key));
    }

    /// The target is of no use: another one, after a while.
    fn retarget(&mut self, cx: &mut Cx<'_>, key: Key, wait: Duration, is_suspect: bool) {
        let question = self.questions.get_mut(&key).expect("the caller has looked it up");
        if question.ask.fixed_target().is_some() {
            return self.deliver(cx, key, Reply::Lost);
        }
        question.rotation = question.rotation.wrapping_add(1);
        // A late answer to the old number would be as good, but a read version must not be older than
        // its target's epoch: ask under a new one.
        let (old, target) = (question.number, question.target.take());
        self.asked.remove(&old);
        let number = self.number_question();
        self.asked.insert(number, key);
        let question = self.questions.get_mut(&key).expect("still there");
        question.number = number;
        let mut wake = cx.now.plus(wait);
        if let Some(deadline) = question.deadline {
            wake = wake.min(deadline);
        }
        let is_for_proxy = matches!(question.ask, Ask::ReadVersion);
        if let Some(proxy) = target.filter(|_| is_for_proxy && is_suspect) {
            self.suspect(proxy);
        }
        self.alarms.set(Item::Question(key), wake);
    }

    /// Whether somebody waits for the answer of this number.
    pub(super) fn asks(&self, number: RequestId) -> bool {
        self.asked.contains_key(&number)
    }

    pub(super) fn handle_answer(&mut self, cx: &mut Cx<'_>, number: RequestId, message: Message) {
        let Some(key) = self.asked.get(&number).copied() else { return };
        let Message::Refused(refused) = message else {
            return self.deliver(cx, key, Reply::Message(message));
        };
        let refusal = refused.refusal;
        let passes = matches!(refusal.code().class(), Class::Fenced)
            || matches!(refusal.code(), Code::Overloaded | Code::Recovering);
        if !passes {
            return self.deliver(cx, key, Reply::Refused(refusal));
        }
        let question = self.questions.get_mut(&key).expect("numbers lead to questions");
        if matches!(question.ask, Ask::ChangeMember { .. }) {
            if refusal.code() == Code::NotHere {
                return self.retarget(cx, key, ELSEWHERE_WAIT, false);
            }
            // The leader recovers: it is asked again, and not the node after it.
            question.rotation = question.rotation.wrapping_sub(1);
        }
        let wait = question.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
        let wait = wait.max(Duration::from_millis(u64::from(refusal.retry_after_ms)));
        self.retarget(cx, key, wait, refusal.code() != Code::Overloaded);
    }

    /// Ends a question and gives its owner what came of it.
    fn deliver(&mut self, cx: &mut Cx<'_>, key: Key, reply: Reply) {
        let Question { owner, .. } =
            self.forget_question(key).expect("a question is answered once");
        if let Reply::Message(Message::ReadVersionReply(reply)) = &reply {
            self.saw(reply.version, cx.now);
        }
        match owner {
            Owner::Call(call) => {
                let result = match reply {
                    Reply::Message(Message::ReadVersionReply(reply)) => {
                        Ok(Answer::ReadVersion(reply.version))
                    }
                    Reply::Message(Message::ClusterView(view)) => Ok(Answer::Cluster(*view)),
                    Reply::Message(Message::MemberChanged(_)) => Ok(Answer::MemberChanged),
                    Reply::Message(Message::StatusReply(reply)) => Ok(Answer::Status(reply.json)),
                    other => Err(unexpected(other)),
                };
                self.complete(call, result);
            }
            Owner::Commit(key) => self.handle_commit_told(cx, key, reply),
            Owner::Errand(key) => self.handle_errand_told(cx, key, reply),
            Owner::Puller(puller, group) => self.handle_pulled(cx, puller, group, reply),
            Owner::Floor => self.handle_floor(cx, reply),
        }
    }

    /// Questions whose target is gone are asked elsewhere.
    pub(super) fn reroute(&mut self, cx: &mut Cx<'_>) {
        let cut: Vec<Key> = self
            .questions
            .iter()
            .filter(|(_, question)| match question.target {
                Some(target) => {
                    let is_proxy = matches!(question.ask, Ask::ReadVersion);
                    !self.cluster.reaches(target) || (is_proxy && !self.cluster.serves(target))
                }
                None => false,
            })
            .map(|(key, _)| *key)
            .collect();
        for key in cut {
            if self.questions.contains_key(&key) {
                self.retarget(cx, key, Duration::ZERO, false);
            }
        }
        self.reroute_pullers(cx);
    }
}

/// The error for a reply that says no, or that does not fit the question.
pub(super) fn unexpected(reply: Reply) -> crate::Error {
    match reply {
        Reply::Refused(refusal) => refusal.into(),
        Reply::Lost => crate::Error::new(Code::TimedOut, "the server that was asked is gone"),
        Reply::Message(message) => {
            let detail = format!("{} is no answer to what was asked", message.name());
            crate::Error::new(Code::Internal, detail)
        }
    }
}
