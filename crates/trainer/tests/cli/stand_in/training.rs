//! The losses of the processor.

use super::{IDLE, agree, figures, on_gpu, train};
use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// In f32 but for the order of sums; in bf16 but for where it is rounded.
#[test]
fn losses_are_those_of_the_processor() {
    let place = Workplace::new();
    for (dtype, share) in [("f32", 1e-4), ("bf16", 3e-2)] {
        for attention in ["eager", "flash"] {
            let flags = format!("--dtype {dtype} --attention {attention}");
            let gpu = train(&place, &flags, &format!("gpu-{dtype}-{attention}"));
            let losses = gpu.losses();
            assert!(losses[3] < losses[0] - 0.05, "{flags}: {losses:?}");

            let out = format!("cpu-{dtype}-{attention}");
            let cpu = format!("--config small.toml --device cpu {flags} --out {out}");
            place.trainer(&cpu).succeeds();
            let cpu = Metrics::read(&place, &out);
            agree(&figures(&gpu), &figures(&cpu), share);
        }
    }
}

/// Features that the small model has not: biases, norms of queries and keys, one embedding for both ends, grouped
/// heads, a head in several chunks, and heads so wide that flash attention has to ask for more shared memory than a
/// block has by default.
#[test]
fn so_are_those_of_other_models() {
    let place = Workplace::new();
    for (number, features) in [
        "--set model.kv_heads=1 --set memory.head_chunk=24",
        "--set model.qkv_bias=true --set model.tie_embeddings=true",
        "--set model.qk_norm=true",
        "--set model.heads=1 --set model.kv_heads=1 --set model.head_dim=128 --attention flash",
    ]
    .into_iter()
    .enumerate()
    {
        let flags = format!("--dtype f32 --steps 2 {features}");
        let gpu = train(&place, &flags, &format!("gpu-{number}"));
        let out = format!("cpu-{number}");
        let cpu = format!("--config small.toml --device cpu {flags} --out {out}");
        place.trainer(&cpu).succeeds();
        agree(&figures(&gpu), &figures(&Metrics::read(&place, &out)), 1e-4);
    }
}

/// What a GPU trained is read back whole: either device goes on from it alike.
#[test]
fn a_saved_model_is_the_one_that_was_trained() {
    let place = Workplace::new();
    train(&place, "--dtype f32 --steps 2 --save-final model", "first");
    let flags = "--config small.toml --dtype f32 --steps 1 --init-from model";
    let gpu = format!("{flags} --device cuda --out gpu");
    on_gpu(&place, &gpu, &[]).succeeds();
    place
        .trainer(&format!("{flags} --device cpu --out cpu"))
        .succeeds();
    let [gpu, cpu, first] = ["gpu", "cpu", "first"].map(|out| Metrics::read(&place, out));
    agree(&figures(&gpu), &figures(&cpu), 1e-5);
    assert!(gpu.losses()[0] < first.losses()[0]);
}

#[test]
fn operations_are_timed() {
    let place = Workplace::new();
    let flags = "--device cuda --dtype bf16 --attention flash --offload-optimizer pinned";
    let arguments = format!("profile --config small.toml {flags} --json");
    // The rates that floors are counted with are measured on products of a size for GPUs.
    let outcome = on_gpu(&place, &arguments, &[IDLE]).succeeds();
    let profile: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let operations = profile["operations"].as_array().unwrap();
    for name in ["matmul", "flash_attention_backward", "adamw"] {
        assert!(
            operations.iter().any(|row| row["operation"] == name),
            "{profile}"
        );
    }
    assert_eq!(profile["gpu"]["sm_clock_mhz"]["median"], 1980);
}
