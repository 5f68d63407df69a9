//! GPUs that are there, that are not, and that cannot be used.

use super::{IDLE, on_gpu, train};
use crate::workplace::Workplace;
use serde_json::Value;

const RUN: &str = "--config small.toml --device cuda --out run";

#[test]
fn a_gpu_that_cannot_be_used_ends_the_run_before_it_begins() {
    let place = Workplace::new();
    for (setting, word) in [
        (("STAND_IN_DEVICES", "0"), "CUDA_ERROR_NO_DEVICE"),
        (("STAND_IN_CAPABILITY", "7.5"), "compute capability 7.5"),
    ] {
        let words = [word, "the device cuda cannot be used", "--device cpu"];
        on_gpu(&place, RUN, &[setting]).fails(5, &words);
        assert!(!place.path("run").exists());
    }
    let second = "--config small.toml --device cuda:1";
    on_gpu(&place, second, &[]).fails(5, &["there is no GPU 1: the driver finds 1"]);
}

#[test]
fn host_memory_that_cannot_be_locked_is_said() {
    let place = Workplace::new();
    let settings = [("STAND_IN_LOCKED_BYTES_MAX", "1048576")];
    on_gpu(&place, RUN, &settings).fails(5, &["page-locked", "ulimit -l"]);
}

#[test]
fn a_gpu_is_chosen_by_its_number_and_by_default() {
    let place = Workplace::new();
    let flags = "--config small.toml --steps 1 --accum 1";
    let two = [("STAND_IN_DEVICES", "2")];
    on_gpu(
        &place,
        &format!("{flags} --device cuda:1 --out second"),
        &two,
    )
    .succeeds();
    on_gpu(&place, &format!("{flags} --out default"), &[]).succeeds();
    for (out, device) in [("second", "cuda:1"), ("default", "cuda")] {
        let config = place.text(&format!("{out}/config.toml"));
        assert!(
            config.contains(&format!("device = \"{device}\"")),
            "{config}"
        );
    }
}

/// Ampere runs the kernels without Hopper's instructions, in the shared memory that it has.
#[test]
fn an_older_gpu_gives_the_same_bits() {
    let place = Workplace::new();
    let flags = "--accum 1 --steps 2 --dtype bf16 --attention flash";
    let newer = train(&place, flags, "newer").losses();
    let older = format!("--config small.toml --device cuda {flags} --out older");
    on_gpu(&place, &older, &[("STAND_IN_CAPABILITY", "8.0")]).succeeds();
    assert_eq!(
        newer,
        crate::metrics::Metrics::read(&place, "older").losses()
    );
}

#[test]
fn the_doctor_sees_it() {
    let place = Workplace::new();
    let outcome = on_gpu(&place, "doctor --json --threads 1", &[IDLE]).succeeds();
    let machine: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(machine["missing"].as_array().unwrap().len(), 0);
    let gpu = &machine["gpus"][0];
    assert_eq!(
        (&gpu["name"], &gpu["capability"]),
        (&"Stand-in GPU".into(), &"9.0".into())
    );
    assert_eq!(gpu["memory"]["total"], 80u64 << 30);
    assert!(gpu["bf16"]["gemm_tflops"].as_f64().unwrap() > 0.0);
}
