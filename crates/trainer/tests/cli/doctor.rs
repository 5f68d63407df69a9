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
    for rate in ["h2d_gbps", "d2h_gbps", "both_ways_gbps"] {
        assert!(host[rate].as_f64().unwrap() > 0.0, "{rate}");
    }
    assert_eq!(machine["disk"], Value::Null);
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

#[test]
fn a_disk_is_measured_and_left_as_it_was() {
    let place = Workplace::new();
    let outcome = place.trainer("doctor --json --path there").succeeds();
    let machine: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let disk = &machine["disk"];
    assert_eq!(disk["path"], "there");
    for name in ["read_gbps", "write_gbps", "disk_gbps"] {
        let rate = disk[name].as_f64().unwrap();
        assert!(rate > 1e-3 && rate < 1e3, "{name}: {disk}");
    }
    let file_bytes = disk["file_bytes"].as_u64().unwrap();
    assert!(
        file_bytes > 0 && file_bytes.is_multiple_of(64 << 20),
        "{disk}"
    );
    assert!(disk["free_bytes"].as_u64() > Some(file_bytes));
    assert!(["io_uring", "threads"].contains(&disk["engine"].as_str().unwrap()));
    assert!(disk["direct"].is_boolean());
    assert!(!place.path("there").exists());

    let outcome = place.trainer("doctor --path there").succeeds();
    for words in ["disk of there", "GB/s", "--set hardware.disk_gbps="] {
        assert!(
            outcome.stdout.contains(words),
            "{words}: {}",
            outcome.stdout
        );
    }
}

#[test]
fn a_folder_that_another_run_has_is_not_measured() {
    let place = Workplace::new();
    let _held = scratch::ScratchFolder::open(place.path("there")).unwrap();
    place
        .trainer("doctor --path there")
        .fails(2, &["another run", "there"]);
}
