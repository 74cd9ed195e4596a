//! Registers: where the cluster's one small value lives.

mod file;

pub use file::{FileRegister, RegisterError};
