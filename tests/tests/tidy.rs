//! House rules that no linter knows.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::path::{Path, PathBuf};
use std::{env, fs};

const LINE_COLUMNS_MAX: usize = 110;
const FILE_LINES_MAX: usize = 800;

fn sources() -> Vec<PathBuf> {
    fn walk(directory: &Path, out: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    walk(&path, out);
                }
            } else if name.ends_with(".rs") {
                out.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned();
    let mut out = Vec::new();
    walk(&root, &mut out);
    assert!(out.len() > 50, "the tree was found");
    out
}

fn check(rule: impl Fn(&Path, &str) -> Vec<String>) {
    let found: Vec<String> = sources()
        .iter()
        .flat_map(|path| {
            let text = fs::read_to_string(path).unwrap();
            let found = rule(path, &text);
            found.into_iter().map(|what| format!("{}: {what}", path.display()))
        })
        .collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn every_file_says_what_it_is_for() {
    check(|_, text| match text.trim_start().starts_with("//!") {
        true => vec![],
        false => vec!["no module header".to_owned()],
    });
}

#[test]
fn files_and_lines_stay_readable() {
    check(|_, text| {
        // A row of a table can't be broken.
        let is_row = |line: &str| line.trim_start_matches(['/', '!', ' ']).starts_with('|');
        let is_long = |line: &str| line.chars().count() > LINE_COLUMNS_MAX && !is_row(line);
        let long = text.lines().enumerate().filter(|(_, line)| is_long(line));
        let mut found: Vec<String> = long
            .map(|(n, _)| format!("line {} has over {LINE_COLUMNS_MAX} columns", n + 1))
            .collect();
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            found.push(format!("{lines} lines"));
        }
        found
    });
}

#[test]
fn unsafe_lives_in_the_log_servers_driver_alone() {
    let keyword = ["un", "safe "].concat();
    check(|path, text| {
        let path = path.to_string_lossy();
        if path.contains("logserver/src/driver/") {
            return vec![];
        }
        let lines = text.lines().enumerate();
        lines
            .filter(|(_, line)| !line.trim_start().starts_with("//") && line.contains(&keyword))
            .map(|(n, _)| format!("line {}", n + 1))
            .collect()
    });
}

#[test]
fn no_marker_of_unfinished_work_is_left() {
    let markers = [["TO", "DO"].concat(), ["FIX", "ME"].concat(), ["XX", "X"].concat()];
    check(|_, text| {
        let lines = text.lines().enumerate();
        lines
            .filter(|(_, line)| markers.iter().any(|marker| line.contains(marker)))
            .map(|(n, line)| format!("line {}: {line}", n + 1))
            .collect()
    });
}
