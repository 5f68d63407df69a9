//! Products in FP8 by cuBLASLt.

use super::{IDLE, agree, figures, on_gpu, train};
use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// But for where sums are rounded, and what that makes of codes; with biases and without, and with one product in bf16.
#[test]
fn losses_are_those_of_the_processor() {
    let place = Workplace::new();
    let plain = train(&place, "--dtype bf16", "plain");
    for (number, more) in [
        "",
        "--set model.qkv_bias=true --set fp8.gradients=e4m3",
        "--recompute full --set fp8.except=[\"*down_proj*\"]",
        "--set fp8.fast_accumulation=true --set fp8.weights=step --offload-parameters pinned --accum 3",
    ]
    .into_iter()
    .enumerate()
    {
        let flags = format!("--dtype bf16 --fp8 tensor {more}");
        let gpu = train(&place, &flags, &format!("gpu-{number}"));
        let out = format!("cpu-{number}");
        let cpu = format!("--config small.toml --device cpu {flags} --out {out}");
        place.trainer(&cpu).succeeds();
        agree(&figures(&gpu), &figures(&Metrics::read(&place, &out)), 3e-2);
        assert_ne!(gpu.losses(), plain.losses(), "{flags}");
    }
}

/// The library is told, and cuts sums off.
#[test]
fn fast_accumulation_changes_bits() {
    let place = Workplace::new();
    let run = |set: bool| {
        let flags = format!("--dtype bf16 --fp8 tensor --set fp8.fast_accumulation={set}");
        figures(&train(&place, &flags, &format!("fast-{set}")))
    };
    let [exact, fast] = [false, true].map(run);
    assert_ne!(exact, fast);
    agree(&fast, &exact, 3e-2);
}

/// A GPU that makes other codes than the processor is told of, where codes are made: this one makes none.
#[test]
fn codes_are_looked_at_when_a_run_begins() {
    let place = Workplace::new();
    let run = "--config small.toml --device cuda --dtype bf16";
    for (fp8, settings, is_other) in [
        ("tensor", &[][..], false),
        ("tensor", &[IDLE], true),
        ("off", &[IDLE], false),
    ] {
        let flags = format!("{run} --fp8 {fp8} --out {fp8}-{is_other}");
        let ended = on_gpu(&place, &flags, settings);
        let is_said = ended.stderr.contains("converts to FP8 otherwise");
        assert_eq!(is_said, is_other, "{ended:?}");
        ended.succeeds();
    }
}

/// What a GPU of this compute capability has instead of products in FP8; nothing if it has them.
const CAPABILITIES: [(&str, Option<&str>); 3] = [
    (
        "8.0",
        Some("has compute capability 8.0, and products in FP8 need 8.9 (Ada) or newer"),
    ),
    ("8.9", None),
    ("9.0", None),
];

/// Before anything is loaded or written, with what to do instead; and that is so.
#[test]
fn a_gpu_without_products_in_fp8_is_refused() {
    let place = Workplace::new();
    let train = "--config small.toml --device cuda --dtype bf16 --save-every 2 --out";
    on_gpu(&place, &format!("{train} whole --fp8 tensor"), &[IDLE]).succeeds();
    let resume = "--resume whole/checkpoints/step-2 --out";
    for (capability, missing) in CAPABILITIES {
        let settings = [("STAND_IN_CAPABILITY", capability), IDLE];
        for (run, out) in [
            (format!("{train} run --fp8 tensor"), "run"),
            (format!("{resume} rest"), "rest"),
        ] {
            let outcome = on_gpu(&place, &run, &settings);
            let Some(reason) = missing else {
                outcome.succeeds();
                std::fs::remove_dir_all(place.path(out)).unwrap();
                continue;
            };
            let words = [
                "`fp8.recipe`",
                reason,
                "leave --fp8 out",
                "--fp8 off --allow-change",
            ];
            outcome.fails(5, &words);
            assert!(!place.path(out).exists());
        }
        for run in [
            format!("{train} plain"),
            format!("{resume} plain --fp8 off --allow-change"),
        ] {
            on_gpu(&place, &run, &settings).succeeds();
            std::fs::remove_dir_all(place.path("plain")).unwrap();
        }
    }
}

#[test]
fn the_doctor_says_which_gpu_has_products_in_fp8() {
    let place = Workplace::new();
    for (capability, missing) in CAPABILITIES {
        let settings = [("STAND_IN_CAPABILITY", capability), IDLE];
        let json = on_gpu(&place, "doctor --json --threads 1", &settings).succeeds();
        let machine: Value = serde_json::from_str(&json.stdout).unwrap();
        let said = &machine["gpus"][0]["fp8_missing"];
        match missing {
            None => assert_eq!(*said, Value::Null, "{capability}"),
            Some(reason) => assert!(said.as_str().unwrap().ends_with(reason), "{said}"),
        }
        let table = on_gpu(&place, "doctor --threads 1", &settings).succeeds();
        let row = table
            .stdout
            .lines()
            .find(|line| line.contains("products in FP8"));
        let row = row.expect("a row for it");
        assert!(row.contains(missing.unwrap_or("by --fp8 tensor")), "{row}");
    }
}
