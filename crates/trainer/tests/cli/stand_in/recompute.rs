//! Recompute specifications on the GPU.

use super::{figures, plan, train};
use crate::workplace::Workplace;
use serde_json::Value;

/// Every specification replays other stages in another peak, and gives the bits of none.
#[test]
fn every_specification_gives_the_same_bits() {
    let place = Workplace::new();
    for (dtype, attention) in [("f32", "eager"), ("bf16", "flash")] {
        let run = |spec: &str| {
            let out = format!("{dtype}-{spec}");
            let flags = format!("--dtype {dtype} --attention {attention} --accum 1 --steps 2");
            let metrics = train(&place, &format!("{flags} --recompute {spec}"), &out);
            let replayed = metrics.steps()[0]["replayed"].as_object().unwrap();
            let replays: u64 = replayed.values().filter_map(Value::as_u64).sum();
            let peak = plan(&place, &out)["peak_bytes"].clone();
            (figures(&metrics), replays, peak)
        };
        let none = run("none");
        assert_eq!(none.1, 0);
        for spec in [
            "layernorm",
            "qkv,attn_out",
            "core_attn",
            "mlp,mlp_act",
            "full",
            "full:uniform:2",
            "full:block:1",
        ] {
            let other = run(spec);
            assert!(other.1 > 0 && other.2 != none.2, "{dtype} {spec}");
            assert_eq!(other.0, none.0, "{dtype} {spec}");
        }
    }
}
