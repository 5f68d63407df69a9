//! Products in FP8 by cuBLASLt.

use super::{IDLE, agree, figures, on_gpu, train};
use crate::metrics::Metrics;
use crate::workplace::Workplace;

/// But for where sums are rounded, and what that makes of codes; with biases and without, and with one product in bf16.
#[test]
fn losses_are_those_of_the_processor() {
    let place = Workplace::new();
    let plain = train(&place, "--dtype bf16", "plain");
    for (number, more) in [
        "",
        "--set model.qkv_bias=true --set fp8.gradients=e4m3",
        "--recompute full --set fp8.except=[\"*down_proj*\"]",
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

/// Said before anything is loaded, by the rehearsal of the products.
#[test]
fn a_gpu_without_products_in_fp8_is_refused() {
    let place = Workplace::new();
    let run = "--config small.toml --device cuda --dtype bf16 --steps 1 --out";
    for (capability, is_refused) in [("8.0", true), ("8.9", false)] {
        let settings = [("STAND_IN_CAPABILITY", capability), IDLE];
        let out = format!("{run} run-{is_refused}");
        let outcome = on_gpu(&place, &format!("{out} --fp8 tensor"), &settings);
        match is_refused {
            false => drop(outcome.succeeds()),
            true => {
                assert_ne!(outcome.code, Some(0), "{outcome:?}");
                let message = "compute capability 8.0, and products in FP8 need 8.9 (Ada) or newer: leave --fp8 out";
                assert!(outcome.stderr.contains(message), "{outcome:?}");
                on_gpu(&place, &format!("{run} plain"), &settings).succeeds();
            }
        }
    }
}
