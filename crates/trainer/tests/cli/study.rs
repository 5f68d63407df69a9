//! Strategies on paper: the peaks of all ranks, a step's time, what a GiB costs; and the study that is published.

use crate::workplace::Workplace;
use serde_json::Value;

const STUDY: &str = include_str!("../../../../benches/results/2026-11-26-strategy-study.md");
const MATRIX: &str = include_str!("../../../../configs/bench/study.toml");

fn json(place: &Workplace, flags: &str) -> Value {
    serde_json::from_str(&place.trainer(flags).succeeds().stdout).unwrap()
}

#[test]
fn strategies_are_compared_on_paper() {
    let place = Workplace::new();
    let matrix = "config = 'small.toml'\npaper = true\nset = ['collectives.zero=2']\n[matrix]\nranks = [3]\nrecompute = ['none', 'mlp', 'full']\n";
    place.file("study.toml", matrix);
    let bench = "bench --matrix study.toml --device cuda --plan-only";
    let report = json(&place, &format!("{bench} --json"));
    let rows = report["rows"].as_array().unwrap();
    let paper = |row: &Value, name: &str| row["paper"][name].as_f64().unwrap();
    for row in rows {
        let recompute = row["strategy"].as_str().unwrap();
        let peak = |rank: usize| {
            let plan = format!(
                "plan --json --config small.toml --device cuda --ranks 3 --rank {rank} --zero 2 --recompute {recompute}"
            );
            json(&place, &plan)["peak_bytes"].as_f64().unwrap()
        };
        let peaks = [0, 1, 2].map(peak);
        assert_eq!(paper(row, "ranks_planned"), 3.0);
        assert_eq!(
            paper(row, "least_peak_bytes"),
            peaks.into_iter().fold(f64::INFINITY, f64::min)
        );
        assert_eq!(
            paper(row, "most_peak_bytes"),
            peaks.into_iter().fold(0.0, f64::max)
        );
        assert_eq!(row["paper"]["fits"], serde_json::json!(["H100", "H200"]));
    }
    let [control, _, full] = rows.as_slice() else {
        panic!("{rows:?}")
    };
    let longer = paper(full, "compute_ms") - paper(control, "compute_ms");
    assert!(longer > 0.0, "{full}");
    let gib = full["saved_bytes"].as_f64().unwrap() / (1u64 << 30) as f64;
    assert_eq!(paper(full, "ms_per_gib_saved"), longer / gib);
    assert!(control["paper"]["ms_per_gib_saved"].is_null());
    let table = place.trainer(bench).succeeds().stdout;
    assert_eq!(
        table.matches(" planned ").count(),
        1 + rows.len(),
        "{table}"
    );
}

/// The rows of the smallest model; the others take longer to plan.
#[test]
fn the_published_study_is_what_is_planned() {
    let place = Workplace::new();
    let second = MATRIX.match_indices("[[matrices]]").nth(1).unwrap().0;
    place.file("first.toml", &MATRIX[..second]);
    let printed = place
        .trainer("bench --matrix first.toml --device cuda --plan-only --markdown")
        .succeeds()
        .stdout;
    let rows: Vec<&str> = printed
        .lines()
        .filter(|line| line.starts_with("| llama-3-8b /"))
        .collect();
    assert_eq!(rows.len(), 8, "{printed}");
    let published = STUDY
        .lines()
        .filter(|line| line.starts_with("| llama-3-8b /"));
    assert_eq!(published.collect::<Vec<_>>(), rows);
    let all = STUDY.lines().filter(|line| line.contains(" / "));
    for row in all.filter(|line| line.starts_with("| ")) {
        assert!(row.contains("| planned |"), "{row}");
    }
}
