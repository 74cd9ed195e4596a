//! The dependency directions, read from `cargo metadata`.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Every crate and what it may depend on within the workspace.
const ALLOWED: &[(&str, &[&str])] = &[
    ("common", &[]),
    ("sequencer", &["common"]),
    ("resolver", &["common"]),
    ("logserver", &["common"]),
    ("proxy", &["common"]),
    ("client", &["common"]),
    ("node", &["common", "sequencer", "resolver", "logserver", "proxy"]),
    ("sim", &["common", "node", "client", "sequencer", "logserver"]),
    // The resolver only for its benchmark.
    ("millrace", &["common", "node", "client", "sequencer", "logserver", "resolver"]),
];

/// What no machine crate may reach, at any depth, in the features that the simulator uses.
const BANNED_FOR_MACHINES: &[&str] = &["tokio", "quinn", "rustls", "rand"];

fn cargo(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO")).args(args).current_dir("..").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn edges() -> BTreeMap<String, BTreeSet<String>> {
    let metadata: Value =
        serde_json::from_str(&cargo(&["metadata", "--format-version", "1", "--no-deps"])).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let names: BTreeSet<&str> =
        packages.iter().map(|package| package["name"].as_str().unwrap()).collect();
    packages
        .iter()
        .map(|package| {
            let wanted = package["dependencies"].as_array().unwrap().iter();
            let inside = wanted
                .filter(|dependency| dependency["kind"].is_null())
                .map(|dependency| dependency["name"].as_str().unwrap())
                .filter(|name| names.contains(name));
            (package["name"].as_str().unwrap().to_owned(), inside.map(str::to_owned).collect())
        })
        .collect()
}

#[test]
fn roles_meet_only_in_common() {
    let edges = edges();
    for (name, allowed) in ALLOWED {
        let found = &edges[*name];
        let extra: Vec<&String> =
            found.iter().filter(|other| !allowed.contains(&other.as_str())).collect();
        assert!(extra.is_empty(), "{name} may not depend on {extra:?}");
    }
}

#[test]
fn machines_can_not_reach_a_clock_a_runtime_or_a_socket() {
    for name in ["common", "sequencer", "resolver", "proxy", "node", "sim"] {
        let tree = cargo(&["tree", "-p", name, "-e", "normal", "--prefix", "none", "--offline"]);
        let crates: BTreeSet<&str> =
            tree.lines().filter_map(|line| line.split(' ').next()).collect();
        let found: Vec<&&str> =
            BANNED_FOR_MACHINES.iter().filter(|banned| crates.contains(**banned)).collect();
        assert!(found.is_empty(), "{name} reaches {found:?}");
    }
}
