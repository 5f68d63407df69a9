//! `kernel_times`, on the libraries that stand in for a GPU and its driver.

use serde_json::Value;
use std::process::Command;

fn kernel_times(arguments: &[&str]) -> (Vec<Value>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kernel_times"))
        .args(arguments)
        .env("LD_LIBRARY_PATH", emulation::stand_in_folder())
        .output()
        .unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{stdout}{stderr}");
    let lines = stdout
        .lines()
        .map(|line| serde_json::from_str(line).expect(line));
    (lines.collect(), stderr)
}

/// Every case that is listed is timed.
#[test]
fn every_kernel_is_timed() {
    let (timed, stderr) = kernel_times(&["--json", "--tiny"]);
    assert_eq!(stderr, "");
    let (listed, _) = kernel_times(&["--json", "--tiny", "--list"]);
    assert_eq!(timed.len(), listed.len());
    for (timed, listed) in timed.iter().zip(&listed) {
        assert!(timed["refused"].is_null(), "{timed}");
        for key in ["kernel", "model", "shape"] {
            assert_eq!(timed[key], listed[key]);
        }
        for key in ["us", "min_us", "gbps", "copy_gbps", "sm_mhz", "watts"] {
            assert!(timed[key].as_f64().unwrap() > 0.0, "{key}: {timed}");
        }
        let rate = |key: &str| timed["us"].as_f64().unwrap() * timed[key].as_f64().unwrap();
        let near = |rate: f64, cost: &Value| {
            let cost = cost.as_f64().unwrap();
            (rate - cost).abs() <= 1e-6 * cost
        };
        assert!(near(1e6 * rate("tflops"), &listed["flops"]), "{timed}");
        assert!(near(1e3 * rate("gbps"), &listed["bytes"]), "{timed}");
        let lengths = ["registers", "local_bytes", "blocks_per_sm"].map(|key| {
            let figures = timed[key].as_array().unwrap();
            figures.len()
        });
        let names = timed["variant"].as_array().unwrap();
        let own = names.iter().filter(|name| **name != "library").count();
        assert_eq!(lengths, [own; 3], "{timed}");
        assert!(!names.is_empty(), "{timed}");
    }
}

#[test]
fn shapes_are_those_of_the_models_and_each_kernel_has_three() {
    let (listed, _) = kernel_times(&["--json", "--list"]);
    let mut kernels: Vec<&Value> = listed.iter().map(|case| &case["kernel"]).collect();
    kernels.dedup();
    for kernel in kernels {
        let shapes = listed.iter().filter(|case| case["kernel"] == *kernel);
        assert!(shapes.count() >= 3, "{kernel}");
    }
    let (one, _) = kernel_times(&["--json", "--list", "--case", "matmul/llama-3-8b"]);
    assert_eq!(one.len(), 1);
    assert_eq!(one[0]["shape"], serde_json::json!([8192, 4096, 28672]));
    assert_eq!(one[0]["flops"], 2 * 8192 * 4096 * 28672u64);
}

#[test]
fn it_stops_when_its_time_is_over() {
    let (timed, stderr) = kernel_times(&["--json", "--tiny", "--seconds", "0"]);
    assert!(timed.is_empty(), "{timed:?}");
    assert!(stderr.contains("cases are left"), "{stderr}");
}
