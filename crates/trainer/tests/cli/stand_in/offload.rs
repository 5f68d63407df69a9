//! Host memory beside the device's: the same bits, what crosses as planned, and nothing left behind.

use super::{figures, on_gpu, plan, train};
use crate::workplace::Workplace;
use serde_json::Value;

#[test]
fn offload_changes_no_bit_and_crosses_as_planned() {
    let place = Workplace::new();
    let states = "--dtype bf16 --state-dtype 8bit --set optim.f32_states=[] --set model.ffn=256";
    let resident = train(&place, states, "resident");
    assert_eq!(plan(&place, "resident")["host_pinned_bytes"], 0);
    for (number, offload) in [
        "--offload-optimizer pinned",
        "--offload-optimizer pinned --set offload.window=end --set offload.buffer_count=2",
        "--offload-activations mlp,block_input",
        "--offload-optimizer pinned --offload-activations block_input --recompute full",
        "--offload-optimizer states",
        "--offload-optimizer states --offload-parameters pinned --offload-gradients pinned",
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("offload-{number}");
        let offloaded = train(&place, &format!("{states} {offload}"), &out);
        assert_eq!(figures(&offloaded), figures(&resident), "{offload}");
        let planned = plan(&place, &out);
        assert!(planned["host_pinned_bytes"].as_u64() > Some(0), "{offload}");
        for step in offloaded.steps() {
            for field in [
                "host_pinned_bytes",
                "h2d_bytes",
                "d2h_bytes",
                "disk_read_bytes",
                "disk_written_bytes",
            ] {
                assert!(step[field].is_u64(), "{offload}: {field}");
                assert_eq!(step[field], planned[field], "{offload}: {field}");
            }
            let on_disk = offload.contains("states");
            assert_eq!(step["disk_read_bytes"].as_u64() > Some(0), on_disk);
        }
    }
}

/// States in host memory are among the fixes of a run that does not fit, and cost no bit of the loss.
#[test]
fn a_run_that_does_not_fit_is_told_to_offload_its_states() {
    let place = Workplace::new();
    let run = "--config llama-15m --device cuda --steps 1 --micro-batch 1 --memory-limit 400MiB";
    let idle = [super::IDLE];
    on_gpu(&place, &format!("{run} --out short"), &idle).fails(3, &["cheapest fix"]);
    let report: Value = serde_json::from_str(&place.text("short/oom.json")).unwrap();
    let fixes = report["fixes"].as_array().unwrap();
    let offloads = |fix: &&Value| fix["set"][0] == "offload.optimizer=pinned";
    let fix = fixes.iter().find(offloads).unwrap();
    assert_eq!(fix["changes_math"], false);
    let fixed = format!("{run} --set offload.optimizer=pinned --out fixed");
    on_gpu(&place, &fixed, &idle).succeeds();
}

#[test]
fn more_than_the_host_has_is_refused_before_anything_is_written() {
    let place = Workplace::new();
    let settings = "--config llama-3.1-405b --device cuda --offload-optimizer pinned --out run";
    let words = [
        "of pinned host memory, but ",
        "that is host memory, not the device's",
        "hint: ",
        "offload.fraction",
    ];
    on_gpu(&place, settings, &[super::IDLE]).fails(3, &words);
    assert!(!place.path("run").exists());
}
