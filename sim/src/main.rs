//! `sim`: run seeds, replay one, list marks.
#![expect(
    clippy::disallowed_types,
    reason = "the command around the simulator: threads, the clock and exit codes"
)]
#![forbid(unsafe_code)]

mod command;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    command::Command::parse().carry_out()
}
