//! The sequencer's folder: who hands out versions, and who leads.
//!
//! ```text
//!                 versions::Sequencer                      leader::Leader
//! proxies --VersionRequest--> (previous, version)   register, log servers, nodes --> epochs
//! ```
//!
//! Two machines, since they live differently: the sequencer of an epoch is recruited by the leader like every
//! other role and ends with its epoch; the leader outlives epochs and makes them.
#![forbid(unsafe_code)]

pub mod leader;
pub mod versions;
