//! `optim.release = "backward"`: each block is updated in the backward pass, to the same bits.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// Without clipping and accumulation, alone and with everything elsewhere.
#[test]
fn updates_in_the_backward_pass_give_the_same_losses_in_less_memory() {
    let place = Workplace::new();
    let settings = "--config small.toml --device cpu --accum 1 --set optim.clip_norm=inf";
    let elsewhere = "--offload-parameters pinned --set offload.slab_mib=1 --offload-optimizer";
    let run = |more: &str, out: &str| {
        let settings = format!("{settings} {more}");
        let plan = place.trainer(&format!("plan --json {settings}")).succeeds();
        place.trainer(&format!("{settings} --out {out}")).succeeds();
        let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
        (plan, Metrics::read(&place, out))
    };
    let (whole, expected) = run("", "whole");
    for (index, more) in [
        String::new(),
        format!("{elsewhere} pinned"),
        format!("{elsewhere} states"),
    ]
    .into_iter()
    .enumerate()
    {
        let more = format!("--set optim.release=backward {more}");
        let (plan, released) = run(&more, &format!("released-{index}"));
        let gradients = |plan: &Value| plan["peak_by_category"]["gradient"].as_u64().unwrap();
        assert!(gradients(&plan) < gradients(&whole), "{more}");
        for (step, before) in released.steps().iter().zip(expected.steps()) {
            for key in ["step", "loss", "grad_norm"] {
                assert_eq!(step[key], before[key], "{more} {key}");
            }
            for key in ["peak_bytes", "host_pinned_bytes", "h2d_bytes", "d2h_bytes"] {
                assert_eq!(step[key], plan[key], "{more} {key}");
            }
        }
    }
}
