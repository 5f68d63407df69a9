//! `trainer doctor` on any machine.

use crate::workplace::Workplace;
use serde_json::Value;

/// Names that scripts rely on; `hardware.h2d_gbps` and `hardware.d2h_gbps` take these figures.
const GPU_FIGURES: [&str; 8] = [
    "context_bytes",
    "overhead_bytes",
    "planned_overhead_bytes",
    "allocation_granularity_bytes",
    "pool_page_bytes",
    "h2d_gbps",
    "d2h_gbps",
    "both_ways_gbps",
];

#[test]
fn the_machine_is_described_and_measured() {
    let place = Workplace::new();
    let outcome = place.trainer("doctor --json --threads 1").succeeds();
    let machine: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let host = &machine["host"];
    assert_eq!(host["threads"], 1);
    assert!(host["memory_bytes"].as_u64() >= host["available_bytes"].as_u64());
    for rate in ["gemm_tflops", "copy_gbps", "upload_gbps", "download_gbps"] {
        assert!(host["f32"][rate].as_f64().unwrap() > 0.0, "{rate}");
    }
    assert_eq!(machine["cuda_built"], cfg!(feature = "cuda"));
    let carried = machine["carries"].as_array().unwrap();
    assert_eq!(carried.is_empty(), !cfg!(feature = "cuda"));
    let (gpus, missing) = (&machine["gpus"], &machine["missing"]);
    let usable = gpus.as_array().unwrap().len();
    assert!(usable > 0 || !missing.as_array().unwrap().is_empty());
    for gpu in gpus.as_array().unwrap() {
        for name in GPU_FIGURES {
            assert!(gpu[name].as_f64().unwrap() > 0.0, "{name}: {gpu}");
        }
        assert!(gpu["bf16"]["gemm_tflops"].as_f64().unwrap() > 0.0, "{gpu}");
    }
    if !cfg!(feature = "cuda") {
        let sentence = missing[0].as_str().unwrap();
        assert!(sentence.contains("--features cuda"), "{sentence}");
    }
}
