//! How quinn is set: the numbers come from measurements on loopback and from the limits of UDP.
//!
//! ```text
//!               loopback                       routed
//!  MTU          6500 from the start            1452, then discovery up to 1452
//!  first window 4 MiB                          quinn's
//!  GSO          10 packets per call            the same
//! ```

use core::time::Duration;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use quinn::congestion::CubicConfig;
use quinn::{
    AckFrequencyConfig, ConnectionId, ConnectionIdGenerator, EndpointConfig, IdleTimeout,
    MtuDiscoveryConfig, TransportConfig, VarInt,
};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use socket2::{Domain, Protocol, Socket, Type};

use super::{LANES, Options};

/// Quinn hands at most this many packets to the kernel in one call.
const SEGMENTS_PER_CALL: u32 = 10;
/// The most that one UDP call takes over IPv4.
const UDP_BYTES_MAX: u32 = 65_507;
/// Larger packets cost less each; see the assertion for the limit.
const LOOPBACK_MTU: u16 = 6500;
/// Over it the kernel refuses the call, quinn sees losses and falls back to the smallest MTU.
const _: () = assert!(LOOPBACK_MTU as u32 * SEGMENTS_PER_CALL <= UDP_BYTES_MAX);

/// An Ethernet packet less IPv6 and UDP headers.
const ROUTED_MTU: u16 = 1452;

const LOOPBACK_INITIAL_WINDOW_BYTES: u64 = 4 << 20;
/// A first window below the first packets stops the handshake for ever.
const _: () = assert!(LOOPBACK_INITIAL_WINDOW_BYTES >= 10 * LOOPBACK_MTU as u64);

/// Below it a burst drops packets in the kernel.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// What a peer may send on one lane before its reader has taken it.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// The same over all lanes of a connection.
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
/// Written and not yet acknowledged by the peer, over all lanes of a connection.
const SEND_WINDOW_BYTES: u64 = 32 << 20;
const _: () = assert!(CONNECTION_WINDOW_BYTES >= STREAM_WINDOW_BYTES);

/// Eight bytes never meet twice by chance.
const CONNECTION_ID_BYTES: usize = 8;

/// Packets that one acknowledgement covers: halves the packets that only acknowledge.
const ACK_PACKETS: u32 = 10;

/// The first guess of the round trip: three of it are waited before a lost first packet is sent
/// again.
const INITIAL_RTT: Duration = Duration::from_millis(100);

/// With a secret that outlives the process, reset tokens are the same in each of its lives: who goes on with
/// a connection to a server that was killed and started again is told at once that it is gone
/// ([`PeerGone`](super::CloseReason::PeerGone)), and does not wait for [`Options::idle`].
pub(super) fn endpoint_config(secret: Option<&[u8]>) -> EndpointConfig {
    let mut config = EndpointConfig::default();
    if let Some(secret) = secret {
        let secret = hmac::Key::new(hmac::HMAC_SHA256, secret);
        let derived = hmac::sign(&secret, b"millrace: reset tokens");
        config.reset_key(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, derived.as_ref())));
        config.cid_generator(|| Box::new(AnyLifesIds));
    }
    config.max_udp_payload_size(LOOPBACK_MTU).expect("6500 lies between QUIC's 1200 and 65527");
    config
}

/// Random connection ids. Each one is valid: an earlier life of the server may have given it out.
struct AnyLifesIds;

impl ConnectionIdGenerator for AnyLifesIds {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut id = [0; CONNECTION_ID_BYTES];
        SystemRandom::new().fill(&mut id).expect("the system has randomness");
        ConnectionId::new(&id)
    }

    fn cid_len(&self) -> usize {
        CONNECTION_ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

/// The transport for a peer at this address.
pub(super) fn is_loopback(peer: SocketAddr) -> bool {
    // A dual-stack socket shows an IPv4 peer as a mapped IPv6 address.
    peer.ip().to_canonical().is_loopback()
}

pub(super) fn transport(options: &Options, loopback: bool) -> Arc<TransportConfig> {
    let mtu = if loopback { LOOPBACK_MTU } else { ROUTED_MTU };
    // Discovery also brings the MTU back after a run of losses has lowered it.
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(mtu);
    let mut acks = AckFrequencyConfig::default();
    acks.ack_eliciting_threshold(VarInt::from_u32(ACK_PACKETS));
    let mut congestion = CubicConfig::default();
    if loopback {
        congestion.initial_window(LOOPBACK_INITIAL_WINDOW_BYTES);
    }
    let idle = IdleTimeout::try_from(options.idle).unwrap_or(IdleTimeout::from(VarInt::MAX));

    let mut config = TransportConfig::default();
    config
        .initial_mtu(mtu)
        .mtu_discovery_config(Some(discovery))
        .congestion_controller_factory(Arc::new(congestion))
        .ack_frequency_config(Some(acks))
        .initial_rtt(INITIAL_RTT)
        .keep_alive_interval(Some(options.keep_alive))
        .max_idle_timeout(Some(idle))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES))
        .receive_window(VarInt::from_u32(CONNECTION_WINDOW_BYTES))
        .send_window(SEND_WINDOW_BYTES)
        .max_concurrent_bidi_streams(VarInt::from_u32(LANES as u32))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None);
    Arc::new(config)
}

/// A bound UDP socket with room for bursts. The kernel silently gives less than asked where its
/// own limit is lower.
pub(super) fn socket(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
    socket.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}
