//! The resolver: decides which transactions of a batch conflict with what was written since they read.
#![forbid(unsafe_code)]

pub mod conflict;
pub mod role;
pub mod settle;
pub mod workload;
