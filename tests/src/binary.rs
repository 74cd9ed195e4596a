//! Where the binary under test is: built once by the cargo that runs the tests.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

/// Names a binary that is built already, to test that one.
const BINARY_VARIABLE: &str = "MILLRACE_BINARY";

/// The `millrace` binary.
///
/// # Panics
/// When it can't be built.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| env::var_os(BINARY_VARIABLE).map_or_else(build, PathBuf::from))
}

fn build() -> PathBuf {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "-p", "millrace", "--bin", "millrace"]);
    if cfg!(feature = "etcd") {
        build.args(["--features", "etcd"]);
    }
    build.arg("--message-format=json-render-diagnostics");
    // What the outer cargo says about this crate: build scripts that watch it would run anew, and everything
    // above them would be built twice.
    let of_this_crate =
        |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in env::vars().filter(|(name, _)| of_this_crate(name)) {
        build.env_remove(name);
    }
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    let output = build
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "the binary was not built: {}", output.status);
    let messages = String::from_utf8(output.stdout).unwrap();
    let executable = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == "millrace")
        .find_map(|message| Some(PathBuf::from(message["executable"].as_str()?)));
    executable.expect("cargo names the binary that it has built")
}
