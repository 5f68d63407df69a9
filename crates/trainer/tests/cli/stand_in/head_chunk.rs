//! `memory.head_chunk = "auto"` on a GPU: chosen before the run is planned, and written down.

use super::{IDLE, on_gpu, plan};
use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// 1024 tokens, whose logits are a part of the peak.
const MODEL: &str =
    "--config llama-15m --device cuda --seq 256 --micro-batch 4 --set lr.schedule=constant";

/// The chunk that a run takes: the one of its plan, of its configuration, and so of its peak.
#[track_caller]
fn taken(place: &Workplace, flags: &str, out: &str, settings: &[(&str, &str)]) -> u64 {
    let run = format!("{MODEL} --steps 1 {flags} --out {out}");
    on_gpu(place, &run, &[&[IDLE], settings].concat()).succeeds();
    let tokens = plan(place, out)["head_chunk"].as_u64().unwrap();
    let config = place.text(&format!("{out}/config.toml"));
    assert!(
        config.contains(&format!("head_chunk = {tokens}\n")),
        "{config}"
    );
    let metrics = Metrics::read(place, out);
    for step in metrics.steps() {
        assert_eq!(step["peak_bytes"], step["planned_peak_bytes"], "{flags}");
    }
    tokens
}

#[test]
fn a_chunk_is_as_large_as_time_and_memory_have_it() {
    let place = Workplace::new();
    let planned = |flags: &str| -> Value {
        let planned = place
            .trainer(&format!("plan {MODEL} {flags} --json"))
            .succeeds();
        serde_json::from_str(&planned.stdout).unwrap()
    };
    let free = planned("");
    assert_eq!(free["head_chunk"], 1024);
    assert_eq!(taken(&place, "", "free", &[]), 1024);
    // What changes no bits does not change the chunk.
    let elsewhere = "--recompute full --offload-optimizer pinned";
    assert_eq!(taken(&place, elsewhere, "elsewhere", &[]), 1024);

    let [most, reserved] =
        ["peak_bytes", "reserved_bytes"].map(|name| free[name].as_u64().unwrap());
    // A limit acts at leases alone.
    let limit = |bytes: u64| format!("--memory-limit {bytes}");
    assert_eq!(taken(&place, &limit(most), "limited", &[]), 1024);
    let short = format!("{MODEL} --steps 1 --force {} --out short", limit(most - 1));
    on_gpu(&place, &short, &[IDLE]).fails(3, &["`logits`"]);

    // A device has to hold what is reserved and what libraries take.
    let device = reserved + free["device_overhead_bytes"].as_u64().unwrap();
    for (bytes, tokens) in [(device, 1024), (device - 1, 512)] {
        let of_plan = planned(&format!("--device-memory {bytes}"));
        assert_eq!(of_plan["head_chunk"], tokens);
        let (out, bytes) = (format!("of-{tokens}"), bytes.to_string());
        let of_run = taken(&place, "", &out, &[("STAND_IN_TOTAL_BYTES", &bytes)]);
        assert_eq!(of_run, tokens);
    }
}

/// A run goes on with the chunk that it began with, whatever a choice would be now, and does not change it unasked.
#[test]
fn a_run_goes_on_with_its_chunk() {
    let place = Workplace::new();
    let run = format!("{MODEL} --steps 1 --set memory.head_chunk=256 --save-every 1 --out run");
    on_gpu(&place, &run, &[IDLE]).succeeds();
    for (steps, chunk) in [(2, ""), (3, "--set memory.head_chunk=auto")] {
        let on = format!("{MODEL} {chunk} --steps {steps} --resume run");
        let planned = place.trainer(&format!("plan {on} --json")).succeeds();
        let planned: Value = serde_json::from_str(&planned.stdout).unwrap();
        assert_eq!(planned["head_chunk"], 256, "{chunk}");
        on_gpu(&place, &on, &[IDLE]).succeeds();
        assert_eq!(plan(&place, "run")["head_chunk"], 256, "{chunk}");
    }
    let other = format!("{MODEL} --set memory.head_chunk=1024 --steps 4 --resume run");
    on_gpu(&place, &other, &[IDLE]).fails(2, &["memory.head_chunk: 256 before, 1024 now"]);
}
