//! One run: a seed's cluster through its phases, judged all the way.
//!
//! ```text
//! warm-up            chaos                    calm                    end
//! streams created    faults from the list,    faults off, everybody   clients stop; every open call ends,
//!                    everyone comes back      back: liveness bound    every consumer reads all; the final
//!                                                                     oracles
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::disk::File;
use common::machine::Halt;
use common::message::ChangeMember;
use common::register::RegisterState;
use common::{Endpoint, Incarnation, Mark, NodeId, Note, Peer, Plants, Prng, RequestId, Role};

use crate::atlas::Atlas;
use crate::clock::Moment;
use crate::cluster::Cluster;
use crate::damage::{self, Condition, Remedy};
use crate::disk::Crash;
use crate::edits::Edits;
use crate::faults::{self, Decision, Fault, Later, Struck};
use crate::mends;
use crate::observe::ConsumerId;
use crate::oracle::{Oracles, Probe, Violation};
use crate::random::Randomness;
use crate::swarm::Config;
use crate::workload::{FIRST_CLIENT, Shared, SharedHandle};
use crate::world::{Happened, World};

const MS: u64 = 1_000_000;
/// The streams are there within this, or something is stuck; ms.
const WARM_UP_MS_MAX: u64 = 30_000;
/// How long clients go on after the faults have stopped, ms.
const AFTER_CHAOS_MS: u64 = 200;
/// After the faults have stopped and the clients as well, everything ends within this, ms.
const LIVENESS_MS: u64 = 60_000;
/// Phases look around this often, ms.
const LOOK_MS: u64 = 5;
/// A read that began before a mend may find its damage this long afterwards, ms.
const LATE_READ_MS: u64 = 5_000;
/// Events in so many ms, at most: more is a storm.
const WINDOW_MS: u64 = 100;
const WINDOW_EVENTS_MAX: u64 = 200_000;
/// An operator asks again after this long, and gives up after so many times.
const ASK_AGAIN_MS: u64 = 100;
const ASKS_MAX: u64 = 100;
/// Whose number is nobody's.
const OPERATOR: NodeId = NodeId(FIRST_CLIENT - 1);
/// Events of a run, at most.
const EVENTS_MAX: u64 = 20_000_000;

/// What is wanted beside the verdict.
#[derive(Clone, Default, Debug)]
pub struct Options {
    /// Keep the text of the trace.
    pub with_text: bool,
    /// Bugs that the roles have.
    pub plants: Plants,
    /// What is left out of the run.
    pub edits: Edits,
    /// No bit rot, latent errors and misdirected writes.
    pub without_damage: bool,
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// The drawn configuration, as one JSON line.
    pub config: String,
    /// The trace's hash.
    pub trace_hash: u128,
    /// How many events there were.
    pub events: u64,
    /// Virtual time, ns.
    pub simulated_ns: u64,
    /// Commits that were acknowledged to clients.
    pub acknowledged: u64,
    /// How often each mark was hit.
    pub marks: BTreeMap<Mark, u64>,
    /// What was broken, if anything.
    pub failure: Option<Violation>,
    /// How many faults the run's list had.
    pub faults: usize,
    /// How often each kind of fault struck; and how often damage was noticed, by what noticed it.
    pub struck: BTreeMap<&'static str, u64>,
    /// How many operations each client began.
    pub operations: BTreeMap<u64, u64>,
    /// The last lines of the trace, when they were wanted.
    pub text: Vec<String>,
}

/// Runs a seed.
#[must_use]
pub fn run(seed: u64, options: &Options) -> Outcome {
    run_config(Config::draw(Randomness::new(seed)), options)
}

/// Runs a seed with a configuration of its own.
#[must_use]
pub fn run_config(mut config: Config, options: &Options) -> Outcome {
    let (seed, randomness) = (config.seed, Randomness::new(config.seed));
    options.edits.simplify(&mut config);
    if options.without_damage {
        config.rates.spare_what_is_durable();
    }
    config.knobs.plants = options.plants;
    let json = config.to_json();
    let mut run = Run::new(config, randomness, options);
    let judged = catch_unwind(AssertUnwindSafe(|| run.through_all_phases()));
    let failure = match judged {
        Ok(judged) => judged.err(),
        Err(panic) => Some(Violation { rule: "panic", detail: panic_text(panic.as_ref()) }),
    };
    Outcome {
        seed,
        config: json,
        trace_hash: run.world.trace().hash(),
        events: run.world.trace().event_count(),
        simulated_ns: run.world.now().0,
        acknowledged: run.oracles.acknowledged_count(),
        struck: run.all_struck(),
        marks: run.marks,
        failure,
        faults: run.fault_count,
        operations: run.shared.borrow().begun.clone(),
        text: run.world.trace().lines().to_vec(),
    }
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned()
}

struct Run {
    config: Config,
    world: World<Cluster>,
    oracles: Oracles,
    shared: SharedHandle,
    nodes: Vec<NodeId>,
    clients: Vec<NodeId>,
    plan: Vec<(Moment, Fault)>,
    fault_count: usize,
    atlas: Atlas,
    struck: BTreeMap<&'static str, u64>,
    /// Where reads that are under way may bring what was damaged.
    repaired: BTreeSet<NodeId>,
    /// When each node has mended something last.
    mended: BTreeMap<NodeId, Moment>,
    /// The present window of the storm rule: its start, and the events before it.
    window: (Moment, u64),
    /// What a wake-up number stands for.
    later: BTreeMap<u64, Turn>,
    next_turn: u64,
    is_calm: bool,
    /// Empty between events.
    happened: Vec<Happened>,
    marks: BTreeMap<Mark, u64>,
    restarts: Prng,
}

#[derive(Clone, Copy, Debug)]
enum Turn {
    Fault(Fault),
    Later(Later),
    /// An operator has asked so often.
    Asked(NodeId, Decision, u64),
}

struct Eyes<'a>(&'a World<Cluster>);

impl Probe for Eyes<'_> {
    fn would_survive(&self, node: NodeId, file: File, offset: u64, bytes: u64) -> bool {
        self.0.disk(node).would_survive(file, offset, bytes)
    }

    fn register(&self) -> RegisterState {
        let (_, bytes) = self.0.register().peek();
        RegisterState::decode(bytes).expect("the register holds what a leader wrote")
    }
}

impl Run {
    fn new(config: Config, randomness: Randomness, options: &Options) -> Self {
        let nodes: Vec<NodeId> = (1..=config.layout.nodes).map(NodeId).collect();
        let clients: Vec<NodeId> = (0..config.writers + config.consumers)
            .map(|place| NodeId(FIRST_CLIENT + place))
            .collect();
        let consumers = config.writers..config.writers + config.consumers;
        let consumers = consumers.map(ConsumerId);
        let shared =
            Shared::new(config.mix.clone(), config.knobs.clone(), nodes.clone(), consumers);
        {
            let mut shared = shared.borrow_mut();
            shared.seed = config.seed;
            shared.may_rot = config.rates.may_rot();
            shared.skipped.clone_from(&options.edits.operations);
        }
        let topology = config.layout.topology();
        let cluster = Cluster::new(topology, config.knobs.clone(), config.writers, shared.clone());
        let world = World::new(config.profile.clone(), randomness, cluster, options.with_text);
        let mut plan = faults::plan(&config, &nodes, &clients, randomness);
        let fault_count = plan.len();
        options.edits.thin(&mut plan);
        let oracles = Oracles::new(config.layout.resolvers.len());
        let atlas = Atlas::new(config.layout.replication);
        Self {
            config,
            world,
            oracles,
            shared,
            nodes,
            clients,
            plan,
            fault_count,
            atlas,
            struck: BTreeMap::new(),
            repaired: BTreeSet::new(),
            mended: BTreeMap::new(),
            window: (Moment::ZERO, 0),
            later: BTreeMap::new(),
            next_turn: 0,
            is_calm: false,
            happened: Vec::new(),
            marks: BTreeMap::new(),
            restarts: randomness.stream("restarts", 0),
        }
    }

    fn through_all_phases(&mut self) -> Result<(), Violation> {
        self.world.say(|| "warm-up".to_owned());
        for node in self.nodes.iter().chain(&self.clients) {
            self.world.start(*node);
        }
        self.until("streams", WARM_UP_MS_MAX, |run| run.shared.borrow().has_streams())?;

        self.world.say(|| "chaos".to_owned());
        let begin = self.world.now();
        for (at, fault) in core::mem::take(&mut self.plan) {
            self.at(begin.plus_ns(at.0), Turn::Fault(fault));
        }
        self.advance(self.config.chaos_ms)?;

        self.world.say(|| "calm".to_owned());
        self.calm();
        self.advance(AFTER_CHAOS_MS)?;

        self.world.say(|| "end".to_owned());
        self.shared.borrow_mut().is_stopping = true;
        self.until("open calls", LIVENESS_MS, |run| {
            run.shared.borrow().open_calls.values().all(|open| *open == 0)
        })?;
        // Everybody is back and well: the log is whole on as many log servers as it should be, or as there
        // are nodes for.
        self.until("absent log servers", LIVENESS_MS, |run| {
            let last = run.world.register_state().generations.pop();
            let absent = last.map_or_else(Vec::new, |last| last.absent);
            let is_given_up = |node: &NodeId| {
                run.world.lost() == Some(*node) && !faults::has_heir(&run.world, *node)
            };
            absent.iter().all(is_given_up)
        })?;
        // Somebody reads all logs through, and what is damaged is mended from who has it whole.
        let mended = self.until("mends", LIVENESS_MS, |run| run.unmended().is_none());
        mended.map_err(|violation| match self.unmended() {
            Some(detail) => Violation { rule: "O7.rotten", detail },
            None => violation,
        })?;
        let acknowledged = self.oracles.acknowledged();
        self.shared.borrow_mut().want = acknowledged;
        self.until("consumers", LIVENESS_MS, |run| run.shared.borrow().consumed() >= acknowledged)?;
        self.oracles.finish()
    }

    /// Goes on until something holds; a violation when it never does.
    fn until(
        &mut self,
        what: &str,
        ms_max: u64,
        holds: impl Fn(&Self) -> bool,
    ) -> Result<(), Violation> {
        let deadline = self.world.now().plus_ns(ms_max * MS);
        while !holds(self) {
            if self.world.now() >= deadline {
                let detail = format!("{what} not within {ms_max} ms: {}", self.lines().join("; "));
                return Err(Violation { rule: "O16.liveness", detail });
            }
            self.advance(LOOK_MS)?;
        }
        Ok(())
    }

    fn lines(&self) -> Vec<String> {
        use crate::process::Process as _;
        let all = self.nodes.iter().chain(&self.clients);
        let lines = all.map(|node| match self.world.process(*node) {
            Some(process) => process.line(),
            None => format!("{node} is down"),
        });
        lines.collect()
    }

    fn advance(&mut self, ms: u64) -> Result<(), Violation> {
        let until = self.world.now().plus_ns(ms * MS);
        // A wake-up at the end, so that time moves even when nothing happens.
        self.world.wake(until, u64::MAX);
        while self.world.step(until) {
            self.judge()?;
            for number in self.world.take_woken() {
                if let Some(turn) = self.later.remove(&number) {
                    self.turn(turn);
                    self.judge()?;
                }
            }
            // A planted bug is for the oracles to find: a role's own check would come first.
            if self.config.knobs.plants == Plants::NONE {
                self.world.check_states();
            }
            self.judge_pace()?;
        }
        Ok(())
    }

    /// O15: nobody works without a pause.
    fn judge_pace(&mut self) -> Result<(), Violation> {
        let (events, now) = (self.world.trace().event_count(), self.world.now());
        let (since, before) = self.window;
        if events - before > WINDOW_EVENTS_MAX || events > EVENTS_MAX {
            let detail = format!("{} events between {since:?} and {now:?}", events - before);
            return Err(Violation { rule: "O15.storm", detail });
        }
        if now.0 - since.0 > WINDOW_MS * MS {
            self.window = (now, events);
        }
        Ok(())
    }

    fn judge(&mut self) -> Result<(), Violation> {
        if !self.world.has_happened() {
            return Ok(());
        }
        let mut happened = core::mem::take(&mut self.happened);
        self.world.swap_happened(&mut happened);
        for one in happened.drain(..) {
            self.judge_one(&one)?;
        }
        self.happened = happened;
        Ok(())
    }

    fn judge_one(&mut self, happened: &Happened) -> Result<(), Violation> {
        match happened {
            Happened::Mark(mark) => *self.marks.entry(*mark).or_default() += 1,
            Happened::Halted(peer, halt) => self.judge_halt(*peer, halt)?,
            Happened::Wrote(node, request) if !self.world.is_on_foreign_disk(*node) => {
                self.atlas.wrote(*node, request);
            }
            Happened::Note(from, note) => self.judge_damage(*from, note)?,
            _ => {}
        }
        self.oracles.judge(happened, &Eyes(&self.world))
    }

    fn condition(&self, node: NodeId) -> Condition {
        Condition {
            is_harmed: self.world.disk(node).is_harmed(),
            is_foreign: self.world.is_on_foreign_disk(node),
        }
    }

    /// A halt must have a reason that this run gave it. An operator puts that right and starts the node
    /// again.
    fn judge_halt(&mut self, peer: Peer, halt: &Halt) -> Result<(), Violation> {
        let node = peer.node;
        let mut condition = self.condition(node);
        // It may have read what was repaired since. Its next life has not.
        condition.is_harmed |= self.repaired.remove(&node);
        let noticed = match damage::judge_halt(peer, halt, condition)? {
            Remedy::PowerOff => {
                self.world.disk_mut(node).crash(Crash::PowerCut);
                "noticed.barrier_error"
            }
            Remedy::ReturnDisk => {
                self.world.return_disk(node);
                "noticed.foreign_log"
            }
            Remedy::Repair => {
                self.world.disk_mut(node).repair();
                "noticed.corrupt_log"
            }
        };
        *self.struck.entry(noticed).or_default() += 1;
        let down = self.restarts.between(MS, 50 * MS);
        let back = self.world.now().plus_ns(down);
        self.at(back, Turn::Later(Later::Start(node)));
        Ok(())
    }

    fn judge_damage(&mut self, from: Endpoint, note: &Note) -> Result<(), Violation> {
        let node = from.node;
        match note {
            Note::Opened { .. } => {
                damage::judge_note(from, note, self.condition(node))?;
                self.atlas.opened(node);
            }
            Note::Warning { code: "corrupt_block", .. } => {
                let mut condition = self.condition(node);
                let now = self.world.now();
                let is_late = |at: &Moment| now.0 - at.0 < LATE_READ_MS * MS;
                condition.is_harmed |=
                    self.repaired.contains(&node) || self.mended.get(&node).is_some_and(is_late);
                damage::judge_note(from, note, condition)?;
                *self.struck.entry("noticed.corrupt_block").or_default() += 1;
            }
            Note::Mended { stream, version, .. } => {
                self.mended.insert(node, self.world.now());
                let disk = self.world.disk(node);
                let eyes = (&self.atlas, disk, &self.oracles);
                mends::judge(node, *stream, *version, eyes)?;
                self.atlas.mended(node, disk);
                *self.struck.entry("noticed.mended").or_default() += 1;
            }
            _ => {}
        }
        Ok(())
    }

    /// A damaged block that could have been mended.
    fn unmended(&self) -> Option<String> {
        let nodes = self.nodes.iter().filter(|node| self.world.knows(**node));
        let nodes: Vec<NodeId> = nodes.copied().collect();
        let disk = |node: NodeId| self.world.disk(node);
        let damaged = nodes.iter().flat_map(|node| {
            let blocks = mends::damaged(*node, &self.atlas, disk(*node)).into_iter();
            blocks.map(|block| (*node, block))
        });
        let wanted =
            damaged.filter(|(node, of)| self.oracles.is_wanted(*node, of.stream, of.version));
        let mut mendable = wanted.filter(|(node, block)| {
            let (stream, version) = (block.stream, block.version);
            let others = nodes.iter().filter(|other| *other != node);
            others
                .into_iter()
                .any(|other| mends::has_whole(*other, stream, version, &self.atlas, disk(*other)))
        });
        let (node, block) = mendable.next()?;
        Some(format!("{} at {} on {node}, {:?}", block.stream, block.version, block.file))
    }

    fn all_struck(&self) -> BTreeMap<&'static str, u64> {
        let mut all = self.struck.clone();
        let nodes = self.nodes.iter().filter(|node| self.world.knows(**node));
        let misled = nodes.map(|node| self.world.disk(*node).misdirected_count()).sum();
        all.insert("misdirect", misled);
        all
    }

    fn at(&mut self, at: Moment, turn: Turn) {
        self.next_turn += 1;
        self.later.insert(self.next_turn, turn);
        self.world.wake(at, self.next_turn);
    }

    fn turn(&mut self, turn: Turn) {
        match turn {
            Turn::Fault(Fault::Lose { node, .. }) if !self.can_lead_without(NodeId(node)) => {}
            Turn::Fault(fault) if !self.is_calm => {
                let struck = faults::strike(&mut self.world, &mut self.atlas, fault);
                if struck != Struck::Missed {
                    *self.struck.entry(fault.kind()).or_default() += 1;
                }
                if let Struck::Then(at, later) = struck {
                    self.at(at, Turn::Later(later));
                }
            }
            Turn::Fault(_) => {}
            Turn::Later(later) => self.carry_out(later),
            Turn::Asked(node, what, tries) => self.ask(node, what, tries),
        }
    }

    fn carry_out(&mut self, later: Later) {
        match later {
            Later::Start(node) => {
                if self.world.live(node).is_none() {
                    self.world.start(node);
                }
            }
            Later::Unlimit(node) => self.world.disk_mut(node).limit(1 << 40),
            Later::Ask(node, what) => self.ask(node, what, 0),
        }
    }

    /// Whether another node may lead.
    fn can_lead_without(&self, node: NodeId) -> bool {
        let removed = self.world.register_state().membership.removed;
        let mut candidates = (1..=self.config.layout.candidates).map(NodeId);
        candidates.any(|other| other != node && !removed.contains(&other))
    }

    /// An operator asks every node for a decision, and again until the register holds it.
    fn ask(&mut self, node: NodeId, what: Decision, tries: u64) {
        let membership = self.world.register_state().membership;
        if membership.is_decided(node, what.change()) || tries >= ASKS_MAX {
            return;
        }
        let operator = Peer { node: OPERATOR, incarnation: Incarnation(1) };
        let (request, change) = (RequestId(tries + 1), what.change());
        for candidate in (1..=self.config.layout.candidates).map(NodeId) {
            let message = ChangeMember { request, node, change }.into();
            self.world.tell(candidate, operator.endpoint(Role::Client), message);
        }
        let again = self.world.now().plus_ns(ASK_AGAIN_MS * MS);
        self.at(again, Turn::Asked(node, what, tries + 1));
    }

    /// Ends all faults; what has to be done later is done now.
    fn calm(&mut self) {
        self.is_calm = true;
        self.world.calm();
        // With one copy only an operator can bring back what was harmed.
        if !self.atlas.is_survivable() {
            for node in self.nodes.clone() {
                self.world.repair(node);
                self.repaired.insert(node);
            }
        }
        for (_, turn) in core::mem::take(&mut self.later) {
            match turn {
                Turn::Later(later) => self.carry_out(later),
                Turn::Asked(node, what, tries) => self.ask(node, what, tries),
                Turn::Fault(_) => {}
            }
        }
        for node in self.nodes.iter().chain(&self.clients) {
            if self.world.live(*node).is_none() {
                self.world.start(*node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_is_one_trace_and_another_seed_another() {
        let hash = |seed, with_text| {
            let mut config = Config::draw(Randomness::new(seed));
            (config.chaos_ms, config.writers) = (100, 2);
            let outcome = run_config(config, &Options { with_text, ..Options::default() });
            (outcome.trace_hash, outcome.events)
        };
        let first = hash(3, false);
        assert_eq!(first, hash(3, true), "the text changes nothing");
        assert_ne!(first, hash(5, false));
    }
}
