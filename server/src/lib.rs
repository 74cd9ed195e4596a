//! The server around a node, and the command line around both.
//!
//! ```text
//! cli ----> serve: host::Host = node::Node + sockets + disk + register + clocks
//!     `---> every other verb: client::Client over QUIC, or the log directory offline (inspect)
//! ```
#![forbid(unsafe_code)]

pub mod cli;
pub mod definition;
pub mod host;
pub mod ingest;
pub mod register;
