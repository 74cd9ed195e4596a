//! One UDP socket: accepts, dials, and owns the limits that its connections share.
//!
//! ```text
//!  dialing side                                         accepting side
//!  TLS 1.3 + ALPN  <----------------------------------> a slot of connections_max, or Refused
//!  ALPN is the probe: wait for the close  <------------ close(PROTOCOL_MISMATCH, "what we speak")
//!  open lanes, a byte each  --------------------------> take each lane once
//!  all echoes are there: connected  <------------------ echo the bytes, report Opened
//! ```
//!
//! A client's certificate is checked after the client's own handshake has ended: the echo is what
//! proves to it that the server took the connection.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::io;
use std::sync::Arc;

use quinn::crypto::rustls::HandshakeData;
use quinn::{ClientConfig, Endpoint, Incoming, RecvStream, ServerConfig, TokioRuntime, VarInt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;

use super::close::{CloseCode, CloseReason};
use super::connection::{Connection, Streams, Unstarted};
use super::tls::{self, ClientTls, ServerTls, TlsError};
use super::{ConnectionId, Event, LANES, Lane, Options, PROTOCOL_PROBE, tuning};

/// Addresses of one name that are tried.
const ADDRESSES_PER_NAME_MAX: usize = 8;

/// A UDP socket with its connections. Cheap to clone. It lives until [`close`](Self::close) or
/// until the receiver of its events is dropped.
#[derive(Clone)]
pub struct QuicEndpoint {
    quinn: Endpoint,
    dialing: Option<Arc<Dialing>>,
    context: Arc<Context>,
}

/// What all connections of an endpoint share.
pub(super) struct Context {
    pub(super) options: Options,
    pub(super) events: mpsc::Sender<Event>,
    /// Bytes that received frames may take until their owner has them.
    pub(super) inbound_budget: Arc<Semaphore>,
    slots: Arc<Semaphore>,
    next_id: AtomicU64,
}

struct Dialing {
    loopback: ClientConfig,
    routed: ClientConfig,
    server_name: Option<String>,
}

struct Accepting {
    loopback: Arc<ServerConfig>,
    routed: Arc<ServerConfig>,
    /// The private key: it outlives the process and nobody else has it.
    secret: Vec<u8>,
}

/// Why an endpoint can't start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The options do not fit together.
    #[error("transport options: {0}")]
    Options(String),
    /// A certificate is of no use.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The socket can't be bound.
    #[error("UDP socket at {address}: {source}")]
    Socket {
        /// The address asked for.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
}

/// No address answered as it should.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectError {
    /// What happened at each address, in the order of trying.
    pub attempts: Vec<(String, ConnectFailure)>,
}

/// Why one attempt failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConnectFailure {
    /// The name has no address.
    #[error("name: {0}")]
    Name(String),
    /// No connection with open lanes within the time.
    #[error("no answer within {0:?}")]
    Deadline(Duration),
    /// The connection ended before its lanes were open.
    #[error(transparent)]
    Closed(CloseReason),
    /// This endpoint has `connections_max` connections.
    #[error("this side has {0} connections already, its limit")]
    TooMany(usize),
    /// This endpoint is closed, or it was bound without `ClientTls`, or the server name is no name.
    #[error("can't dial: {0}")]
    Local(String),
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no connection")?;
        if self.attempts.is_empty() {
            return f.write_str(": no address given");
        }
        for (index, (address, failure)) in self.attempts.iter().enumerate() {
            write!(f, "{} {address}: {failure}", if index == 0 { ":" } else { ";" })?;
        }
        Ok(())
    }
}

impl core::error::Error for ConnectError {}

impl QuicEndpoint {
    /// Binds a server's socket (port 0: the system picks one) and accepts from now on. With
    /// `dialing` it dials other servers from the same socket. Needs a running tokio runtime.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn server(
        address: SocketAddr,
        accepting: &ServerTls,
        dialing: Option<&ClientTls>,
        options: Options,
    ) -> Result<(Self, mpsc::Receiver<Event>), BindError> {
        options.check().map_err(BindError::Options)?;
        let accepting = Accepting::new(accepting, &options)?;
        let dialing = dialing.map(|tls| Dialing::new(tls, &options)).transpose()?;
        let (endpoint, events) = Self::bind(address, Some(&accepting), dialing, options)?;
        tokio::spawn(accept(endpoint.quinn.clone(), accepting, Arc::clone(&endpoint.context)));
        Ok((endpoint, events))
    }

    /// Binds a client's socket: it only dials. Needs a running tokio runtime.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn client(
        dialing: &ClientTls,
        options: Options,
    ) -> Result<(Self, mpsc::Receiver<Event>), BindError> {
        options.check().map_err(BindError::Options)?;
        let dialing = || Dialing::new(dialing, &options).map(Some);
        let both_families = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
        match Self::bind(both_families, None, dialing()?, options.clone()) {
            // A host without IPv6.
            Err(BindError::Socket { .. }) => {
                let only_v4 = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
                Self::bind(only_v4, None, dialing()?, options.clone())
            }
            other => other,
        }
    }

    fn bind(
        address: SocketAddr,
        accepting: Option<&Accepting>,
        dialing: Option<Dialing>,
        options: Options,
    ) -> Result<(Self, mpsc::Receiver<Event>), BindError> {
        let at_address = |source| BindError::Socket { address, source };
        let quinn = Endpoint::new(
            tuning::endpoint_config(accepting.map(|accepting| &accepting.secret[..])),
            accepting.map(|accepting| ServerConfig::clone(&accepting.routed)),
            tuning::socket(address).map_err(at_address)?,
            Arc::new(TokioRuntime),
        )
        .map_err(at_address)?;
        let (sender, events) = mpsc::channel(options.events_max);
        let context = Context {
            events: sender,
            inbound_budget: Arc::new(Semaphore::new(options.inbound_bytes_max)),
            slots: Arc::new(Semaphore::new(options.connections_max)),
            next_id: AtomicU64::new(1),
            options,
        };
        let context = Arc::new(context);
        // Who drops the receiver wants no more of this endpoint.
        let (endpoint, owner) = (quinn.clone(), context.events.clone());
        tokio::spawn(async move {
            owner.closed().await;
            endpoint.close(VarInt::from(CloseCode::SHUTDOWN), b"the endpoint's owner is gone");
        });
        Ok((Self { quinn, dialing: dialing.map(Arc::new), context }, events))
    }

    /// The bound address, with the port that the system picked.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.quinn.local_addr()
    }

    /// Tries the addresses (`host:port`) in turn, each with a deadline of its own, until one opens
    /// all lanes. Frames may reach the events before this returns: use [`dial`](Self::dial) where
    /// that matters.
    ///
    /// # Errors
    /// What happened at each address.
    pub async fn connect(&self, addresses: &[String]) -> Result<Connection, ConnectError> {
        let unstarted = self.establish(addresses, None).await?;
        let connection = unstarted.connection();
        unstarted.start(&self.context);
        Ok(connection)
    }

    /// Like [`connect`](Self::connect), on its own; the end comes as [`Event::Dialed`], before any
    /// frame of the connection.
    pub fn dial(&self, token: u64, addresses: Vec<String>) {
        self.dial_as(token, addresses, None);
    }

    /// Like [`dial`](Self::dial); the peer's certificate must have this name.
    pub fn dial_as(&self, token: u64, addresses: Vec<String>, server_name: Option<String>) {
        let endpoint = self.clone();
        tokio::spawn(async move {
            let established = endpoint.establish(&addresses, server_name.as_deref()).await;
            let outcome = established.as_ref().map(Unstarted::connection).map_err(Clone::clone);
            let told = endpoint.context.events.send(Event::Dialed { token, outcome }).await;
            if let (Ok(()), Ok(unstarted)) = (told, established) {
                unstarted.start(&endpoint.context);
            }
        });
    }

    /// Closes every connection with this code and reason, and takes and makes no more.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.quinn.close(VarInt::from(code), reason.as_bytes());
    }

    /// Waits until every peer has been told, or the deadline. Call it after `close` and before the
    /// runtime ends.
    pub async fn wait_idle(&self, deadline: Duration) {
        // Whoever was not told in time finds out by silence.
        let _ = timeout(deadline, self.quinn.wait_idle()).await;
    }

    async fn establish(
        &self,
        addresses: &[String],
        server_name: Option<&str>,
    ) -> Result<Unstarted, ConnectError> {
        let mut attempts = Vec::new();
        for address in addresses {
            let resolved = match resolve(address, self.context.options.attempt_deadline).await {
                Ok(resolved) => resolved,
                Err(failure) => {
                    attempts.push((address.clone(), failure));
                    continue;
                }
            };
            for remote in resolved {
                match self.attempt(remote, address, server_name).await {
                    Ok(unstarted) => return Ok(unstarted),
                    Err(failure) => attempts.push((describe(address, remote), failure)),
                }
            }
        }
        Err(ConnectError { attempts })
    }

    async fn attempt(
        &self,
        remote: SocketAddr,
        name: &str,
        server_name: Option<&str>,
    ) -> Result<Unstarted, ConnectFailure> {
        let context = &*self.context;
        let Some(dialing) = &self.dialing else {
            return Err(ConnectFailure::Local("the endpoint was bound without a CA".to_owned()));
        };
        let Some(slot) = context.slot() else {
            return Err(ConnectFailure::TooMany(context.options.connections_max));
        };
        let config =
            if tuning::is_loopback(remote) { &dialing.loopback } else { &dialing.routed }.clone();
        let server_name = server_name.or(dialing.server_name.as_deref());
        let server_name = server_name.unwrap_or_else(|| host(name));
        let connecting = self
            .quinn
            .connect_with(config, remote, server_name)
            .map_err(|error| ConnectFailure::Local(error.to_string()))?;
        let opening = async {
            let quinn = connecting.await.map_err(|error| context.reason(&error))?;
            if spoken(&quinn) == PROTOCOL_PROBE.as_bytes() {
                return Err(context.reason(&quinn.closed().await));
            }
            match open_lanes(&quinn).await {
                Ok(streams) => Ok((quinn, streams)),
                Err(what) => Err(fail(&quinn, context, what)),
            }
        };
        match timeout(context.options.attempt_deadline, opening).await {
            Ok(Ok((quinn, streams))) => Ok(Unstarted::new(context, quinn, streams, slot)),
            Ok(Err(reason)) => Err(ConnectFailure::Closed(reason)),
            Err(_) => Err(ConnectFailure::Deadline(context.options.attempt_deadline)),
        }
    }
}

impl Context {
    pub(super) fn next_id(&self) -> ConnectionId {
        ConnectionId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn reason(&self, error: &quinn::ConnectionError) -> CloseReason {
        CloseReason::from_quinn(error, &self.options.protocols)
    }

    fn slot(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.slots).try_acquire_owned().ok()
    }
}

impl Dialing {
    fn new(tls: &ClientTls, options: &Options) -> Result<Self, TlsError> {
        let crypto = Arc::new(tls::client_config(tls, &options.protocols)?);
        let config = |loopback| {
            let mut config = ClientConfig::new(Arc::clone(&crypto) as _);
            config.transport_config(tuning::transport(options, loopback));
            config
        };
        let server_name = tls.server_name.clone();
        Ok(Self { loopback: config(true), routed: config(false), server_name })
    }
}

impl Accepting {
    fn new(tls: &ServerTls, options: &Options) -> Result<Self, TlsError> {
        let crypto = Arc::new(tls::server_config(tls, &options.protocols)?);
        let config = |loopback| {
            let mut config = ServerConfig::with_crypto(Arc::clone(&crypto) as _);
            config.transport_config(tuning::transport(options, loopback));
            config.max_incoming(options.connections_max);
            Arc::new(config)
        };
        let secret = tls::key(&tls.identity.key)?.secret_der().to_vec();
        Ok(Self { loopback: config(true), routed: config(false), secret })
    }
}

/// Takes connections until the endpoint is closed.
async fn accept(quinn: Endpoint, accepting: Accepting, context: Arc<Context>) {
    while let Some(incoming) = quinn.accept().await {
        let Some(slot) = context.slot() else {
            incoming.refuse();
            continue;
        };
        let loopback = tuning::is_loopback(incoming.remote_address());
        let config = if loopback { &accepting.loopback } else { &accepting.routed };
        tokio::spawn(welcome(incoming, Arc::clone(config), Arc::clone(&context), slot));
    }
}

/// Opens one connection of a peer, or reports why not.
async fn welcome(
    incoming: Incoming,
    config: Arc<ServerConfig>,
    context: Arc<Context>,
    slot: OwnedSemaphorePermit,
) {
    let remote = incoming.remote_address();
    let deadline = context.options.attempt_deadline;
    let opening = async {
        let connecting = incoming.accept_with(config).map_err(|error| context.reason(&error))?;
        let Ok(shaken) = timeout(deadline, connecting).await else {
            return Err(CloseReason::protocol("the handshake did not end in time"));
        };
        let quinn = shaken.map_err(|error| context.reason(&error))?;
        if spoken(&quinn) == PROTOCOL_PROBE.as_bytes() {
            let ours = context.options.protocols.join(",");
            quinn.close(VarInt::from(CloseCode::PROTOCOL_MISMATCH), ours.as_bytes());
            let theirs = "another version".to_owned();
            return Err(CloseReason::ProtocolMismatch { ours, theirs });
        }
        match timeout(deadline, accept_lanes(&quinn)).await {
            Ok(Ok(streams)) => Ok((quinn, streams)),
            Ok(Err(what)) => Err(fail(&quinn, &context, what)),
            Err(_) => Err(fail(&quinn, &context, "the lanes did not open in time".to_owned())),
        }
    };
    match opening.await {
        Ok((quinn, streams)) => {
            let unstarted = Unstarted::new(&context, quinn, streams, slot);
            let opened = Event::Opened(unstarted.connection());
            if context.events.send(opened).await.is_ok() {
                unstarted.start(&context);
            }
        }
        Err(reason) => {
            // The owner is gone when this fails.
            let _ = context.events.send(Event::Refused { remote, reason }).await;
            // Only now: an owner that takes no events must not gather failed peers without bound.
            drop(slot);
        }
    }
}

/// The negotiated protocol.
fn spoken(quinn: &quinn::Connection) -> Vec<u8> {
    let data = quinn.handshake_data().and_then(|data| data.downcast::<HandshakeData>().ok());
    data.and_then(|data| data.protocol).expect("TLS for QUIC ends only with a protocol agreed")
}

/// Closes for what the peer did wrong, unless the connection has ended by itself.
fn fail(quinn: &quinn::Connection, context: &Context, what: String) -> CloseReason {
    if let Some(error) = quinn.close_reason() {
        return context.reason(&error);
    }
    quinn.close(VarInt::from(CloseCode::PROTOCOL), what.as_bytes());
    CloseReason::Protocol(what)
}

/// The dialing side: all lanes at once, then all echoes.
async fn open_lanes(quinn: &quinn::Connection) -> Result<Streams, String> {
    let mut streams = Vec::with_capacity(LANES);
    for lane in Lane::ALL {
        let (mut send, receive) = quinn.open_bi().await.map_err(|error| error.to_string())?;
        announce(lane, &mut send).await?;
        streams.push((lane, send, receive));
    }
    for (lane, _, receive) in &mut streams {
        let echo = first_byte(receive).await?;
        if echo != lane.byte() {
            return Err(format!("lane {lane:?} was answered by the byte {echo}"));
        }
    }
    Ok(all_lanes(streams))
}

/// The accepting side: each lane once, in any order.
async fn accept_lanes(quinn: &quinn::Connection) -> Result<Streams, String> {
    let mut streams: Vec<(Lane, quinn::SendStream, RecvStream)> = Vec::with_capacity(LANES);
    while streams.len() < LANES {
        let (send, mut receive) = quinn.accept_bi().await.map_err(|error| error.to_string())?;
        let byte = first_byte(&mut receive).await?;
        let lane = Lane::from_byte(byte).ok_or_else(|| format!("no lane has the byte {byte}"))?;
        if streams.iter().any(|(taken, ..)| *taken == lane) {
            return Err(format!("lane {lane:?} was opened twice"));
        }
        streams.push((lane, send, receive));
    }
    for (lane, send, _) in &mut streams {
        announce(*lane, send).await?;
    }
    streams.sort_by_key(|(lane, ..)| *lane);
    Ok(all_lanes(streams))
}

async fn announce(lane: Lane, send: &mut quinn::SendStream) -> Result<(), String> {
    send.set_priority(lane.priority()).map_err(|error| error.to_string())?;
    send.write_all(&[lane.byte()]).await.map_err(|error| error.to_string())
}

async fn first_byte(receive: &mut RecvStream) -> Result<u8, String> {
    let mut byte = [0];
    receive.read_exact(&mut byte).await.map_err(|error| error.to_string())?;
    Ok(byte[0])
}

fn all_lanes(streams: Vec<(Lane, quinn::SendStream, RecvStream)>) -> Streams {
    let count = streams.len();
    let Ok(streams) = Streams::try_from(streams) else {
        panic!("{count} streams for {LANES} lanes");
    };
    streams
}

async fn resolve(address: &str, deadline: Duration) -> Result<Vec<SocketAddr>, ConnectFailure> {
    if let Ok(literal) = address.parse() {
        return Ok(vec![literal]);
    }
    match timeout(deadline, tokio::net::lookup_host(address)).await {
        Ok(Ok(found)) => {
            let found: Vec<_> = found.take(ADDRESSES_PER_NAME_MAX).collect();
            if found.is_empty() {
                return Err(ConnectFailure::Name("it has no address".to_owned()));
            }
            Ok(found)
        }
        Ok(Err(error)) => Err(ConnectFailure::Name(error.to_string())),
        Err(_) => Err(ConnectFailure::Deadline(deadline)),
    }
}

/// The host of `host:port`, without the brackets of an IPv6 address.
#[must_use]
pub fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn describe(address: &str, remote: SocketAddr) -> String {
    let remote = remote.to_string();
    if remote == address { remote } else { format!("{address} ({remote})") }
}

#[cfg(test)]
mod tests {
    use super::host;

    #[test]
    fn the_host_of_an_address() {
        assert_eq!(host("db-1.example:7400"), "db-1.example");
        assert_eq!(host("10.0.0.1:7400"), "10.0.0.1");
        assert_eq!(host("[::1]:7400"), "::1");
        assert_eq!(host("bare"), "bare");
    }
}
