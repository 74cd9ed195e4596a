//! The face against real QUIC on loopback: a server that says yes to everything.

use core::time::Duration;
use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use common::message::{
    ClusterView, CommitOutcome, CommitReply, Hello, MessageLane, Pulled, PulledBlock,
    PulledVersion, ReadVersionReply, StatusReply,
};
use common::quic::tls::Development;
use common::quic::{CloseCode, Connection, Event, Lane, Options, QuicEndpoint};
use common::record::Section;
use common::wire::{self, Envelope};
use common::{
    Endpoint, Epoch, Incarnation, Message, NodeId, Offset, Payload, Peer, Position, Role, StreamId,
    Version, WallTime,
};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{Client, ConnectOptions};
use crate::Transaction;

/// Far above what any test needs: only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);
const NODE: Peer = Peer { node: NodeId(1), incarnation: Incarnation(1) };
const STREAM: StreamId = StreamId(16);

enum Order {
    /// Closes all connections.
    Cut,
    /// Takes commits from here on and answers none of them.
    Mute,
}

/// A node, proxy and log server in one, for one stream.
struct Server {
    connections: BTreeMap<u64, (Connection, Option<Peer>)>,
    /// Records of each commit, with its version.
    log: Vec<(Version, Bytes)>,
    ids: BTreeMap<common::IdempotencyId, (Version, u64)>,
    is_mute: bool,
    greetings: mpsc::UnboundedSender<Incarnation>,
}

struct Rig {
    _directory: tempfile::TempDir,
    ca: std::path::PathBuf,
    address: String,
    port: u16,
    orders: mpsc::UnboundedSender<Order>,
    greetings: mpsc::UnboundedReceiver<Incarnation>,
}

fn rig() -> Rig {
    let directory = tempfile::tempdir().unwrap();
    let development = Development::open(&directory.path().join("tls"), &[]).unwrap();
    let any_port = "127.0.0.1:0".parse().unwrap();
    let (endpoint, mut events) =
        QuicEndpoint::server(any_port, &development.server(), None, Options::default()).unwrap();
    let address = endpoint.local_addr().unwrap();
    let (orders, mut inbox) = mpsc::unbounded_channel();
    let (greetings, greeted) = mpsc::unbounded_channel();
    let mut server = Server {
        connections: BTreeMap::new(),
        log: Vec::new(),
        ids: BTreeMap::new(),
        is_mute: false,
        greetings,
    };
    tokio::spawn(async move {
        loop {
            tokio::select! {
                Some(event) = events.recv() => server.handle(event),
                order = inbox.recv() => match order {
                    Some(Order::Cut) => server
                        .connections
                        .values()
                        .for_each(|(connection, _)| connection.close(CloseCode::SHUTDOWN, "cut")),
                    Some(Order::Mute) => server.is_mute = true,
                    None => return drop(endpoint),
                },
            }
        }
    });
    Rig {
        ca: development.client().ca,
        _directory: directory,
        address: address.to_string(),
        port: address.port(),
        orders,
        greetings: greeted,
    }
}

impl Rig {
    async fn client(&self) -> Client {
        Client::connect([self.address.clone()], ConnectOptions::new(&self.ca)).await.unwrap()
    }
}

impl Server {
    fn handle(&mut self, event: Event) {
        match event {
            Event::Opened(connection) => {
                self.connections.insert(connection.id().0, (connection, None));
            }
            Event::Closed { connection, .. } => drop(self.connections.remove(&connection.0)),
            Event::Frames(inbound) => {
                let id = inbound.connection.0;
                for frame in inbound.into_frames() {
                    let Some((_, peer)) = self.connections.get(&id) else { return };
                    let nobody = Peer { node: NodeId(0), incarnation: Incarnation(0) };
                    let peer = peer.unwrap_or(nobody);
                    let envelope = wire::decode(&frame, peer, NODE.node).unwrap();
                    self.answer(id, envelope);
                }
            }
            _ => {}
        }
    }

    fn answer(&mut self, id: u64, envelope: Envelope) {
        let Envelope { from, to, message, .. } = envelope;
        let reply: Message = match message {
            Message::Hello(hello) => {
                assert!(hello.is_client);
                self.connections.get_mut(&id).unwrap().1 = Some(hello.peer);
                // Nobody listens in tests that don't count connections.
                let _ = self.greetings.send(hello.peer.incarnation);
                let hello =
                    Hello { peer: NODE, protocol_min: 1, protocol_max: 1, is_client: false };
                let client = self.connections[&id].1.unwrap().endpoint(Role::Client);
                return self.send(id, NODE.endpoint(Role::Node), client, hello);
            }
            Message::FindCluster(find) => ClusterView {
                request: find.request,
                epoch: Epoch(1),
                recovery_version: Version(0),
                proxies: vec![NODE.endpoint(Role::Proxy(0))],
                log_servers: vec![NODE.endpoint(Role::LogServer)],
                absent: Vec::new(),
                replication: 1,
                seats: common::membership::Seats::new(),
                phase: "serving".to_owned(),
                addresses: Vec::new(),
            }
            .into(),
            Message::Status(status) => {
                StatusReply { request: status.request, json: "{}".to_owned() }.into()
            }
            Message::ReadVersionRequest(read) => {
                let version = self.version();
                ReadVersionReply { request: read.request, version }.into()
            }
            Message::CommitRequest(commit) => {
                let version = self.version().plus(1);
                let is_user = !commit.sections.is_empty();
                let outcome = if is_user {
                    let base = self.log.len() as u64;
                    self.log.push((version, commit.payload.contiguous()));
                    self.ids.insert(commit.id.unwrap(), (version, base));
                    CommitOutcome::Committed {
                        position: Position { version, index: 0 },
                        commit_time: WallTime(0),
                        base_offsets: vec![Offset(base)],
                    }
                } else {
                    // A fence: its id has been used.
                    CommitOutcome::Conflict { version, ranges: vec![] }
                };
                if self.is_mute && is_user {
                    return;
                }
                CommitReply { request: commit.request, outcome }.into()
            }
            Message::FindId(find) => {
                let (version, base) = self.ids[&find.id];
                common::message::IdFound {
                    request: find.request,
                    found: Some(common::message::FoundId {
                        position: Position { version, index: 0 },
                        commit_time: WallTime(0),
                        sections: vec![common::message::FoundSection {
                            stream: STREAM,
                            base_offset: Some(Offset(base)),
                        }],
                    }),
                    through: find.at_least.max(self.version()),
                    forgotten_through: Version::ZERO,
                }
                .into()
            }
            Message::Pull(pull) => self.pull(&pull).into(),
            other => panic!("{other:?}"),
        };
        self.send(id, to, from, reply);
    }

    fn version(&self) -> Version {
        self.log.last().map_or(Version(100), |(version, _)| *version)
    }

    fn pull(&self, pull: &common::message::Pull) -> Pulled {
        let (mut versions, mut blocks, mut payload) = (vec![], vec![], Payload::new());
        for (offset, (version, records)) in self.log.iter().enumerate() {
            if *version > pull.after {
                let mut body = BytesMut::new();
                body.put_slice(&Section::header(0, 1, records.len()));
                body.put_slice(records);
                let (bytes, checksum) = (body.len() as u32, crc32c::crc32c(&body));
                payload.push(body.freeze());
                let base_offset = Offset(offset as u64);
                blocks.push(PulledBlock {
                    stream: STREAM,
                    base_offset,
                    record_count: 1,
                    bytes,
                    checksum,
                });
                versions.push(PulledVersion {
                    version: *version,
                    commit_time: WallTime(0),
                    block_count: 1,
                });
            }
        }
        let through = self.version().max(pull.after);
        Pulled { request: pull.request, after: pull.after, through, versions, blocks, payload }
    }

    fn send(&self, id: u64, from: Endpoint, to: Endpoint, message: impl Into<Message>) {
        let message = message.into();
        let lane = match message.lane() {
            MessageLane::Control => Lane::Control,
            MessageLane::Commit => Lane::Commit,
            MessageLane::Pull => Lane::Pull,
        };
        let frame = wire::encode(&Envelope { from, to, epoch: Epoch(1), message });
        // The connection may have been cut meanwhile.
        let _ = self.connections[&id].0.try_send(lane, frame);
    }
}

fn line(text: &str) -> Transaction {
    let mut transaction = Transaction::new();
    transaction.append(STREAM, text.to_owned());
    transaction
}

async fn pulled_lines(client: &Client, count: usize) -> Vec<String> {
    let mut pull = client.pull([STREAM], Version::ZERO).await.unwrap();
    let mut lines = Vec::new();
    while lines.len() < count {
        for batch in pull.next().await.unwrap().batches {
            let records = batch.records().unwrap();
            lines.extend(
                records.iter().map(|r| String::from_utf8(r.record.value.to_vec()).unwrap()),
            );
        }
    }
    lines
}

#[tokio::test]
async fn commits_pulls_and_closes() {
    timeout(HANG, async {
        let rig = rig();
        let client = rig.client().await;
        let mut lane = client.ordered_lane().await.unwrap();
        let mut verdicts = Vec::new();
        for number in 0..500 {
            verdicts.push(lane.submit(line(&number.to_string())).await);
        }
        let mut last = Version::ZERO;
        for verdict in verdicts {
            let committed = verdict.await.unwrap();
            assert!(committed.position.version > last);
            last = committed.position.version;
        }
        assert_eq!(client.read_version().await.unwrap(), last);
        let expect: Vec<String> = (0..500).map(|number: u32| number.to_string()).collect();
        assert_eq!(pulled_lines(&client, 500).await, expect);
        assert_eq!(client.status().await.unwrap(), "{}");
        let other = client.clone();
        let _waits = client.pull([STREAM], last).await.unwrap();
        client.close().await;
        assert_eq!(other.read_version().await.unwrap_err().code(), common::Code::TimedOut);
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_commit_whose_connection_breaks_is_found_and_not_done_twice() {
    timeout(HANG, async {
        let rig = rig();
        let client = rig.client().await;
        client.commit(line("first")).await.unwrap();
        rig.orders.send(Order::Mute).unwrap();
        let verdict = client.submit(line("second")).await;
        // The server has it, since it answers questions that came later.
        client.read_version().await.unwrap();
        rig.orders.send(Order::Cut).unwrap();
        let committed = verdict.await.unwrap();
        assert_eq!(committed.offsets, [(STREAM, Some(Offset(1)))]);
        assert_eq!(pulled_lines(&client, 2).await, ["first", "second"]);
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn two_addresses_of_one_node_share_a_connection() {
    timeout(HANG, async {
        let mut rig = rig();
        let addresses = [rig.address.clone(), format!("localhost:{}", rig.port)];
        let client = Client::connect(addresses, ConnectOptions::new(&rig.ca)).await.unwrap();
        let incarnations =
            [rig.greetings.recv().await.unwrap(), rig.greetings.recv().await.unwrap()];
        assert_ne!(incarnations[0], incarnations[1]);
        for _ in 0..100 {
            client.commit(line("x")).await.unwrap();
        }
        assert!(rig.greetings.try_recv().is_err(), "one of them stays quiet");
        client.close().await;
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn nobody_there_is_said_with_the_addresses() {
    timeout(HANG, async {
        let rig = rig();
        let mut options = ConnectOptions::new(&rig.ca);
        options.connect_timeout = Duration::from_millis(300);
        options.quic.attempt_deadline = Duration::from_millis(50);
        let error = Client::connect(["127.0.0.1:1"], options).await.unwrap_err();
        assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    })
    .await
    .unwrap();
}
