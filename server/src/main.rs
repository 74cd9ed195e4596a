//! `millrace`: the command line.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    millrace::cli::run()
}
