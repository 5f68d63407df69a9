//! Clocks, power and other processes, by NVML, while strategies are measured and where memory is short.

use super::{IDLE, on_gpu};
use crate::workplace::{Outcome, Workplace};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

/// Two strategies, two runs each, in the order `none`, `full`, `none`, `full`.
const MATRIX: &str = "config = 'small.toml'\nwarmup = 1\nsteps = 2\nrounds = 2\n[matrix]\nrecompute = ['none', 'full']\n";

/// Measures the matrix on a GPU; the rows, and what was said.
#[track_caller]
fn bench(device: &str, settings: &[(&str, &str)]) -> (Vec<Value>, String) {
    let place = Workplace::new();
    place.file("matrix.toml", MATRIX);
    let arguments = format!("bench --matrix matrix.toml --device {device} --json");
    let outcome = on_gpu(&place, &arguments, &[settings, &[IDLE]].concat()).succeeds();
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    (report["rows"].as_array().unwrap().clone(), outcome.stderr)
}

/// A run that does not fit beside others on the GPU: `oom.json`, and what was said.
#[track_caller]
fn refused(settings: &[(&str, &str)]) -> (Value, Outcome) {
    let place = Workplace::new();
    let run =
        "--config llama-15m --device cuda --seq 256 --micro-batch 4 --recompute none --out run";
    let of_device = [IDLE, ("STAND_IN_TOTAL_BYTES", "17179869184")];
    let outcome = on_gpu(&place, run, &[settings, &of_device].concat());
    let outcome = outcome.fails(3, &["CUDA out of memory. Tried to allocate"]);
    let oom = serde_json::from_str(&place.text("run/oom.json")).unwrap();
    (oom, outcome)
}

fn others(process_bytes: u64, unowned_bytes: u64) -> [(&'static str, String); 2] {
    [
        (
            "STAND_IN_OTHERS_BYTES",
            (process_bytes + unowned_bytes).to_string(),
        ),
        ("STAND_IN_UNOWNED_BYTES", unowned_bytes.to_string()),
    ]
}

fn borrowed<'a>(settings: &'a [(&'static str, String); 2]) -> [(&'a str, &'a str); 2] {
    [
        (settings[0].0, &settings[0].1),
        (settings[1].0, &settings[1].1),
    ]
}

/// The GPU is the one that CUDA calls so: each stand-in has its own temperature.
#[test]
fn rows_have_what_the_gpu_did() {
    for (device, celsius) in [("cuda", 61), ("cuda:1", 62)] {
        let (rows, said) = bench(device, &[("STAND_IN_DEVICES", "2")]);
        let clocks = |mhz: u32| json!({"min": mhz, "median": mhz, "max": mhz});
        let gpu = json!({
            "sm_clock_mhz": clocks(1980),
            "sm_clock_max_mhz": 1980,
            "memory_clock_mhz": clocks(2619),
            "power_w": clocks(650),
            "power_limit_w": 700,
            "temperature_c_max": celsius,
            "throttle_reasons": [],
            "other_processes": [],
            "unowned_bytes": 0,
        });
        assert!(rows.iter().all(|row| row["gpu"] == gpu), "{rows:?}");
        assert!(!said.contains("WARN"), "{said}");
    }
}

#[test]
fn clocks_that_fall_are_said() {
    let (rows, said) = bench("cuda", &[("STAND_IN_SM_CLOCKS", "1980,1900,1960,1400")]);
    let full = &rows[1]["gpu"]["sm_clock_mhz"];
    assert_eq!((&full["min"], &full["max"]), (&1400.into(), &1900.into()));
    let words = "the clock fell in full: a median of 1400 MHz, and 1980 in the first run";
    assert!(said.contains(words), "{said}");
    assert!(!said.contains("fell in none"), "{said}");
}

/// 4 is the limit on power, 64 heat, 2 a clock that someone has set, which is harmless.
#[test]
fn what_holds_clocks_back_is_said() {
    let (rows, said) = bench("cuda", &[("STAND_IN_THROTTLE", "70")]);
    let reasons = json!([
        "applications_clocks_setting",
        "hw_thermal_slowdown",
        "sw_power_cap"
    ]);
    assert_eq!(rows[0]["gpu"]["throttle_reasons"], reasons);
    for reason in ["hw_thermal_slowdown", "sw_power_cap"] {
        let words = format!("clocks were held back by {reason} in none; full: ");
        assert!(said.contains(&words), "{said}");
    }
    assert!(!said.contains("applications_clocks"), "{said}");
}

#[test]
fn who_else_is_on_the_gpu_is_said() {
    let (rows, said) = bench("cuda", &borrowed(&others(2 * GIB, GIB)));
    let process = json!({"pid": 4000000, "name": "another-trainer", "bytes": 2 * GIB});
    for row in rows {
        assert_eq!(row["gpu"]["other_processes"], json!([process]));
        assert_eq!(row["gpu"]["unowned_bytes"], GIB);
    }
    for words in [
        "`another-trainer` (pid 4000000), which holds 2.00 GiB; speeds",
        "1.00 GiB of the GPU's memory is in use by no process that can be seen",
    ] {
        assert!(said.contains(words), "{said}");
    }
}

/// A driver that is not there, and the processor, have nothing to tell.
#[test]
fn without_nvml_nothing_is_said() {
    let (rows, said) = bench("cuda", &[("STAND_IN_NVML", "0")]);
    assert!(rows.iter().all(|row| row["gpu"].is_null()), "{rows:?}");
    let (on_cpu, said_on_cpu) = bench("cpu", &[("STAND_IN_THROTTLE", "4")]);
    assert!(on_cpu.iter().all(|row| row["gpu"].is_null()), "{on_cpu:?}");
    for said in [said, said_on_cpu] {
        assert!(!said.contains("WARN"), "{said}");
    }
    let others = others(16 * GIB - (256 << 20), 0);
    let settings = [&borrowed(&others)[..], &[("STAND_IN_NVML", "0")]].concat();
    let (oom, _) = refused(&settings);
    assert_eq!(oom["cause"], "other_process");
    assert_eq!(
        (&oom["other_processes"], &oom["unowned_bytes"]),
        (&json!([]), &Value::Null)
    );
}

#[test]
fn a_process_in_the_way_is_named() {
    let bytes = 16 * GIB - (256 << 20);
    let (oom, outcome) = refused(&borrowed(&others(bytes, 0)));
    assert_eq!(oom["cause"], "other_process");
    let process = json!({"pid": 4000000, "name": "another-trainer", "bytes": bytes});
    assert_eq!(oom["other_processes"], json!([process]));
    assert_eq!(oom["unowned_bytes"], 0);
    let words = "hint: on the GPU is also `another-trainer` (pid 4000000), which holds 15.8 GiB";
    outcome.fails(3, &[words]);
}

#[test]
fn memory_that_no_process_owns_is_said_as_such() {
    let unowned = 16 * GIB - (256 << 20);
    let (oom, outcome) = refused(&borrowed(&others(0, unowned)));
    assert_eq!(oom["cause"], "other_process");
    assert_eq!(oom["other_processes"], json!([]));
    assert_eq!(oom["unowned_bytes"], unowned);
    outcome.fails(
        3,
        &["hint: 15.8 GiB of the GPU's memory is in use by no process"],
    );
}
