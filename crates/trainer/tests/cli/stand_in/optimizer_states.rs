//! The forms of optimizer states on the GPU.

use super::{agree, figures, plan, train};
use crate::metrics::Metrics;
use crate::workplace::Workplace;

/// Each leases less than f32 throughout, and takes the processor's steps.
#[test]
fn every_form_makes_the_processors_steps() {
    let place = Workplace::new();
    let bytes = |out: &str| plan(&place, out)["persistent_bytes"].as_u64().unwrap();
    train(&place, "--dtype bf16 --accum 1 --steps 1", "plain");
    for (number, form) in [
        "--state-dtype bf16",
        "--state-dtype 8bit",
        "--master bf16-split",
        "--master bf16+8",
        "--grad-dtype bf16",
        "--state-dtype 8bit --master none --grad-dtype bf16",
    ]
    .into_iter()
    .enumerate()
    {
        let flags = format!("--dtype bf16 --accum 1 --steps 3 {form}");
        let out = format!("gpu-{number}");
        let gpu = train(&place, &flags, &out);
        assert!(bytes(&out) < bytes("plain"), "{form}");
        let cpu = format!("--config small.toml --device cpu {flags} --out cpu-{number}");
        place.trainer(&cpu).succeeds();
        let cpu = Metrics::read(&place, &format!("cpu-{number}"));
        agree(&figures(&gpu), &figures(&cpu), 3e-2);
    }
}
