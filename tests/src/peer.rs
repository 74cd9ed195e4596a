//! A connection that says what it likes: QUIC and the lanes as they should be, any bytes on them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::message::Hello;
use common::quic::{Lane, PROTOCOLS};
use common::wire::{self, Envelope, PROTOCOL, PROTOCOL_MIN};
use common::{Endpoint, Epoch, Incarnation, Message, NodeId, Role};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Connection, ConnectionError, RecvStream, SendStream};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{RootCertStore, crypto::ring};
use tokio::time::timeout;

use crate::{HANG, Node};

/// A peer of a node.
#[derive(Debug)]
pub struct Peer {
    me: common::Peer,
    _endpoint: quinn::Endpoint,
    connection: Connection,
    lanes: Vec<(Lane, SendStream, RecvStream)>,
}

impl Peer {
    /// Connects and opens all lanes. Nothing is said yet.
    ///
    /// # Panics
    /// When the node does not take the connection.
    pub async fn connect(node: &Node, id: u64) -> Self {
        Self::connect_to(node.address(), &node.directory().join("tls/ca.pem"), id).await
    }

    /// Connects to whoever is at an address and has a certificate of this CA.
    ///
    /// # Panics
    /// When it does not take the connection.
    pub async fn connect_to(address: &str, ca: &Path, id: u64) -> Self {
        let mut endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        endpoint.set_default_client_config(client_config(ca));
        let address = address.parse().unwrap();
        let connection = endpoint.connect(address, "localhost").unwrap().await.unwrap();
        let mut lanes = Vec::new();
        for lane in Lane::ALL {
            let (mut send, receive) = connection.open_bi().await.unwrap();
            send.write_all(&[lane.byte()]).await.unwrap();
            lanes.push((lane, send, receive));
        }
        for (lane, _, receive) in &mut lanes {
            let mut echo = [0];
            receive.read_exact(&mut echo).await.unwrap();
            assert_eq!(echo[0], lane.byte());
        }
        let me = common::Peer { node: NodeId(id), incarnation: Incarnation(1) };
        Self { me, _endpoint: endpoint, connection, lanes }
    }

    /// Connects and says hello as a client.
    ///
    /// # Panics
    /// When the node does not say hello too.
    pub async fn greeted(node: &Node, id: u64) -> Self {
        let mut peer = Self::connect(node, id).await;
        peer.send(Lane::Control, peer.hello()).await;
        let answer = peer.receive(Lane::Control).await;
        assert!(matches!(answer, Message::Hello(_)), "{answer:?}");
        peer
    }

    /// A client's hello.
    #[must_use]
    pub const fn hello(&self) -> Hello {
        Hello { peer: self.me, protocol_min: PROTOCOL_MIN, protocol_max: PROTOCOL, is_client: true }
    }

    /// A message to a role of the node, as a client would send it.
    #[must_use]
    pub fn envelope(&self, to: Role, message: impl Into<Message>) -> Envelope {
        let nobody = common::Peer { node: NodeId::ZERO, incarnation: Incarnation::ZERO };
        let (from, to): (Endpoint, _) = (self.me.endpoint(Role::Client), nobody.endpoint(to));
        Envelope { from, to, epoch: Epoch::ZERO, message: message.into() }
    }

    /// Sends a message to the node itself.
    ///
    /// # Panics
    /// When the connection is closed.
    pub async fn send(&mut self, lane: Lane, message: impl Into<Message>) {
        let frame = wire::encode(&self.envelope(Role::Node, message)).to_bytes();
        self.write(lane, &frame).await;
    }

    /// Sends bytes as they are.
    ///
    /// # Panics
    /// When the connection is closed.
    pub async fn write(&mut self, lane: Lane, bytes: &[u8]) {
        let (_, send, _) = self.lanes.iter_mut().find(|(other, ..)| *other == lane).unwrap();
        send.write_all(bytes).await.unwrap();
    }

    /// Ends the sending half of a lane.
    ///
    /// # Panics
    /// When it has ended before.
    pub fn finish(&mut self, lane: Lane) {
        let (_, send, _) = self.lanes.iter_mut().find(|(other, ..)| *other == lane).unwrap();
        send.finish().unwrap();
    }

    /// The next message of a lane.
    ///
    /// # Panics
    /// When there comes none.
    pub async fn receive(&mut self, lane: Lane) -> Message {
        let node = self.me.node;
        let (_, _, receive) = self.lanes.iter_mut().find(|(other, ..)| *other == lane).unwrap();
        let read = async {
            let mut frame = vec![0; 4];
            receive.read_exact(&mut frame).await.unwrap();
            let length = u32::from_le_bytes(frame[..4].try_into().unwrap());
            frame.resize(length as usize, 0);
            receive.read_exact(&mut frame[4..]).await.unwrap();
            frame
        };
        let frame = timeout(HANG, read).await.expect("a message comes");
        let nobody = common::Peer { node: NodeId::ZERO, incarnation: Incarnation::ZERO };
        wire::decode(&frame.into(), nobody, node).unwrap().message
    }

    /// Waits until the node closes the connection: its code and its reason.
    ///
    /// # Panics
    /// When it ends in another way.
    pub async fn closed(&self) -> (u64, String) {
        match timeout(HANG, self.connection.closed()).await.expect("the connection is closed") {
            ConnectionError::ApplicationClosed(close) => {
                let reason = String::from_utf8_lossy(&close.reason).into_owned();
                (close.error_code.into_inner(), reason)
            }
            other => panic!("{other}"),
        }
    }

    /// Whether the connection is still there.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.connection.close_reason().is_none()
    }
}

fn client_config(ca: &Path) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).unwrap()).unwrap();
    let mut tls = rustls::ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = PROTOCOLS.iter().map(|name| name.as_bytes().to_vec()).collect();
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let mut transport = quinn::TransportConfig::default();
    transport.keep_alive_interval(Some(Duration::from_millis(250)));
    config.transport_config(Arc::new(transport));
    config
}
