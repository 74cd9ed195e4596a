//! The small configurations, and how far each is led before the exploration begins.

use common::message::{CommitKind, CommitRequest};
use common::wire::Envelope;
use common::{
    Endpoint, Epoch, Incarnation, KeyRange, Knobs, NodeId, Peer, Plants, Ranges, RequestId, Role,
};
use sequencer::leader::Topology;

use super::letter::{Letter, Trouble};
use super::small::{Rules, Small};
use crate::oracle::Violation;
use crate::workload::FIRST_CLIENT;

/// Steps that the way to the start may take, at most.
const LEAD_MAX: u32 = 5_000;

/// A small configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Two leaders begin at once with an empty register and one log server.
    Birth,
    /// A leader serves and a commit is under way; a second leader begins. One log server.
    Duel,
    /// The same with two log servers and two copies.
    DuelOfTwo,
    /// Two proxies commit through one sequencer, one resolver and one log server.
    Pipeline,
    /// A single node with a commit under way; its disk carries out one request at a time.
    Disk,
}

impl Scope {
    /// All of them.
    pub const ALL: &[Self] =
        &[Self::Birth, Self::Duel, Self::DuelOfTwo, Self::Pipeline, Self::Disk];

    /// The name in lists.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Birth => "birth",
            Self::Duel => "duel",
            Self::DuelOfTwo => "duel-of-two",
            Self::Pipeline => "pipeline",
            Self::Disk => "disk",
        }
    }

    /// The trouble that it has unless something else is asked for.
    #[must_use]
    pub const fn trouble(self) -> Trouble {
        let none = Trouble { drops: 0, doubles: 0, unsures: 0, timers: 0, crashes: 0 };
        match self {
            Self::Birth | Self::Duel => Trouble { unsures: 1, crashes: 1, ..none },
            Self::DuelOfTwo => Trouble { crashes: 1, ..none },
            Self::Pipeline => Trouble { drops: 1, doubles: 1, timers: 1, ..none },
            Self::Disk => Trouble { crashes: 2, ..none },
        }
    }

    /// Leads a small world to where the exploration begins.
    pub(super) fn start(
        self,
        trouble: Trouble,
        plants: Plants,
        is_register_blind: bool,
    ) -> Result<Small, Violation> {
        let mut rules = self.rules(plants);
        rules.is_register_blind = is_register_blind;
        let mut small = Small::new(rules, 1);
        match self {
            Self::Birth => (1..=3).try_for_each(|node| small.boot(NodeId(node)))?,
            Self::Duel | Self::DuelOfTwo => {
                small.boot(NodeId(1))?;
                small.boot(NodeId(2))?;
                if self == Self::DuelOfTwo {
                    small.boot(NodeId(4))?;
                }
                serve(&mut small)?;
                commit(&mut small, NodeId(1), 0, 1);
                small.boot(NodeId(3))?;
            }
            Self::Pipeline => {
                (1..=3).try_for_each(|node| small.boot(NodeId(node)))?;
                serve(&mut small)?;
                commit(&mut small, NodeId(2), 0, 1);
                commit(&mut small, NodeId(3), 1, 2);
            }
            Self::Disk => {
                small.boot(NodeId(1))?;
                serve(&mut small)?;
                commit(&mut small, NodeId(1), 0, 1);
            }
        }
        small.allow(trouble);
        Ok(small)
    }

    fn rules(self, plants: Plants) -> Rules {
        let alone = |node: u64, logs: &[u64]| Topology {
            log_servers: logs.iter().copied().map(NodeId).collect(),
            replication: u8::try_from(logs.len()).expect("a few log servers"),
            ..Topology::single(NodeId(node))
        };
        let leaders = match self {
            Self::Birth | Self::Duel => vec![(1, alone(1, &[2])), (3, alone(3, &[2]))],
            Self::DuelOfTwo => vec![(1, alone(1, &[2, 4])), (3, alone(3, &[2, 4]))],
            Self::Pipeline => {
                let proxies = vec![NodeId(2), NodeId(3)];
                vec![(1, Topology { proxies, ..Topology::single(NodeId(1)) })]
            }
            Self::Disk => vec![(1, Topology::single(NodeId(1)))],
        };
        Rules {
            // A scrub is a timer that never ends.
            knobs: Knobs { plants, scrub_bytes_per_second: 0, ..Knobs::small() },
            leaders: leaders.into_iter().map(|(node, of)| (NodeId(node), of)).collect(),
            has_slow_disks: self == Self::Disk,
            power_cuts: if self == Self::Disk { 4 } else { 0 },
            epoch_max: if matches!(self, Self::Duel | Self::DuelOfTwo) { 4 } else { 3 },
            is_register_blind: false,
        }
    }
}

/// Goes on without trouble until the first epoch serves and nothing is under way.
fn serve(small: &mut Small) -> Result<(), Violation> {
    for _ in 0..LEAD_MAX {
        if small.node(NodeId(1)).serving_epoch().is_some() && small.is_quiet() {
            return Ok(());
        }
        if !small.make_fair()? {
            break;
        }
    }
    panic!("the first epoch does not serve");
}

/// A client's commit is under way to the proxy of a node.
fn commit(small: &mut Small, node: NodeId, proxy: u8, client: u64) {
    let to = small.live(node);
    let client = Peer { node: NodeId(FIRST_CLIENT + client), incarnation: Incarnation(1) };
    let key = client.node.0.to_be_bytes();
    let request = CommitRequest {
        writes: Ranges::from_ranges([KeyRange::point(&key)]),
        ..CommitRequest::empty(CommitKind::User, RequestId(1))
    };
    let envelope = Envelope {
        from: client.endpoint(Role::Client),
        to: Endpoint { role: Role::Proxy(proxy), ..to.endpoint(Role::Node) },
        epoch: small.node(node).serving_epoch().unwrap_or(Epoch::ZERO),
        message: request.into(),
    };
    small.post(Letter::Message { to, envelope });
}
