//! Training on CUDA without a GPU: the binary's own host code and calls of the driver, on libraries that stand in for
//! NVIDIA's (`kernels/emulation/README.md`), which run the kernels emulated.

mod devices;
mod fp8;
mod graphs;
mod head_chunk;
mod kernel_kinds;
mod memory;
mod nvml;
mod offload;
mod optimizer_states;
mod ranks;
mod recompute;
mod rehearsal;
mod training;
mod tune;

use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace};
use serde_json::Value;

/// Nothing is computed: for models of a size that kernels emulated would take minutes for.
const IDLE: (&str, &str) = ("STAND_IN_IDLE", "1");

/// Runs the binary where the stand-in is found before any driver, with settings of its own (`STAND_IN_...`).
#[track_caller]
fn on_gpu(place: &Workplace, arguments: &str, settings: &[(&str, &str)]) -> Outcome {
    let folder = emulation::stand_in_folder().to_str().unwrap();
    let variables = [settings, &[("LD_LIBRARY_PATH", folder)]].concat();
    let outcome = place.trainer_with(arguments, &variables);
    // What it says is a mistake, or something that was left behind.
    assert!(!outcome.stderr.contains("stand-in: "), "{outcome:?}");
    outcome
}

/// Trains `small.toml` on the GPU, and checks the memory of every step.
#[track_caller]
fn train(place: &Workplace, flags: &str, out: &str) -> Metrics {
    let arguments = format!("--config small.toml --device cuda {flags} --out {out}");
    on_gpu(place, &arguments, &[]).succeeds();
    let metrics = Metrics::read(place, out);
    assert_eq!(metrics.end_reason(), "done");
    let reserved = plan(place, out)["reserved_bytes"].as_u64().unwrap();
    for step in metrics.steps() {
        let bytes = |name: &str| step[name].as_u64().unwrap();
        assert_eq!(bytes("peak_bytes"), bytes("planned_peak_bytes"), "{flags}");
        assert_eq!(bytes("driver_allocations"), 0, "{flags}");
        let used = bytes("device_used_high_bytes");
        assert!(used >= reserved, "{flags}: {used} of {reserved}");
        assert!(bytes("device_reserved_high_bytes") >= used, "{flags}");
        assert_eq!(step["finite"], true, "{flags}");
    }
    metrics
}

/// What a run planned.
fn plan(place: &Workplace, out: &str) -> Value {
    serde_json::from_str(&place.text(&format!("{out}/plan.json"))).unwrap()
}

/// Losses and gradient norms, the figures of a step that depend on everything.
fn figures(metrics: &Metrics) -> Vec<f64> {
    let steps = metrics.steps().into_iter();
    let both = steps.flat_map(|step| [&step["loss"], &step["grad_norm"]]);
    both.map(|figure| figure.as_f64().unwrap()).collect()
}

/// That figures agree within a share.
#[track_caller]
fn agree(figures: &[f64], others: &[f64], share: f64) {
    assert_eq!(figures.len(), others.len());
    for (figure, other) in figures.iter().zip(others) {
        assert!(
            (figure / other - 1.0).abs() < share,
            "{figures:?} {others:?}"
        );
    }
}
