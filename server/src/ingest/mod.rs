//! Ingesting.
pub mod wal2json;
