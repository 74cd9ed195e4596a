//! Two real endpoints on loopback, or one and a peer that breaks the rules.

use core::time::Duration;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use tempfile::TempDir;
use tokio::net::UdpSocket;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::tls::{ClientTls, Development, Identity, ServerTls};
use super::*;
use crate::wire::Frame;

/// Far above what any test needs: only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

/// A certificate directory with the server and the client sides of it.
struct Certificates {
    _directory: TempDir,
    development: Development,
}

impl Certificates {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let development = Development::open(&directory.path().join("tls"), &[]).unwrap();
        Self { _directory: directory, development }
    }

    fn server(&self) -> ServerTls {
        self.development.server()
    }

    fn client(&self) -> ClientTls {
        self.development.client()
    }
}

struct Side {
    endpoint: QuicEndpoint,
    events: mpsc::Receiver<Event>,
}

impl Side {
    fn server(certificates: &Certificates, options: Options) -> Self {
        Self::server_with(&certificates.server(), options)
    }

    fn server_with(tls: &ServerTls, options: Options) -> Self {
        let any_port = "127.0.0.1:0".parse().unwrap();
        let (endpoint, events) = QuicEndpoint::server(any_port, tls, None, options).unwrap();
        Self { endpoint, events }
    }

    fn client(certificates: &Certificates, options: Options) -> Self {
        Self::client_with(&certificates.client(), options)
    }

    fn client_with(tls: &ClientTls, options: Options) -> Self {
        let (endpoint, events) = QuicEndpoint::client(tls, options).unwrap();
        Self { endpoint, events }
    }

    fn address(&self) -> String {
        self.endpoint.local_addr().unwrap().to_string()
    }

    async fn connect(&self, server: &Self) -> Connection {
        self.endpoint.connect(&[server.address()]).await.unwrap()
    }

    async fn failure(&self, server: &Self) -> ConnectFailure {
        let error = self.endpoint.connect(&[server.address()]).await.unwrap_err();
        assert_eq!(error.attempts.len(), 1, "{error}");
        error.attempts.into_iter().next().unwrap().1
    }

    async fn next(&mut self) -> Event {
        timeout(HANG, self.events.recv()).await.expect("an event comes").unwrap()
    }

    async fn opened(&mut self) -> Connection {
        match self.next().await {
            Event::Opened(connection) => connection,
            other => panic!("{other:?} instead of Opened"),
        }
    }

    async fn closed(&mut self, connection: &Connection) -> CloseReason {
        match self.next().await {
            Event::Closed { connection: closed, reason } if closed == connection.id() => reason,
            other => panic!("{other:?} instead of Closed"),
        }
    }

    async fn refused(&mut self) -> CloseReason {
        match self.next().await {
            Event::Refused { reason, .. } => reason,
            other => panic!("{other:?} instead of Refused"),
        }
    }

    /// The next `count` frames of one lane.
    async fn frames(&mut self, lane: Lane, count: usize) -> Vec<Bytes> {
        let mut frames = Vec::new();
        while frames.len() < count {
            match self.next().await {
                Event::Frames(inbound) if inbound.lane == lane => {
                    frames.extend(inbound.into_frames());
                }
                other => panic!("{other:?} instead of frames of {lane:?}"),
            }
        }
        assert_eq!(frames.len(), count);
        frames
    }

    /// Sends back every frame on its lane until the receiver of events ends.
    fn echo(mut self) {
        tokio::spawn(async move {
            let mut connections = BTreeMap::new();
            while let Some(event) = self.events.recv().await {
                match event {
                    Event::Opened(connection) => {
                        connections.insert(connection.id(), connection);
                    }
                    Event::Frames(inbound) => {
                        let (id, lane) = (inbound.connection, inbound.lane);
                        for frame in inbound.into_frames() {
                            while connections[&id].try_send(lane, frame.clone()).is_err() {
                                tokio::task::yield_now().await;
                            }
                        }
                    }
                    Event::Closed { connection, .. } => drop(connections.remove(&connection)),
                    Event::Dialed { .. } | Event::Refused { .. } => {}
                }
            }
        });
    }
}

fn frame(bytes: usize, number: u32) -> Bytes {
    let mut frame = BytesMut::with_capacity(bytes);
    frame.put_u32_le(bytes as u32);
    frame.put_u32_le(number);
    frame.resize(bytes, number as u8);
    frame.freeze()
}

fn is_peer_protocol_close(reason: &CloseReason) -> bool {
    matches!(reason, CloseReason::PeerClosed { code: CloseCode::PROTOCOL, .. })
}

#[tokio::test]
async fn every_lane_echoes_thousands_of_frames_in_order_and_a_large_one() {
    const FRAMES: usize = 3000;
    let certificates = Certificates::new();
    let server = Side::server(&certificates, Options::default());
    let mut client = Side::client(&certificates, Options::default());
    let connection = client.connect(&server).await;
    server.echo();

    let mut expected: BTreeMap<Lane, Vec<Bytes>> = BTreeMap::new();
    for number in 0..FRAMES as u32 {
        for lane in Lane::ALL {
            let bytes = FRAME_BYTES_MIN + (number as usize * 37 + lane.index() * 11) % 2000;
            let frame = frame(bytes, number);
            connection.try_send(lane, frame.clone()).unwrap();
            expected.entry(lane).or_default().push(frame);
        }
    }
    let large = frame(40 << 20, 77);
    let mut in_pieces = Frame::from(large.slice(..100));
    in_pieces.payload.push(large.slice(100..1 << 20));
    in_pieces.payload.push(large.slice(1 << 20..));
    connection.try_send(Lane::Commit, in_pieces).unwrap();
    expected.entry(Lane::Commit).or_default().push(large);

    let mut got: BTreeMap<Lane, Vec<Bytes>> = BTreeMap::new();
    while got.values().map(Vec::len).sum::<usize>() < FRAMES * LANES + 1 {
        match client.next().await {
            Event::Frames(inbound) => {
                got.entry(inbound.lane).or_default().extend(inbound.into_frames());
            }
            other => panic!("{other:?} instead of frames"),
        }
    }
    assert!(got == expected, "some lane's frames differ");
    for lane in Lane::ALL {
        assert_eq!(connection.queued_bytes(lane), 0, "{lane:?}");
    }
    assert_eq!(connection.mtu(), 6500, "no black hole was seen: GSO and the MTU fit together");
}

#[tokio::test]
async fn frames_queued_together_leave_in_one_write() {
    const FRAMES: usize = 4000;
    let certificates = Certificates::new();
    let mut server = Side::server(&certificates, Options::default());
    let client = Side::client(&certificates, Options::default());
    let connection = client.connect(&server).await;
    server.opened().await;
    for number in 0..FRAMES as u32 {
        connection.try_send(Lane::Commit, frame(64, number)).unwrap();
    }
    server.frames(Lane::Commit, FRAMES).await;
    let stats = connection.stats();
    assert_eq!((stats.frames_sent, stats.writes), (FRAMES as u64, 1));
    assert_eq!(stats.bytes_sent, FRAMES as u64 * 64);
}

#[tokio::test]
async fn a_frame_over_the_limit_closes_its_own_connection_only() {
    let certificates = Certificates::new();
    let small = Options { frame_bytes_max: 1 << 20, ..Options::default() };
    let mut server = Side::server(&certificates, small);
    let mut client = Side::client(&certificates, Options::default());
    let bad = client.connect(&server).await;
    let good = client.connect(&server).await;
    let bad_at_server = server.opened().await;
    let good_at_server = server.opened().await;

    bad.try_send(Lane::Commit, frame(64, 1)).unwrap();
    bad.try_send(Lane::Commit, frame((1 << 20) + 1, 2)).unwrap();
    assert_eq!(server.frames(Lane::Commit, 1).await, [frame(64, 1)], "what came before is good");
    let reason = server.closed(&bad_at_server).await;
    assert!(
        matches!(&reason, CloseReason::Protocol(what) if what.contains("1048577")),
        "{reason:?}"
    );
    assert!(is_peer_protocol_close(&client.closed(&bad).await));
    assert_eq!(bad.try_send(Lane::Commit, frame(64, 3)), Err(SendError::Closed));

    good.try_send(Lane::Pull, frame(64, 4)).unwrap();
    assert_eq!(server.frames(Lane::Pull, 1).await, [frame(64, 4)]);
    good_at_server.try_send(Lane::Control, frame(64, 5)).unwrap();
    assert_eq!(client.frames(Lane::Control, 1).await, [frame(64, 5)]);
}

#[tokio::test]
async fn own_frames_over_the_limit_are_not_sent() {
    let certificates = Certificates::new();
    let server = Side::server(&certificates, Options::default());
    let small = Options { frame_bytes_max: 1000, ..Options::default() };
    let client = Side::client(&certificates, small);
    let connection = client.connect(&server).await;
    assert_eq!(connection.try_send(Lane::Pull, frame(1001, 0)), Err(SendError::TooLong));
    assert_eq!(connection.try_send(Lane::Pull, frame(1000, 0)), Ok(()));
}

/// A peer that speaks QUIC and TLS as we do, and then does what a test wants.
async fn rogue(certificates: &Certificates, server: &Side, protocol: &str) -> quinn::Connection {
    try_rogue(certificates, server, protocol).await.unwrap()
}

async fn try_rogue(
    certificates: &Certificates,
    server: &Side,
    protocol: &str,
) -> Result<quinn::Connection, quinn::ConnectionError> {
    let crypto = tls::client_config(&certificates.client(), &[protocol.to_owned()]).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = server.endpoint.local_addr().unwrap();
    endpoint.connect_with(config, address, tls::DEVELOPMENT_NAME).unwrap().await
}

#[tokio::test]
async fn garbage_closes_its_own_connection_only() {
    let certificates = Certificates::new();
    let mut server = Side::server(&certificates, Options::default());
    let client = Side::client(&certificates, Options::default());
    let good = client.connect(&server).await;
    server.opened().await;

    // A byte that is no lane.
    let peer = rogue(&certificates, &server, PROTOCOLS[0]).await;
    let (mut stream, _receive) = peer.open_bi().await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let reason = server.refused().await;
    assert!(matches!(&reason, CloseReason::Protocol(what) if what.contains("71")), "{reason:?}");
    assert!(matches!(peer.closed().await, quinn::ConnectionError::ApplicationClosed(_)));

    // The same lane twice.
    let peer = rogue(&certificates, &server, PROTOCOLS[0]).await;
    let mut streams = Vec::new();
    for _ in 0..2 {
        let (mut stream, receive) = peer.open_bi().await.unwrap();
        stream.write_all(&[Lane::Pull.byte()]).await.unwrap();
        streams.push((stream, receive));
    }
    let reason = server.refused().await;
    assert!(matches!(&reason, CloseReason::Protocol(what) if what.contains("twice")), "{reason:?}");

    // Good lanes, then garbage on one.
    let peer = rogue(&certificates, &server, PROTOCOLS[0]).await;
    let mut streams = Vec::new();
    for lane in Lane::ALL {
        let (mut stream, receive) = peer.open_bi().await.unwrap();
        stream.write_all(&[lane.byte()]).await.unwrap();
        streams.push((stream, receive));
    }
    let opened = server.opened().await;
    streams[1].0.write_all(&[0; 100]).await.unwrap();
    let reason = server.closed(&opened).await;
    assert!(
        matches!(&reason, CloseReason::Protocol(what) if what.contains("Commit")),
        "{reason:?}"
    );

    // A lane that ends inside a frame.
    let peer = rogue(&certificates, &server, PROTOCOLS[0]).await;
    let mut streams = Vec::new();
    for lane in Lane::ALL {
        let (mut stream, receive) = peer.open_bi().await.unwrap();
        stream.write_all(&[lane.byte()]).await.unwrap();
        streams.push((stream, receive));
    }
    let opened = server.opened().await;
    streams[0].0.write_all(&frame(64, 0)[..63]).await.unwrap();
    streams[0].0.finish().unwrap();
    let reason = server.closed(&opened).await;
    assert!(
        matches!(&reason, CloseReason::Protocol(what) if what.contains("inside")),
        "{reason:?}"
    );

    good.try_send(Lane::Control, frame(64, 4)).unwrap();
    assert_eq!(server.frames(Lane::Control, 1).await, [frame(64, 4)]);
}

#[tokio::test]
async fn lanes_that_never_open_are_refused() {
    let certificates = Certificates::new();
    let hasty = Options { attempt_deadline: Duration::from_millis(100), ..Options::default() };
    let mut server = Side::server(&certificates, hasty);
    let peer = rogue(&certificates, &server, PROTOCOLS[0]).await;
    let reason = server.refused().await;
    assert!(matches!(&reason, CloseReason::Protocol(what) if what.contains("time")), "{reason:?}");
    assert!(matches!(peer.closed().await, quinn::ConnectionError::ApplicationClosed(_)));
}

#[tokio::test]
async fn without_a_common_protocol_both_sides_say_so() {
    let certificates = Certificates::new();
    let mut server = Side::server(&certificates, Options::default());
    let newer = Options {
        protocols: vec!["millrace/3".to_owned(), "millrace/2".to_owned()],
        ..Options::default()
    };
    let client = Side::client(&certificates, newer);
    assert_eq!(
        client.failure(&server).await,
        ConnectFailure::Closed(CloseReason::ProtocolMismatch {
            ours: "millrace/3,millrace/2".to_owned(),
            theirs: "millrace/1".to_owned(),
        })
    );
    let reason = server.refused().await;
    assert!(matches!(reason, CloseReason::ProtocolMismatch { .. }), "{reason:?}");
}

#[tokio::test]
async fn the_best_common_protocol_is_taken() {
    let certificates = Certificates::new();
    let both = ["millrace/2", "millrace/1"].map(str::to_owned).to_vec();
    let server =
        Side::server(&certificates, Options { protocols: both.clone(), ..Options::default() });
    let newer = Side::client(&certificates, Options { protocols: both, ..Options::default() });
    let older = Side::client(&certificates, Options::default());
    newer.connect(&server).await;
    older.connect(&server).await;
    assert_eq!(
        rogue(&certificates, &server, "millrace/2").await.handshake_data().map(|data| {
            data.downcast::<quinn::crypto::rustls::HandshakeData>().unwrap().protocol
        }),
        Some(Some(b"millrace/2".to_vec()))
    );
}

#[tokio::test]
async fn a_peer_of_another_protocol_altogether_gets_the_typed_error_too() {
    let certificates = Certificates::new();
    let server_tls = certificates.server();
    let mut crypto = rustls::ServerConfig::builder_with_provider(Arc::new(
        rustls::crypto::ring::default_provider(),
    ))
    .with_protocol_versions(&[&rustls::version::TLS13])
    .unwrap()
    .with_no_client_auth()
    .with_single_cert(
        tls::certificates(&server_tls.identity.certificate).unwrap(),
        tls::key(&server_tls.identity.key).unwrap(),
    )
    .unwrap();
    crypto.alpn_protocols = vec![b"h3".to_vec()];
    let crypto = quinn::crypto::rustls::QuicServerConfig::try_from(crypto).unwrap();
    let config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    let foreign = quinn::Endpoint::server(config, "127.0.0.1:0".parse().unwrap()).unwrap();
    let address = foreign.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Some(incoming) = foreign.accept().await {
            drop(incoming.await);
        }
    });
    let client = Side::client(&certificates, Options::default());
    let error = client.endpoint.connect(&[address]).await.unwrap_err();
    assert_eq!(
        error.attempts[0].1,
        ConnectFailure::Closed(CloseReason::ProtocolMismatch {
            ours: "millrace/1".to_owned(),
            theirs: "another protocol".to_owned(),
        })
    );
}

#[tokio::test]
async fn a_server_of_another_ca_is_a_tls_error_at_both_ends() {
    let mut server = Side::server(&Certificates::new(), Options::default());
    let client = Side::client(&Certificates::new(), Options::default());
    let failure = client.failure(&server).await;
    assert!(matches!(failure, ConnectFailure::Closed(CloseReason::Tls(_))), "{failure:?}");
    let reason = server.refused().await;
    assert!(matches!(reason, CloseReason::Tls(_)), "{reason:?}");
}

#[tokio::test]
async fn a_server_of_another_name_is_a_tls_error() {
    let certificates = Certificates::new();
    let server = Side::server(&certificates, Options::default());
    let mut tls = certificates.client();
    tls.server_name = Some("elsewhere.example".to_owned());
    let failure = Side::client_with(&tls, Options::default()).failure(&server).await;
    assert!(matches!(failure, ConnectFailure::Closed(CloseReason::Tls(_))), "{failure:?}");
    tls.server_name = None;
    Side::client_with(&tls, Options::default()).connect(&server).await;
}

#[tokio::test]
async fn mutual_tls_takes_only_clients_of_the_ca() {
    let certificates = Certificates::new();
    let mut tls = certificates.server();
    tls.client_ca = Some(certificates.client().ca);
    let mut server = Side::server_with(&tls, Options::default());

    let failure = Side::client(&certificates, Options::default()).failure(&server).await;
    assert!(matches!(failure, ConnectFailure::Closed(CloseReason::Tls(_))), "{failure:?}");
    let reason = server.refused().await;
    assert!(matches!(reason, CloseReason::Tls(_)), "{reason:?}");

    let with = |identity: Identity| ClientTls { identity: Some(identity), ..certificates.client() };
    let stranger = Side::client_with(&with(Certificates::new_identity()), Options::default());
    let failure = stranger.failure(&server).await;
    assert!(matches!(failure, ConnectFailure::Closed(CloseReason::Tls(_))), "{failure:?}");
    assert!(matches!(server.refused().await, CloseReason::Tls(_)));

    let friend = Side::client_with(&with(certificates.server().identity), Options::default());
    friend.connect(&server).await;
    server.opened().await;
}

impl Certificates {
    /// An identity of a CA that nobody trusts. Its directory stays until the test process ends.
    fn new_identity() -> Identity {
        let directory = tempfile::tempdir().unwrap().keep();
        let development = Development::open(&directory.join("tls"), &[]).unwrap();
        development.server().identity
    }
}

/// Carries datagrams between one client and a server until it is cut. Returns its address.
async fn cable(server: SocketAddr, mut cut: watch::Receiver<bool>) -> SocketAddr {
    let outside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let inside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = outside.local_addr().unwrap();
    tokio::spawn(async move {
        let mut client = None;
        let (mut out, mut back) = (vec![0; 65_536], vec![0; 65_536]);
        loop {
            tokio::select! {
                Ok((bytes, from)) = outside.recv_from(&mut out) => {
                    client = Some(from);
                    drop(inside.send_to(&out[..bytes], server).await);
                }
                Ok((bytes, _)) = inside.recv_from(&mut back) => {
                    if let Some(client) = client {
                        drop(outside.send_to(&back[..bytes], client).await);
                    }
                }
                _ = cut.changed() => return,
            }
        }
    });
    address
}

#[tokio::test]
async fn a_peer_that_falls_silent_is_noticed_and_one_that_is_idle_is_kept() {
    let certificates = Certificates::new();
    let watchful = Options {
        keep_alive: Duration::from_millis(50),
        idle: Duration::from_millis(500),
        ..Options::default()
    };
    let mut server = Side::server(&certificates, watchful.clone());
    let mut client = Side::client(&certificates, watchful);
    let (scissors, cut) = watch::channel(false);
    let address = cable(server.endpoint.local_addr().unwrap(), cut).await;
    let connection = client.endpoint.connect(&[address.to_string()]).await.unwrap();
    let at_server = server.opened().await;

    // Three idle times without a frame: the keep-alives hold the connection.
    assert!(timeout(Duration::from_millis(1500), client.events.recv()).await.is_err());
    assert!(!connection.is_closed());

    scissors.send_replace(true);
    assert_eq!(client.closed(&connection).await, CloseReason::IdleTimeout);
    assert_eq!(server.closed(&at_server).await, CloseReason::IdleTimeout);
    assert_eq!(connection.try_send(Lane::Control, frame(64, 0)), Err(SendError::Closed));
}

#[tokio::test]
async fn a_server_that_was_killed_and_started_again_says_so_at_once() {
    let certificates = Certificates::new();
    let tls = certificates.server();
    let (stop, mut stopped) = watch::channel(false);
    let (told, address) = tokio::sync::oneshot::channel();
    let first_life = {
        let tls = tls.clone();
        // A runtime of its own ends without a word to anybody.
        move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let server = runtime.block_on(async {
                let mut server = Side::server_with(&tls, Options::default());
                told.send(server.endpoint.local_addr().unwrap()).unwrap();
                server.opened().await;
                stopped.changed().await.unwrap();
                server
            });
            drop(runtime);
            drop(server);
        }
    };
    let killed = tokio::task::spawn_blocking(first_life);
    let address = address.await.unwrap();

    let patient = Options { idle: HANG, ..Options::default() };
    let mut client = Side::client(&certificates, patient);
    let connection = client.endpoint.connect(&[address.to_string()]).await.unwrap();
    stop.send(true).unwrap();
    killed.await.unwrap();
    let (_endpoint, _events) =
        QuicEndpoint::server(address, &tls, None, Options::default()).unwrap();
    assert_eq!(client.closed(&connection).await, CloseReason::PeerGone);
}

#[tokio::test]
async fn a_full_queue_says_so_by_frames_and_by_bytes() {
    let certificates = Certificates::new();
    let server = Side::server(&certificates, Options::default());
    let options = Options {
        queue_frames_max: 10,
        frame_bytes_max: 4096,
        queue_bytes_max: 8192,
        ..Options::default()
    };
    let client = Side::client(&certificates, options);
    let connection = client.connect(&server).await;
    // The writers run only when this test waits.
    for number in 0..10 {
        connection.try_send(Lane::Commit, frame(64, number)).unwrap();
    }
    assert_eq!(connection.try_send(Lane::Commit, frame(64, 10)), Err(SendError::Full));
    assert_eq!(connection.queued_bytes(Lane::Commit), 640, "a refused frame does not count");
    for number in 0..2 {
        connection.try_send(Lane::Pull, frame(4096, number)).unwrap();
    }
    assert_eq!(connection.try_send(Lane::Pull, frame(64, 2)), Err(SendError::Full));
    assert_eq!(connection.try_send(Lane::Control, frame(64, 2)), Ok(()), "lanes do not share");
}

#[tokio::test]
async fn an_owner_that_takes_nothing_stops_the_sender_and_nothing_is_lost() {
    const FRAME_BYTES: usize = 1 << 20;
    let certificates = Certificates::new();
    let tight = Options { inbound_bytes_max: 2 << 20, events_max: 4, ..Options::default() };
    let mut server = Side::server(&certificates, tight);
    let client = Side::client(&certificates, Options::default());
    let connection = client.connect(&server).await;
    server.opened().await;

    let mut sent = 0;
    let mut full_in_a_row = 0;
    while full_in_a_row < 50 {
        match connection.try_send(Lane::Pull, frame(FRAME_BYTES, sent)) {
            Ok(()) => (sent, full_in_a_row) = (sent + 1, 0),
            Err(SendError::Full) => {
                full_in_a_row += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err(other) => panic!("{other}"),
        }
    }
    // The queue's 64 MiB, a lane's window, the budget, and what is between them.
    assert!((64..128).contains(&sent), "{sent} MiB were taken");
    assert!(!connection.is_closed());
    let got = server.frames(Lane::Pull, sent as usize).await;
    assert!(got.iter().zip(0..).all(|(got, number)| *got == frame(FRAME_BYTES, number)));
}

#[tokio::test]
async fn draining_delivers_what_was_queued() {
    let certificates = Certificates::new();
    let mut server = Side::server(&certificates, Options::default());
    let mut client = Side::client(&certificates, Options::default());
    let connection = client.connect(&server).await;
    let at_server = server.opened().await;
    for number in 0..200 {
        connection.try_send(Lane::Commit, frame(100_000, number)).unwrap();
    }
    let draining = connection.clone();
    let drained =
        tokio::spawn(async move { draining.drain(CloseCode::SHUTDOWN, "bye", HANG).await });
    server.frames(Lane::Commit, 200).await;
    assert_eq!(drained.await.unwrap(), Drained::Whole);
    assert_eq!(connection.try_send(Lane::Commit, frame(64, 0)), Err(SendError::Closed));
    assert_eq!(client.closed(&connection).await, CloseReason::Local);
    assert_eq!(
        server.closed(&at_server).await,
        CloseReason::PeerClosed { code: CloseCode::SHUTDOWN, reason: "bye".to_owned() }
    );
}

#[tokio::test]
async fn closing_the_endpoint_closes_each_connection_once() {
    let certificates = Certificates::new();
    let mut server = Side::server(&certificates, Options::default());
    let mut client = Side::client(&certificates, Options::default());
    let mut open = Vec::new();
    for _ in 0..3 {
        client.connect(&server).await;
        open.push(server.opened().await.id());
    }
    server.endpoint.close(CloseCode::SHUTDOWN, "stop");
    server.endpoint.wait_idle(HANG).await;
    let mut closed = Vec::new();
    for _ in 0..3 {
        match server.next().await {
            Event::Closed { connection, reason: CloseReason::Local } => closed.push(connection),
            other => panic!("{other:?} instead of Closed"),
        }
        match client.next().await {
            Event::Closed { reason: CloseReason::PeerClosed { code, .. }, .. } => {
                assert_eq!(code, CloseCode::SHUTDOWN);
            }
            other => panic!("{other:?} instead of Closed"),
        }
    }
    closed.sort_unstable();
    assert_eq!(closed, open);
    assert!(server.events.try_recv().is_err());
    assert!(client.events.try_recv().is_err());
}

#[tokio::test]
async fn an_owner_that_goes_takes_its_endpoint_along() {
    let certificates = Certificates::new();
    let server = Side::server(&certificates, Options::default());
    let mut client = Side::client(&certificates, Options::default());
    let connection = client.connect(&server).await;
    drop(server.events);
    let reason = client.closed(&connection).await;
    assert!(matches!(reason, CloseReason::PeerClosed { .. }), "{reason:?}");
}

#[tokio::test]
async fn addresses_are_tried_in_turn() {
    let certificates = Certificates::new();
    let mut server = Side::server(&certificates, Options::default());
    let hasty = Options { attempt_deadline: Duration::from_millis(300), ..Options::default() };
    let mut client = Side::client(&certificates, hasty);
    // A socket that never answers.
    let deaf = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let deaf = deaf.local_addr().unwrap().to_string();

    client.endpoint.dial(7, vec![deaf.clone(), server.address()]);
    let Event::Dialed { token: 7, outcome: Ok(connection) } = client.next().await else {
        panic!("the second address answers");
    };
    server.opened().await.try_send(Lane::Control, frame(64, 1)).unwrap();
    client.frames(Lane::Control, 1).await;
    assert_eq!(connection.remote().port(), server.endpoint.local_addr().unwrap().port());

    client.endpoint.dial(8, vec![deaf]);
    let Event::Dialed { token: 8, outcome: Err(error) } = client.next().await else {
        panic!("nobody answers");
    };
    assert_eq!(
        error.attempts[0].1,
        ConnectFailure::Deadline(Duration::from_millis(300)),
        "{error}"
    );
}

#[tokio::test]
async fn connections_over_the_limit_are_refused_and_a_slot_comes_back() {
    let certificates = Certificates::new();
    let one = Options { connections_max: 1, ..Options::default() };
    let mut server = Side::server(&certificates, one.clone());
    let client = Side::client(&certificates, Options::default());
    let first = client.connect(&server).await;
    let at_server = server.opened().await;
    assert_eq!(client.failure(&server).await, ConnectFailure::Closed(CloseReason::Refused));
    first.close(CloseCode::REPLACED, "make room");
    server.closed(&at_server).await;
    client.connect(&server).await;

    let small_client = Side::client(&certificates, one);
    let other_server = Side::server(&certificates, Options::default());
    small_client.connect(&other_server).await;
    assert_eq!(small_client.failure(&other_server).await, ConnectFailure::TooMany(1));
}

#[test]
fn options_that_do_not_fit_together_are_named() {
    let broken = Options { queue_bytes_max: 1 << 20, ..Options::default() };
    assert!(broken.check().unwrap_err().contains("queue_bytes_max"));
    let broken = Options { keep_alive: Duration::from_secs(3), ..Options::default() };
    assert!(broken.check().unwrap_err().contains("keep_alive"));
    let broken = Options { protocols: vec![PROTOCOL_PROBE.to_owned()], ..Options::default() };
    assert!(broken.check().unwrap_err().contains("probe"));
    assert_eq!(Options::default().check(), Ok(()));
}

#[test]
fn lane_bytes_are_frozen() {
    assert_eq!(Lane::ALL.map(Lane::byte), [1, 2, 3]);
    for byte in 0..=u8::MAX {
        assert!(Lane::from_byte(byte).is_none_or(|lane| lane.byte() == byte));
    }
}
