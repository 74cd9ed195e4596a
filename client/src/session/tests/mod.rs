//! The session against a fake cluster: scripted cases, then seeds of everything at once.

mod fake;
mod random;
mod scripted;
