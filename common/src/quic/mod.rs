//! QUIC: the transport between processes.
