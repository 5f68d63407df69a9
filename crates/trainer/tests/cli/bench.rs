//! `trainer bench`: strategies measured side by side, and peaks guarded.

use crate::workplace::{Outcome, Workplace};
use serde_json::Value;

/// A matrix of runs that take moments each.
const MATRIX: &str = "config = 'small.toml'\nwarmup = 1\nsteps = 2\nrounds = 2\n[matrix]\nrecompute = ['none', 'core_attn', 'full']\n\
                      [[strategy]]\nname = 'states on the host'\nset = ['offload.optimizer=pinned']\n\
                      [[strategy]]\nname = 'no labels'\nset = ['recompute.spec=full', 'offload.activations=mlp']\n";

fn place() -> Workplace {
    let place = Workplace::new();
    place.file("matrix.toml", MATRIX);
    place
}

#[track_caller]
fn bench(place: &Workplace, flags: &str) -> Outcome {
    place.trainer(&format!("bench --matrix matrix.toml --device cpu {flags}"))
}

fn rows(outcome: &Outcome) -> Vec<Value> {
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    report["rows"].as_array().unwrap().clone()
}

/// Every strategy that ran needed what was planned, to the byte; what does not go together is skipped, with the reason.
#[test]
fn what_is_measured_is_what_was_planned() {
    let place = place();
    let outcome = bench(&place, "--json --plot peaks.svg").succeeds();
    let rows = rows(&outcome);
    assert_eq!(rows.len(), 5);
    let (skipped, ran) = rows.split_last().unwrap();
    for row in ran {
        assert_eq!(row["result"], "ok", "{row}");
        assert_eq!(row["peak_bytes"], row["planned_peak_bytes"], "{row}");
        assert_eq!(row["loss"], rows[0]["loss"], "{row}");
        assert!(row["tokens_per_s"].as_f64().unwrap() > 0.0);
        assert!(row["dominated_by"].is_null() || row["dominated_by"].is_string());
    }
    assert!(ran[2]["peak_bytes"].as_u64() < ran[0]["peak_bytes"].as_u64());
    assert_eq!(rows[0]["against_baseline"], 1.0);
    assert_eq!(skipped["result"], "skipped");
    assert!(
        skipped["reason"].as_str().unwrap().contains("mlp"),
        "{skipped}"
    );
    let picture = place.text("peaks.svg");
    assert!(picture.contains("core_attn") && picture.trim_end().ends_with("</svg>"));
}

/// A group of one is measured; several ranks are planned, and a launcher starts them.
#[test]
fn ranks_and_stages_are_axes() {
    let place = place();
    place.file(
        "ranks.toml",
        "config = 'small.toml'\nwarmup = 0\nsteps = 1\nrounds = 1\n[matrix]\nranks = [1, 2]\nzero = [0, 3]\n",
    );
    let outcome = place.trainer("bench --matrix ranks.toml --device cpu --json");
    let rows = rows(&outcome.succeeds());
    let named = |name: &str| rows.iter().find(|row| row["strategy"] == name).unwrap();
    for zero in ["zero 0", "zero 3"] {
        let one = named(&format!("ranks 1 / {zero}"));
        assert_eq!(
            (&one["result"], &one["planned_sent_bytes"]),
            (&"ok".into(), &0.into())
        );
        assert_eq!(one["peak_bytes"], one["planned_peak_bytes"], "{one}");
        let two = named(&format!("ranks 2 / {zero}"));
        assert_eq!(
            (&two["result"], &two["ranks"]),
            (&"skipped".into(), &2.into())
        );
        assert!(two["planned_sent_bytes"].as_u64() > Some(0), "{two}");
        let reason = two["reason"].as_str().unwrap();
        assert!(reason.contains("mpirun -n 2 trainer train"), "{reason}");
    }
    let bytes = |name: &str| named(name)["planned_peak_bytes"].as_u64().unwrap();
    assert!(bytes("ranks 2 / zero 3") < bytes("ranks 2 / zero 0"));
}

/// What is above a limit is not run, and planned all the same.
#[test]
fn what_does_not_fit_is_planned() {
    let place = place();
    let peaks = |row: &Value| row["planned_peak_bytes"].as_u64().unwrap();
    let planned = rows(&bench(&place, "--json --plan-only").succeeds());
    let limit = peaks(&planned[1]);
    let rows =
        rows(&bench(&place, &format!("--json --rounds 1 --memory-limit {limit}")).succeeds());
    let results: Vec<&Value> = rows.iter().map(|row| &row["result"]).collect();
    assert_eq!(results[..3], ["oom", "ok", "ok"]);
    assert_eq!(peaks(&rows[0]), peaks(&planned[0]));
    assert!(
        rows[0]["reason"]
            .as_str()
            .unwrap()
            .contains("above the limit")
    );
}

#[test]
fn tables_for_people_and_spreadsheets() {
    let place = place();
    let text = bench(&place, "--plan-only").succeeds().stdout;
    assert!(
        text.contains("planned peak") && !text.contains("tokens/s"),
        "{text}"
    );
    let markdown = bench(&place, "--plan-only --markdown").succeeds().stdout;
    assert!(
        markdown.starts_with("| strategy | result | planned peak |"),
        "{markdown}"
    );
    assert_eq!(markdown.lines().nth(1).unwrap(), "|---|---|---:|---:|");
    let csv = bench(&place, "--plan-only --csv").succeeds().stdout;
    let columns = csv.lines().next().unwrap().split(',').count();
    assert_eq!(csv.lines().nth(1).unwrap().split(',').count(), columns);
}

/// A one-line change of a shape is a change of the peak, by named tensors; a blessed file passes right away.
#[test]
fn a_peak_that_moves_fails_and_names_what_grew() {
    let place = place();
    bench(&place, "--plan-only --bless peaks.json").succeeds();
    bench(&place, "--plan-only --check peaks.json").succeeds();
    let wider = bench(&place, "--plan-only --check peaks.json --set model.ffn=70");
    assert_eq!(wider.code, Some(1), "{wider:?}");
    for word in [
        "none: planned peak",
        "`gradients`",
        "grew by",
        "--bless FILE",
    ] {
        assert!(wider.stderr.contains(word), "{wider:?}");
    }
    assert!(
        wider.stdout.contains("planned peak"),
        "the table is printed all the same"
    );
    let measured = bench(&place, "--rounds 1 --bless measured.json").succeeds();
    assert!(measured.stdout.contains("measured peak"));
    assert!(place.text("measured.json").contains("\"peak_bytes\""));
    bench(&place, "--plan-only --check measured.json").succeeds();
    let missing = bench(&place, "--rounds 1 --check no-such.json");
    assert_eq!(missing.code, Some(4), "{missing:?}");
    assert!(missing.stderr.contains("no-such.json") && missing.stderr.contains("--bless FILE"));
    assert!(!missing.stderr.contains("--init-from"), "{missing:?}");
    assert_eq!(missing.stdout, "", "it is told before anything is measured");
}

/// What was measured is not measured again, and measurements of something else are refused.
#[test]
fn an_interrupted_matrix_goes_on() {
    let place = place();
    let first = rows(&bench(&place, "--json --rounds 1 --continue journal.json").succeeds());
    let journal: Value = serde_json::from_str(&place.text("journal.json")).unwrap();
    assert_eq!(journal["runs"].as_array().unwrap().len(), 4);
    let again = rows(&bench(&place, "--json --rounds 1 --continue journal.json").succeeds());
    for (first, again) in first.iter().zip(&again) {
        assert_eq!(first["peak_bytes"], again["peak_bytes"]);
        // Read back from a file, a figure may differ in its last digit.
        let [first, again] = [first, again].map(|row| row["tokens_per_s"].as_f64().unwrap_or(0.0));
        assert!((first - again).abs() <= 1e-9 * first, "{first} {again}");
    }
    bench(&place, "--json --rounds 2 --continue journal.json").succeeds();
    let journal: Value = serde_json::from_str(&place.text("journal.json")).unwrap();
    assert_eq!(journal["runs"].as_array().unwrap().len(), 8);
    let other = bench(&place, "--rounds 1 --continue journal.json --seed 7");
    other.fails(2, &["another matrix, other settings", "journal.json"]);
}

#[test]
fn what_bench_cannot_do_is_said() {
    let place = place();
    bench(&place, "--out run").fails(2, &["--out is for a single run"]);
    bench(&place, "--plan-only --plot x.svg").fails(2, &["--plot", "--plan-only"]);
    place
        .trainer("bench --matrix no-such")
        .fails(2, &["quick, full"]);
    bench(&place, "--set model.hiden=3").fails(2, &["model.hiden"]);
}
