//! To be built.
#![forbid(unsafe_code)]
