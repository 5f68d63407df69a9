//! What ranks do between steps they do together, and the first one writes it down.

use crate::metrics::Metrics;
use crate::ranks::job::{MICRO_BATCHES, command, open_mpi, place};
use crate::workplace::outcome;
use serde_json::Value;

/// Evaluations and samples of text, whose weights come from everywhere, say what those of one process do.
#[test]
fn evaluations_and_samples() {
    let place = place();
    place.file(
        "text.txt",
        "what is learnt here does not matter at all. ".repeat(60),
    );
    let run = |ranks: usize, zero: usize, out: &str| {
        let arguments = format!(
            "--config llama.toml --data text.txt --set data.seq=24 --set model.vocab=256 --zero {zero} --quiet --accum {} \
             --eval-data text.txt --eval-every 2 --set eval.samples=8 --sample-every 3 --out {out}",
            MICRO_BATCHES / ranks
        );
        outcome(command(&place, open_mpi(ranks), &arguments), &arguments).succeeds();
        Metrics::read(&place, out)
    };
    let said = |run: &Metrics, kind: &str| -> Vec<Value> {
        let records = run.of_kind(kind).cloned();
        let names = ["step", "loss", "targets", "is_best", "text"];
        records
            .map(|record| names.map(|name| record[name].clone()).into_iter().collect())
            .collect()
    };
    let one = run(1, 0, "one");
    assert_eq!(
        (said(&one, "eval").len(), said(&one, "sample").len()),
        (2, 1)
    );
    for (ranks, zero) in [(2, 3), (4, 1)] {
        let out = format!("ranks-{ranks}");
        let many = run(ranks, zero, &out);
        for kind in ["eval", "sample"] {
            assert_eq!(said(&many, kind), said(&one, kind), "{kind}, {ranks} ranks");
        }
        for eval in many.of_kind("eval") {
            assert_eq!(eval["peak_bytes"], eval["planned_peak_bytes"], "{eval}");
        }
    }
}
