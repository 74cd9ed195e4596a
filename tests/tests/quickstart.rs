//! The main job on the sample: real PostgreSQL DML, a SIGKILL in the middle, every row and sum.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::fs;

use serde_json::Value;
use tests::millrace;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data");

fn number(value: &Value, path: &str) -> i64 {
    value.pointer(path).and_then(Value::as_i64).unwrap_or_else(|| panic!("{path} in {value}"))
}

/// The sum of all balances of a table in the database's own rows.
fn expected_sum(rows: &str, table: &str) -> i64 {
    let of_table = rows.lines().filter(|row| row.split(',').next().unwrap().ends_with(table));
    of_table.map(|row| row.rsplit(',').next().unwrap().parse::<i64>().unwrap()).sum()
}

#[test]
fn the_sample_ends_with_the_databases_own_rows_and_four_equal_sums() {
    let report = millrace(&["quickstart", "-o", "json"]).with_code(0);
    assert_eq!(report.stderr, "");
    let report = report.one_json();
    assert_eq!(report["right"], true);
    let rows = fs::read_to_string(format!("{DATA}/tpcb-1000.rows.csv")).unwrap();

    assert_eq!(number(&report, "/ingest/committed"), 1000);
    assert_eq!(report["ingest"]["resumed_after_kill"], true);
    assert_eq!(number(&report, "/ingest/rows_checked"), rows.lines().count() as i64);
    assert_eq!(number(&report, "/ingest/rows_wrong"), 0);
    assert_eq!(number(&report, "/frontends/committed"), 1000);
    assert!(number(&report, "/frontends/conflicts_retried") > 0, "{report}");
    for act in ["ingest", "frontends"] {
        let (p50, p99) = (format!("/{act}/commit_p50_us"), format!("/{act}/commit_p99_us"));
        assert!(0 < number(&report, &p50) && number(&report, &p50) <= number(&report, &p99));
        assert!(number(&report, &format!("/{act}/versions")) > 0);
    }
    let sum = expected_sum(&rows, "branches");
    assert_ne!(sum, 0);
    for table in ["accounts", "tellers", "branches"] {
        assert_eq!(expected_sum(&rows, table), sum, "{table}: TPC-B's invariant in the sample");
    }
    for table in ["accounts", "tellers", "branches", "history"] {
        assert_eq!(number(&report, &format!("/frontends/sums/{table}")), sum, "{table}");
    }
}

#[test]
fn a_wrong_row_is_a_no() {
    let directory = tempfile::tempdir().unwrap();
    let rows = fs::read_to_string(format!("{DATA}/tpcb-1000.rows.csv")).unwrap();
    let mut lines: Vec<String> = rows.lines().map(str::to_owned).collect();
    let (row, balance) = lines[100].rsplit_once(',').unwrap();
    lines[100] = format!("{row},{}", balance.parse::<i64>().unwrap() + 1);
    let expect = directory.path().join("rows.csv");
    fs::write(&expect, lines.join("\n")).unwrap();
    let input = format!("{DATA}/tpcb-1000.jsonl.zst");
    let args =
        ["quickstart", "-o", "json", "--input", &input, "--expect", expect.to_str().unwrap()];
    let report = millrace(&args).with_code(1).one_json();
    assert_eq!(number(&report, "/ingest/rows_wrong"), 1);
    assert_eq!(report["right"], false);

    let only_input = millrace(&["quickstart", "--input", &input]).with_code(2);
    assert!(only_input.stderr.contains("--expect"), "{}", only_input.stderr);
    let garbage = directory.path().join("garbage.jsonl");
    fs::write(&garbage, "{\"action\":\"B\"}\nno json\n").unwrap();
    let args = ["quickstart", "--input", garbage.to_str().unwrap(), "--expect", args[6]];
    let refused = millrace(&args);
    assert!(refused.code != Some(0) && refused.stderr.contains("line 2"), "{refused:?}");
}
