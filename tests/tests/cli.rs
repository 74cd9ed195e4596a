//! The command line: help, forms of output, exit codes, and who gets what on which stream.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;
use tests::{Ended, Node, SMALL_FILES, binary, millrace, millrace_with_stdin};

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/tpcb-1000.jsonl.zst");

struct Stage {
    node: Node,
    _directory: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let node = Node::start(&directory.path().join("node"), SMALL_FILES);
        Self { node, _directory: directory }
    }

    /// A transaction script's end.
    fn txn(&self, script: &str) -> Ended {
        let directory = self.node.directory().to_str().unwrap();
        millrace_with_stdin(&["txn", "-o", "json", "--dir", directory], script)
    }
}

/// The verbs that a help text lists.
fn verbs(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let words = list.take_while(|line| !line.is_empty()).filter_map(|line| {
        let word = line.strip_prefix("  ")?.split(' ').next()?;
        (!word.is_empty() && word != "help").then(|| word.to_owned())
    });
    words.collect()
}

#[test]
fn every_verb_has_help_with_an_example() {
    let mut paths: Vec<Vec<String>> = vec![vec![]];
    let mut seen = 0;
    while let Some(path) = paths.pop() {
        let mut args = path.clone();
        args.push("--help".to_owned());
        let help = millrace(&args).with_code(0);
        assert_eq!(help.stderr, "", "{path:?}");
        assert!(help.stdout.contains("Example"), "{path:?} has no example:\n{}", help.stdout);
        seen += 1;
        paths.extend(verbs(&help.stdout).into_iter().map(|verb| [&path[..], &[verb]].concat()));
    }
    assert!(seen >= 20, "{seen} verbs were found");
}

#[test]
fn results_are_json_on_stdout_and_nothing_else_is() {
    let Stage { node, _directory } = Stage::new();
    let said = |args: &[&str]| {
        let ended = node.cli(args);
        assert_eq!(ended.stderr, "", "{args:?}");
        ended.json()
    };
    let created = &said(&["stream", "create", "orders"])[0];
    assert_eq!(created["name"], "orders");
    let appended = said(&["append", "orders", "one", "two", "--key", "k"]);
    assert_eq!(appended.len(), 2);
    assert_eq!((&appended[0]["offset"], &appended[1]["offset"]), (&0.into(), &1.into()));
    assert_eq!(appended[0]["stream"], created["stream"]);
    let pulled = said(&["pull", "orders", "--marks"]);
    let records: Vec<&Value> = pulled.iter().filter(|line| line["op"].is_string()).collect();
    assert_eq!(records.len(), 2);
    for (record, commit) in records.iter().zip(&appended) {
        assert_eq!((&record["op"], &record["key"]), (&"put".into(), &"k".into()));
        for field in ["version", "index", "offset"] {
            assert_eq!(record[field], commit[field], "{field}");
        }
    }
    assert!(pulled.last().unwrap()["through"].as_u64() >= appended[1]["version"].as_u64());
    let version = appended[0]["version"].to_string();
    assert_eq!(said(&["pull", "orders", "--from", &version])[0]["value"], "two");
    assert_eq!(said(&["pull", "orders", "--limit", "1"]).len(), 1);
    assert_eq!(said(&["stream", "list"])[..], *std::slice::from_ref(created));
    assert_eq!(said(&["stream", "describe", "orders"])[0]["next_offset"], 2);
    assert_eq!(said(&["status"])[0]["serving"], true);
    let trimmed = &said(&["stream", "trim", "orders", "--through", &version])[0];
    assert_eq!(trimmed["first_offset"], 1);

    let ingested = &said(&["ingest", "wal2json", SAMPLE, "--source", "shop"])[0];
    assert_eq!((&ingested["committed"], &ingested["resumed_at"]), (&1000.into(), &0.into()));
    let again = &said(&["ingest", "wal2json", SAMPLE, "--source", "shop"])[0];
    assert_eq!((&again["committed"], &again["resumed_at"]), (&0.into(), &ingested["position"]));
    check_knobs();
    check_benches(&node);
    check_inspect(node);
}

fn check_knobs() {
    let knobs = millrace(&["knobs", "-o", "json"]).with_code(0).json();
    assert!(knobs.iter().any(|knob| knob["knob"] == "segment_bytes"), "{knobs:?}");
    assert!(knobs.iter().all(|knob| knob["default"].is_u64()), "{knobs:?}");
}

fn check_benches(node: &Node) {
    let bench = ["--seconds", "1", "--warm-up-seconds", "0", "--clients", "1,4"];
    let runs = node.cli(&[&["bench", "append", "--size", "64"], &bench[..]].concat()).json();
    assert_eq!(runs.len(), 2);
    for (run, clients) in runs.iter().zip([1, 4]) {
        assert_eq!(run["clients"], clients);
        for field in ["acks_per_s", "p50_us", "p99_us", "flushes", "bytes"] {
            assert!(run[field].as_f64().unwrap() > 0.0, "{field} of {run}");
        }
    }
    let costs = &runs[1]["costs"];
    let [groups, flushes, writes] = ["commit_groups", "flushes", "kernel_writes"]
        .map(|field| costs[field].as_u64().unwrap_or_else(|| panic!("{field} of {costs}")));
    // One group may be on its way when either sample is taken.
    assert!(groups > 0 && flushes.abs_diff(groups) <= 1 && writes >= flushes, "{costs}");
    for field in ["node_cpu_s", "client_cpu_s", "bytes_per_group", "commits_per_group"] {
        assert!(costs[field].as_f64().unwrap() > 0.0, "{field} of {costs}");
    }
    let batch = ["bench", "batch", "--records", "10", "--size", "64"];
    let runs = node.cli(&[&batch[..], &bench[..]].concat()).json();
    let rates = |run: &Value| (run["acks_per_s"].as_f64(), run["records_per_s"].as_f64());
    let (Some(acks), Some(records)) = rates(&runs[1]) else { panic!("rates of {}", runs[1]) };
    assert!(acks > 0.0 && (records / acks - 10.0).abs() < 1.0, "{}", runs[1]);
    let runs = node.cli(&[&["bench", "txn", "--keys", "100"], &bench[..]].concat()).json();
    assert_eq!(runs.len(), 2);
    check_open_loop(node);
    let pulled = node.cli(&["bench", "pull", "--bytes", "200000", "--streams", "4"]).one_json();
    assert_eq!(pulled["records"], 200_000_u64.div_ceil(512).div_ceil(4));
    let restart = node.try_cli(&["bench", "pull", "--bytes", "1000", "--cold"]);
    assert!(restart.with_code(2).stderr.contains("of the bench's own"));
}

/// Every record of an open loop is committed and consumed, and is known to the consumer no earlier.
fn check_open_loop(node: &Node) {
    let tail = ["bench", "tail", "--rate", "50", "--duration", "1", "--warm-up-seconds", "1"];
    let run = node.cli(&tail).one_json();
    assert_eq!((&run["rate"], &run["records"]), (&50.into(), &50.into()));
    for side in ["commit", "consumer"] {
        let [p50, p99, max] = ["p50_us", "p99_us", "max_us"].map(|name| run[side][name].as_u64());
        assert!(Some(0) < p50 && p50 <= p99 && p99 <= max, "{side} of {run}");
    }
}

/// Offline verbs, on the directory of a node that runs, and then of one that has stopped.
fn check_inspect(node: Node) {
    let directory = node.directory().to_str().unwrap().to_owned();
    check_log(&directory);
    node.stop();
    check_log(&directory);
    let inspect = millrace(&["inspect", "register", "-o", "json", &directory]);
    assert_eq!(inspect.with_code(0).one_json()["epoch"], 1);
}

fn check_log(directory: &str) {
    let inspect = |args: &[&str]| {
        let ended = millrace(&[&["inspect"], args, &["-o", "json", directory]].concat());
        assert_eq!(ended.stderr, "", "{args:?}");
        ended.with_code(0).json()
    };
    let segments = inspect(&["segments"]);
    assert!(segments[1..].iter().any(|segment| segment["frames"].as_u64() > Some(0)));
    assert!(inspect(&["frames"]).iter().all(|frame| frame["version"].is_u64()));
    assert_eq!(inspect(&["frames", "--segment", "1"])[0]["segment"], 1);
    let records = inspect(&["records", "--stream", "16"]);
    assert_eq!(records.last().unwrap()["value"], "two");
    assert_eq!(inspect(&["verify"])[0]["findings"], 0);
    let streams = inspect(&["streams"]);
    let orders = streams.iter().find(|stream| stream["name"] == "orders").unwrap();
    assert_eq!((&orders["stream"], &orders["records"]), (&16.into(), &2.into()));
    assert_eq!((&orders["first_offset"], &orders["next_offset"]), (&0.into(), &2.into()));
    let live = orders["live_ratio"].as_f64().unwrap();
    assert!(0.0 < live && live < 1.0, "one of two records is trimmed: {orders}");
    let by_name = inspect(&["dump", "--stream", "orders", "--from-offset", "1"]);
    assert_eq!(by_name, records[1..]);
    let hex = inspect(&["dump", "--stream", "s16", "--decoder", "hex", "--limit", "1"]);
    assert_eq!((hex.len(), &hex[0]["value"], &hex[0]["key"]), (1, &"6f6e65".into(), &"6b".into()));
    let all = inspect(&["dump", "--decoder", "json"]);
    let count = |stream: &Value| stream["records"].as_u64().unwrap();
    assert_eq!(all.len() as u64, streams.iter().map(count).sum::<u64>());
    assert!(all.iter().any(|record| record["value"].is_object()), "rows are JSON");
    let unknown = millrace(&["inspect", "dump", "--stream", "no-such", directory]).with_code(3);
    assert!(unknown.stderr.contains("unknown_stream"), "{}", unknown.stderr);
}

#[test]
fn exit_codes_are_as_documented() {
    let stage = Stage::new();
    let node = &stage.node;
    let directory = node.directory().to_str().unwrap().to_owned();
    node.cli(&["stream", "create", "orders"]);
    let refused = |ended: Ended, code: i32, word: &str| {
        let ended = ended.with_code(code);
        assert!(ended.stderr.contains(word), "{word} is not in {:?}", ended.stderr);
        assert_eq!(ended.stdout, "", "{word}");
    };

    // 1: the answer is no.
    let now = node.cli(&["append", "orders", "x"]).one_json()["version"].to_string();
    assert_eq!(stage.txn("write k\ncommit\n").with_code(0).one_json()["outcome"], "committed");
    let late = stage.txn(&format!("at {now}\nread k\nwrite k\ncommit\n")).with_code(1);
    assert_eq!(late.one_json()["outcome"], "conflict");
    assert_eq!(late.one_json()["conflicting_reads"], serde_json::json!([0]));
    let old = stage.txn("at 1\nread k\ncommit\n").with_code(1);
    assert_eq!(old.one_json()["outcome"], "too_old");

    // 2: the command line.
    refused(millrace(&["append"]), 2, "Usage");
    refused(millrace(&["no-such-verb"]), 2, "no-such-verb");
    refused(millrace(&["status", "--no-such-option"]), 2, "no-such-option");
    refused(millrace(&["status", "-o", "yaml"]), 2, "yaml");
    refused(millrace(&["status"]), 2, "--connect");
    refused(millrace(&["serve", "--dir", "nowhere", "--knob", "no_such=1"]), 2, "no_such");
    refused(millrace(&["serve", "--dir", "nowhere", "--knob", "segment_bytes=1"]), 2, "pages");

    // 3: the request.
    refused(node.try_cli(&["append", "no-such", "x"]), 3, "unknown_stream");
    refused(node.try_cli(&["append", "s999", "x"]), 3, "unknown_stream");
    refused(node.try_cli(&["pull", "no-such"]), 3, "unknown_stream");
    refused(node.try_cli(&["stream", "create", "orders"]), 3, "stream_exists");
    refused(node.try_cli(&["stream", "create", "no spaces"]), 3, "bad_name");
    refused(stage.txn("at 99999999999\nread k\ncommit\n"), 3, "future_version");
    refused(stage.txn(&format!("write {}\ncommit\n", "k".repeat(11_000))), 3, "key_too_long");
    refused(stage.txn("write b a\ncommit\n"), 3, "range_inverted");
    refused(stage.txn("write \\xff\ncommit\n"), 3, "system_key");
    refused(stage.txn("launch k\n"), 3, "line 1: launch k");

    // 4: not now.
    let nobody = ["status", "--connect", "127.0.0.1:1", "--connect-seconds", "1"];
    let ca = node.directory().join("tls/ca.pem");
    let trusting = [&nobody[..], &["--tls-ca", ca.to_str().unwrap()]].concat();
    refused(millrace(&trusting), 4, "127.0.0.1:1");
    let empty = tempfile::tempdir().unwrap();
    let nowhere = empty.path().to_str().unwrap();
    refused(millrace(&["status", "--dir", nowhere]), 4, "no node serves");
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0, "looking makes nothing");

    // 70: anything else.
    refused(millrace(&["serve", "--listen", "127.0.0.1:0", "--dir", &directory]), 70, "in use");
    refused(millrace(&["inspect", "verify", nowhere]), 70, "holds no log");
}

#[test]
fn a_reader_that_goes_ends_a_verb_quietly() {
    let Stage { node, _directory } = Stage::new();
    node.cli(&["stream", "create", "orders"]);
    let lines = format!("{}\n", "x".repeat(10_000)).repeat(40);
    let directory = node.directory().to_str().unwrap().to_owned();
    let append = ["append", "orders", "--dir", &directory];
    let appended = millrace_with_stdin(&append, &lines).with_code(0);
    assert_eq!(appended.stdout.lines().count(), 40);
    for follow in [&["--limit", "1000"][..], &["--follow"]] {
        let mut pull = Command::new(binary())
            .args(["pull", "orders", "--dir", &directory])
            .args(follow)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        // Dropping the reader closes the pipe with most of the records still to come.
        BufReader::with_capacity(16, pull.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("orders 0 append"), "{line}");
        let ended = pull.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
    }
}
