//! The other nodes of the cluster: who dials whom, who is believed, and how each link stands.
//!
//! ```text
//!  n1 --dials--> n2          one connection for each pair: the lower id dials
//!   `---dials--> n3 <--dials-- n2
//!
//!  dialing side   resting --dial--> dialing --lanes open--> greeting --NodeHello back--> up
//!                    ^------- after a while, longer each time -'----------- closed ------'
//!  accepting side waiting --NodeHello that is believed, answered--> up --closed--> waiting
//!
//!  n3, just started --knock: NodeHello--> n1   closes it and dials at once, or says why not
//! ```
//!
//! # Rules
//! 1. The dialing side speaks first, and only the hello until it is answered. The answer may be overtaken by
//!    frames of other lanes; those are held back until it is there.
//! 2. A hello is believed when the peer's certificate is of the nodes' CA and for the name of the node that
//!    it claims to be, the cluster has the same name, and no other life has been seen that says otherwise.
//! 3. Nothing of an earlier life is taken once a later one has been seen. Two lives that count the same
//!    differ in their stamp: the later of them to come is refused.
//! 4. A new connection of a life that is linked already ends the old one, and the node hears of that first.
//! 5. Who waits to be dialed knocks once, when it starts: nobody has to try in vain until it is found, and
//!    it learns at once that it is not wanted.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::message::NodeHello;
use common::quic::tls::{TlsError, Voucher};
use common::quic::{CloseReason, ConnectError, ConnectFailure};
use common::wire::{FRAME_BYTES_MAX, PROTOCOL, PROTOCOL_MIN};
use common::{Backoff, Code, Incarnation, Knobs, NodeId, Peer, Prng, Refusal};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};

use crate::definition::{DefinedNode, Definition};

/// Waiting between dials, ms, at most: a node that starts again is found this soon.
const DIAL_BACKOFF_MS_MAX: u64 = 200;

/// The other nodes, from this one's point of view.
pub(super) struct Mesh {
    me: Peer,
    stamp: u64,
    definition: Definition,
    voucher: Voucher,
    links: BTreeMap<NodeId, Link>,
    /// Connections of peers that TLS or the hello has turned away.
    refused: u64,
}

struct Link {
    node: DefinedNode,
    state: State,
    since: Instant,
    backoff: Backoff,
    /// Connections that were up and broke.
    breaks: u64,
    /// The newest life that was believed, and its stamp.
    newest: Option<(Incarnation, u64)>,
    last_error: Option<(Code, String, Instant)>,
    /// The definition that differs and was complained about.
    differs: Option<u32>,
    /// The other side dials and does not know yet that this node is there.
    must_knock: bool,
}

/// What became of a hello that is believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Believed {
    /// The link is up.
    Linked,
    /// The peer is there, and this side dials it.
    Knocked,
}

/// What became of a dial that has opened its lanes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Dialed {
    /// The hello goes out.
    Wanted,
    /// A faster one has come before it.
    Superfluous,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The other side dials.
    Waiting,
    /// Dialed again at that time.
    Resting(Instant),
    Dialing,
    Greeting,
    Up,
}

impl State {
    const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Resting(_) => "resting",
            Self::Dialing => "dialing",
            Self::Greeting => "greeting",
            Self::Up => "up",
        }
    }
}

/// A link that is due.
pub(super) struct Dial {
    pub(super) node: NodeId,
    pub(super) is_knock: bool,
    pub(super) address: String,
    pub(super) tls_name: String,
}

impl Mesh {
    /// The links of `me`, none of which is up.
    pub(super) fn new(me: Peer, stamp: u64, definition: Definition) -> Result<Self, TlsError> {
        let now = Instant::now();
        let link = |node: &DefinedNode| Link {
            node: node.clone(),
            state: if me.node < node.id { State::Resting(now) } else { State::Waiting },
            since: now,
            backoff: Backoff::default(),
            breaks: 0,
            newest: None,
            last_error: None,
            differs: None,
            must_knock: me.node > node.id,
        };
        let others = definition.nodes.iter().filter(|node| node.id != me.node);
        let links = others.map(|node| (node.id, link(node))).collect();
        let voucher = Voucher::open(&definition.ca)?;
        Ok(Self { me, stamp, definition, voucher, links, refused: 0 })
    }

    /// What this node says of itself.
    pub(super) fn hello(&self) -> NodeHello {
        NodeHello {
            peer: self.me,
            stamp: self.stamp,
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL,
            cluster: self.definition.cluster.clone(),
            definition: self.definition.checksum(),
        }
    }

    /// Whether the id belongs to a node: no client may use it.
    pub(super) fn is_node(&self, id: NodeId) -> bool {
        self.definition.node(id).is_some()
    }

    /// The links that are due to be dialed, or knocked at; they count as such from now on.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Dial> {
        let mut due = Vec::new();
        for link in self.links.values_mut() {
            let is_knock = std::mem::take(&mut link.must_knock) && link.state == State::Waiting;
            let is_due = matches!(link.state, State::Resting(at) if at <= now);
            if is_due {
                link.enter(State::Dialing);
            }
            if is_due || is_knock {
                let node = &link.node;
                let (address, tls_name) = (node.address.clone(), node.tls_name.clone());
                due.push(Dial { node: node.id, is_knock, address, tls_name });
            }
        }
        due
    }

    /// When the next link is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let due = |link: &Link| match link.state {
            State::Resting(at) => Some(at),
            _ => None,
        };
        self.links.values().filter_map(due).min()
    }

    /// A dial has opened all lanes.
    pub(super) fn greet(&mut self, node: NodeId) -> Dialed {
        let link = self.link(node);
        if !matches!(link.state, State::Dialing | State::Resting(_)) {
            return Dialed::Superfluous;
        }
        link.enter(State::Greeting);
        Dialed::Wanted
    }

    /// A knock has not been answered: whoever is not there will dial when it is.
    pub(super) fn fail_to_knock(&mut self, node: NodeId, error: &ConnectError) {
        self.link(node).complain(refusal_of(error));
    }

    /// A knock was answered by a refusal.
    pub(super) fn knock_in_vain(&mut self, node: NodeId, refusal: Refusal) {
        self.link(node).complain(refusal);
    }

    /// A dial has failed.
    pub(super) fn fail(&mut self, node: NodeId, error: &ConnectError, rng: &mut Prng) {
        let link = self.link(node);
        link.complain(refusal_of(error));
        // A knock may have brought it nearer meanwhile.
        if link.state == State::Dialing {
            link.rest(rng);
        }
    }

    /// The connection to a node is over.
    pub(super) fn close(&mut self, node: NodeId, reason: &CloseReason, rng: &mut Prng) {
        let me = self.me.node;
        let link = self.link(node);
        link.breaks += u64::from(link.state == State::Up);
        let code = match reason {
            CloseReason::PeerClosed { code, .. } => code.code().unwrap_or(Code::TimedOut),
            CloseReason::Tls(_) => Code::NotVouched,
            CloseReason::ProtocolMismatch { .. } => Code::ProtocolMismatch,
            _ => Code::TimedOut,
        };
        // What this side closed it has complained about.
        if !matches!(reason, CloseReason::Local) {
            link.complain(Refusal::new(code, reason.to_string()));
        }
        if me < node { link.rest(rng) } else { link.enter(State::Waiting) }
    }

    /// Believes a hello, or says why not. `dialed` is who was meant to answer; `chain` what TLS has verified.
    pub(super) fn believe(
        &mut self,
        hello: &NodeHello,
        dialed: Option<NodeId>,
        chain: &[CertificateDer<'_>],
    ) -> Result<Believed, Refusal> {
        let judged = self.judge(hello, dialed, chain);
        let (me, definition) = (self.me.node, self.definition.checksum());
        let Some(link) = self.links.get_mut(&hello.peer.node) else {
            self.refused += 1;
            return judged.map(|()| unreachable!("only nodes with a link are believed"));
        };
        match judged {
            Ok(()) if dialed.is_none() && hello.peer.node > me => {
                if matches!(link.state, State::Resting(_) | State::Dialing) {
                    link.backoff.reset();
                    link.enter(State::Resting(Instant::now()));
                }
                Ok(Believed::Knocked)
            }
            Ok(()) => {
                link.newest = Some((hello.peer.incarnation, hello.stamp));
                link.backoff.reset();
                link.last_error = None;
                link.enter(State::Up);
                if hello.definition == definition {
                    link.differs = None;
                } else if link.differs.replace(hello.definition) != Some(hello.definition) {
                    tracing::warn!(
                        "definition_differs: {} was started with another definition than {}",
                        hello.peer.node,
                        self.me.node
                    );
                }
                Ok(Believed::Linked)
            }
            Err(refusal) => {
                self.refused += 1;
                link.complain(refusal.clone());
                Err(refusal)
            }
        }
    }

    fn judge(
        &self,
        hello: &NodeHello,
        dialed: Option<NodeId>,
        chain: &[CertificateDer<'_>],
    ) -> Result<(), Refusal> {
        let refuse = |code, why: String| Err(Refusal::new(code, why));
        let (me, claimed) = (self.me.node, hello.peer.node);
        if hello.protocol_max < PROTOCOL_MIN || hello.protocol_min > PROTOCOL {
            let (low, high) = (hello.protocol_min, hello.protocol_max);
            let why = format!("{low} to {high}; {me} speaks {PROTOCOL_MIN} to {PROTOCOL}");
            return refuse(Code::ProtocolMismatch, why);
        }
        // Who has not shown one is told nothing about this cluster, not even its name.
        if dialed.is_none() && chain.is_empty() {
            let why = "a node shows a certificate of its cluster's CA".to_owned();
            return refuse(Code::NotVouched, why);
        }
        if hello.cluster != self.definition.cluster {
            let ours = &self.definition.cluster;
            return refuse(
                Code::WrongCluster,
                format!("{me} is of {ours:?}, not {:?}", hello.cluster),
            );
        }
        if claimed == me {
            return refuse(Code::IdentityClash, format!("{me} is here"));
        }
        if let Some(dialed) = dialed.filter(|dialed| *dialed != claimed) {
            let why = format!("at the address of {dialed} there is {claimed}");
            return refuse(Code::IdentityClash, why);
        }
        let Some(link) = self.links.get(&claimed) else {
            return refuse(Code::NotVouched, format!("{me}'s definition has no {claimed}"));
        };
        // The certificate of who was dialed was verified for this name by TLS.
        if dialed.is_none()
            && let Err(why) = self.voucher.vouch(chain, &link.node.tls_name)
        {
            return refuse(Code::NotVouched, format!("{claimed}: {why}"));
        }
        let (life, stamp) = (hello.peer.incarnation, hello.stamp);
        match link.newest {
            Some((newest, _)) if newest > life => {
                refuse(Code::IdentityClash, format!("a later life of {claimed} is there: {newest}"))
            }
            Some((newest, known)) if newest == life && known != stamp => {
                refuse(Code::IdentityClash, format!("another {claimed} is there: {life}"))
            }
            _ => Ok(()),
        }
    }

    /// Bytes that may wait in each lane of a link. Everything that the proxies have not had answered fits, if
    /// they all live here, and a frame of anything else: less would break a link again and again, for what
    /// was lost with it is sent anew.
    pub(super) fn link_queue_bytes_max(&self, knobs: &Knobs) -> usize {
        let proxies = self.definition.topology.proxies.len() as u64;
        // Headers and columns beside the records.
        let bytes = proxies.saturating_mul(knobs.proxy_bytes_max) / 4 * 5;
        usize::try_from(bytes).unwrap_or(usize::MAX).saturating_add(FRAME_BYTES_MAX)
    }

    /// A peer that TLS has turned away.
    pub(super) const fn count_refused(&mut self) {
        self.refused += 1;
    }

    fn link(&mut self, node: NodeId) -> &mut Link {
        self.links.get_mut(&node).unwrap_or_else(|| panic!("{node} is no other node"))
    }

    /// For `status`.
    pub(super) fn report(&self) -> Value {
        let me = self.definition.node(self.me.node);
        let nodes: Vec<Value> = self.links.values().map(|link| link.report(self.me.node)).collect();
        json!({
            "name": self.definition.cluster,
            "definition": format!("{:08x}", self.definition.checksum()),
            "address": me.map(|me| &me.address),
            "label": me.map(|me| &me.label),
            "refused": self.refused,
            "nodes": nodes,
        })
    }
}

impl Link {
    fn enter(&mut self, state: State) {
        if self.state != state {
            (self.state, self.since) = (state, Instant::now());
        }
    }

    fn rest(&mut self, rng: &mut Prng) {
        let wait: Duration = self.backoff.next(DIAL_BACKOFF_MS_MAX, rng);
        self.enter(State::Resting(Instant::now() + wait));
    }

    /// Tells a reason once, not with every attempt.
    fn complain(&mut self, refusal: Refusal) {
        let code = refusal.code();
        let is_news = self.last_error.as_ref().is_none_or(|(last, ..)| *last != code);
        if is_news && code == Code::TimedOut {
            tracing::info!("{}: {}", self.node.id, refusal.detail);
        } else if is_news {
            tracing::warn!("{}: {}: {}", code.name(), self.node.id, refusal.detail);
        }
        self.last_error = Some((code, refusal.detail, Instant::now()));
    }

    fn report(&self, me: NodeId) -> Value {
        let ms = |since: Instant| u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let last_error = self.last_error.as_ref();
        json!({
            "node": self.node.id.to_string(),
            "address": self.node.address,
            "label": self.node.label,
            "state": self.state.name(),
            "since_ms": ms(self.since),
            "dialed_by": me.min(self.node.id).to_string(),
            "incarnation": self.newest.map(|(newest, _)| newest.0),
            "breaks": self.breaks,
            "last_error": last_error.map(|(code, what, at)| json!({
                "code": code.name(), "what": what, "ago_ms": ms(*at),
            })),
        })
    }
}

fn refusal_of(error: &ConnectError) -> Refusal {
    let is_tls =
        |failure: &ConnectFailure| matches!(failure, ConnectFailure::Closed(CloseReason::Tls(_)));
    let is_tls = error.attempts.iter().any(|(_, failure)| is_tls(failure));
    let code = if is_tls { Code::NotVouched } else { Code::TimedOut };
    Refusal::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use common::quic::tls::{certificates, make_development_cluster};

    use super::*;

    struct Rig {
        directory: tempfile::TempDir,
        mesh: Mesh,
    }

    fn definition(directory: &Path) -> Definition {
        let mut text =
            "cluster = \"blue\"\nregister = \"file:///r\"\nleaders = [1]\nproxies = [1]\n\
            resolvers = [{ node = 1 }]\nlog_servers = [1]\nreplication = 1\nca = \"tls/ca.pem\"\n"
                .to_owned();
        for id in 1..=3 {
            text += &format!(
                "[[nodes]]\nid = {id}\naddress = \"127.0.0.1:700{id}\"\ntls_name = \"node-{id}\"\n"
            );
        }
        Definition::parse(&text, directory).unwrap()
    }

    /// Node 2 of three.
    fn rig() -> Rig {
        let directory = tempfile::tempdir().unwrap();
        let nodes: Vec<_> =
            (1..=3).map(|id| (format!("node-{id}"), vec![format!("node-{id}")])).collect();
        make_development_cluster(&directory.path().join("tls"), &nodes).unwrap();
        let me = Peer { node: NodeId(2), incarnation: Incarnation(5) };
        let mesh = Mesh::new(me, 77, definition(directory.path())).unwrap();
        Rig { directory, mesh }
    }

    impl Rig {
        fn hello(&self, node: u64, life: u64, stamp: u64) -> NodeHello {
            let peer = Peer { node: NodeId(node), incarnation: Incarnation(life) };
            NodeHello { peer, stamp, ..self.mesh.hello() }
        }

        fn chain(&self, node: u64) -> Vec<CertificateDer<'static>> {
            let file = self.directory.path().join(format!("tls/node-{node}.pem"));
            certificates(&file).unwrap()
        }

        fn verdict(&mut self, hello: &NodeHello, shown_by: u64) -> Result<Believed, Code> {
            let chain = self.chain(shown_by);
            self.mesh.believe(hello, None, &chain).map_err(|refusal| refusal.code())
        }
    }

    #[test]
    fn a_hello_is_believed_only_from_the_node_itself() {
        let mut rig = rig();
        let good = rig.hello(1, 4, 9);
        let without = rig.mesh.believe(&good, None, &[]).map_err(|refusal| refusal.code());
        assert_eq!(without, Err(Code::NotVouched));
        assert_eq!(rig.verdict(&good, 3), Err(Code::NotVouched), "with the certificate of node 3");
        let wrong = NodeHello { cluster: "red".to_owned(), ..good.clone() };
        assert_eq!(rig.verdict(&wrong, 1), Err(Code::WrongCluster));
        let future = NodeHello { protocol_min: PROTOCOL + 1, protocol_max: 99, ..good.clone() };
        assert_eq!(rig.verdict(&future, 1), Err(Code::ProtocolMismatch));
        assert_eq!(rig.verdict(&rig.hello(9, 1, 1), 1), Err(Code::NotVouched), "not defined");
        assert_eq!(
            rig.verdict(&rig.hello(2, 6, 1), 2),
            Err(Code::IdentityClash),
            "this node's own"
        );
        assert_eq!(rig.mesh.refused, 6);
        assert_eq!(rig.verdict(&good, 1), Ok(Believed::Linked));
        assert_eq!(rig.mesh.report()["nodes"][0]["state"], "up");
    }

    #[test]
    fn lives_go_forward_and_stamps_keep_twins_apart() {
        let mut rig = rig();
        assert_eq!(rig.verdict(&rig.hello(1, 4, 9), 1), Ok(Believed::Linked));
        assert_eq!(
            rig.verdict(&rig.hello(1, 4, 9), 1),
            Ok(Believed::Linked),
            "the same life comes again"
        );
        assert_eq!(rig.verdict(&rig.hello(1, 4, 8), 1), Err(Code::IdentityClash), "a twin");
        assert_eq!(rig.verdict(&rig.hello(1, 5, 8), 1), Ok(Believed::Linked), "a later life");
        assert_eq!(rig.verdict(&rig.hello(1, 4, 9), 1), Err(Code::IdentityClash), "the past");
    }

    #[test]
    fn the_lower_id_dials_and_who_answers_must_be_whom_it_meant() {
        let mut rig = rig();
        let (now, mut rng) = (Instant::now(), Prng::new(1));
        let due = rig.mesh.take_due(now).into_iter().map(|dial| (dial.node, dial.is_knock));
        assert_eq!(due.collect::<Vec<_>>(), [(NodeId(1), true), (NodeId(3), false)]);
        assert!(rig.mesh.next_due().is_none() && rig.mesh.take_due(now).is_empty());
        assert_eq!(rig.mesh.greet(NodeId(3)), Dialed::Wanted);
        let other = rig.hello(1, 1, 1);
        let verdict = rig.mesh.believe(&other, Some(NodeId(3)), &[]);
        assert_eq!(verdict.map_err(|refusal| refusal.code()), Err(Code::IdentityClash));
        rig.mesh.close(NodeId(3), &CloseReason::Local, &mut rng);
        assert!(rig.mesh.next_due().is_some_and(|at| at >= now));
        let later = now + Duration::from_secs(9);
        assert_eq!(rig.mesh.take_due(later).len(), 1);
        assert_eq!(rig.mesh.greet(NodeId(3)), Dialed::Wanted);
        let hello = rig.hello(3, 1, 1);
        let believed = rig.mesh.believe(&hello, Some(NodeId(3)), &[]);
        assert_eq!(believed, Ok(Believed::Linked));
        assert!(rig.mesh.next_due().is_none());
    }

    #[test]
    fn a_knock_makes_the_dial_due_and_the_slower_dial_is_superfluous() {
        let mut rig = rig();
        let now = Instant::now();
        assert_eq!(rig.mesh.take_due(now).len(), 2);
        let knock = rig.hello(3, 7, 1);
        assert_eq!(rig.verdict(&knock, 3), Ok(Believed::Knocked));
        assert_eq!(
            rig.mesh.take_due(Instant::now()).len(),
            1,
            "dialed anew, though a dial is under way"
        );
        assert_eq!(rig.mesh.greet(NodeId(3)), Dialed::Wanted);
        assert_eq!(rig.mesh.greet(NodeId(3)), Dialed::Superfluous);
        assert_eq!(rig.mesh.believe(&knock, Some(NodeId(3)), &[]), Ok(Believed::Linked));
        assert_eq!(rig.verdict(&knock, 3), Ok(Believed::Knocked));
        assert!(rig.mesh.next_due().is_none(), "it is linked");
        let twin = rig.hello(3, 7, 2);
        assert_eq!(rig.verdict(&twin, 3), Err(Code::IdentityClash));
    }
}
