//! `--fp8`: what a plan says of it, and what a resumed run keeps.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// MiB of a block's activations by label, in 8,192 tokens.
fn by_label(plan: &Value) -> Vec<(String, u64)> {
    let mut labels: Vec<(String, u64)> = Vec::new();
    let activations = plan["activations"].as_array().unwrap().iter();
    for activation in activations.filter(|one| one["layer"] == 0) {
        let label = activation["label"].as_str().unwrap();
        let bytes = activation["bytes"].as_u64().unwrap();
        match labels.iter_mut().find(|(name, _)| name == label) {
            Some((_, sum)) => *sum += bytes,
            None => labels.push((label.into(), bytes)),
        }
    }
    // Statistics are less than one.
    labels.iter_mut().for_each(|(_, bytes)| *bytes >>= 20);
    labels
}

/// In bf16, and in FP8.
#[test]
fn plans_have_codes_by_label() {
    let place = Workplace::new();
    let plan = |flags: &str| -> Value {
        let outcome = place.trainer(&format!("plan --json {flags}")).succeeds();
        serde_json::from_str(&outcome.stdout).unwrap()
    };
    let models = [
        (
            "llama-3-8b",
            [
                ("block_input", 64, 64),
                ("layernorm", 128, 64),
                ("qkv", 96, 96),
                ("attn_value", 64, 64),
                ("attn_out", 64, 64),
                ("mlp", 448, 448),
                ("mlp_act", 224, 112),
            ],
        ),
        (
            "qwen2.5-7b",
            [
                ("block_input", 56, 56),
                ("layernorm", 112, 56),
                ("qkv", 72, 72),
                ("attn_value", 56, 56),
                ("attn_out", 56, 56),
                ("mlp", 592, 592),
                ("mlp_act", 296, 148),
            ],
        ),
    ];
    for (model, labels) in models {
        let config = format!("--config {model} --seq 8192");
        let wide = plan(&config);
        let narrow = plan(&format!("{config} --fp8 tensor"));
        let uncoded = plan(&format!("{config} --fp8 tensor --set fp8.save=false"));
        let [of_wide, of_narrow] = [&wide, &narrow].map(by_label);
        assert_eq!(by_label(&uncoded), of_wide);
        for (label, in_bf16, in_fp8) in labels {
            let of = |all: &[(String, u64)]| all.iter().find(|(name, _)| name == label).unwrap().1;
            assert_eq!(
                [of(&of_wide), of(&of_narrow)],
                [in_bf16, in_fp8],
                "{model} {label}"
            );
        }
        let [before, after] = [&wide, &narrow].map(|plan| plan["peak_bytes"].as_u64().unwrap());
        assert!(after < before, "{model}: {after} of {before}");
        let codes = narrow["activations"].as_array().unwrap().iter();
        let codes = codes.filter(|one| one["dtype"] == "f8_e4m3");
        let names: Vec<&str> = codes
            .filter(|one| one["layer"] == 1)
            .map(|one| one["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["h1", "h2", "act"]);
    }
}

/// A run's bits depend on `--fp8`, its format and its exceptions, but not on what is kept as codes.
#[test]
fn a_resumed_run_has_the_bits_of_an_unbroken_one() {
    let place = Workplace::new();
    let run = "--config small.toml --device cpu --dtype bf16 --steps 4 --save-every 2 --quiet";
    place
        .trainer(&format!("{run} --fp8 tensor --out whole"))
        .succeeds();
    let resume = "--resume whole/checkpoints/step-2 --quiet";
    let kept = "--set fp8.save=false --set fp8.weights=step --recompute full";
    place
        .trainer(&format!("{resume} {kept} --out rest"))
        .succeeds();
    let losses = |out: &str| Metrics::read(&place, out).losses();
    assert_eq!(losses("whole")[2..], losses("rest"));
    for change in [
        "--fp8 off",
        "--set fp8.gradients=e4m3",
        "--set fp8.except=[\"*o_proj*\"]",
    ] {
        let changed = format!("{resume} {change} --out changed");
        place
            .trainer(&changed)
            .fails(2, &["fp8.", "--allow-change"]);
        place
            .trainer(&format!("{changed} --allow-change"))
            .succeeds();
        assert_ne!(losses("changed"), losses("rest"), "{change}");
        std::fs::remove_dir_all(place.path("changed")).unwrap();
    }
    let checkpoint = "--resume plain/checkpoints/step-2 --quiet --out begun";
    place.trainer(&format!("{run} --out plain")).succeeds();
    place
        .trainer(&format!("{checkpoint} --fp8 tensor --allow-change"))
        .succeeds();
    assert_ne!(losses("begun"), losses("plain")[2..]);
}

/// What is not built says so where it is asked for.
#[test]
fn other_recipes_are_refused_by_name() {
    let place = Workplace::new();
    for recipe in ["rowwise", "block"] {
        let flags = format!("plan --config llama-3-8b --fp8 {recipe}");
        place
            .trainer(&flags)
            .fails(2, &[recipe, "not built", "--fp8 tensor"]);
    }
    let flags = "--config small.toml --device cpu --fp8 tensor";
    place.trainer(flags).fails(2, &["f32", "--dtype bf16"]);
}

/// Attention in bf16 comes first in a block, so the first rank of four keeps least codes of weights, and the third most.
#[test]
fn ranks_with_different_codes_choose_what_the_fullest_needs() {
    let place = Workplace::new();
    let ranks = "--config llama-15m --device cuda --dtype bf16 --fp8 tensor --ranks 4 --zero 3 --set fp8.weights=step \
                 --set fp8.except=[\"*self_attn*\"]";
    let said = |flags: &str| {
        place
            .trainer(&format!("plan {ranks} {flags}"))
            .succeeds()
            .stdout
    };
    let plan =
        |flags: &str| -> Value { serde_json::from_str(&said(&format!("--json {flags}"))).unwrap() };
    let bytes = |plan: &Value, name: &str| plan[name].as_u64().unwrap();
    let (emptiest, fullest) = (plan("--rank 0"), plan("--rank 2"));
    assert_eq!(plan(""), fullest);
    let (own, other) = (said(""), said("--rank 0"));
    assert!(own.contains("this is its plan"), "{own}");
    assert!(other.contains("what is chosen for all"), "{other}");
    // The reserved bytes decide with `auto`, else the peak.
    let device = bytes(&fullest, "reserved_bytes") + bytes(&fullest, "device_overhead_bytes") - 1;
    let auto = format!("--memory-budget auto --device-memory {device}");
    let budget = format!("--memory-budget {}", bytes(&fullest, "peak_bytes") - 1);
    for (name, flags) in [("reserved_bytes", auto), ("peak_bytes", budget)] {
        let most = bytes(&fullest, name) - 1;
        assert!(
            bytes(&emptiest, name) <= most,
            "the first rank fits as it is"
        );
        let policy = |text: &str| text.lines().next().unwrap().to_string();
        let chosen = policy(&said(&format!("--recompute auto {flags}")));
        assert!(!chosen.contains("everything is kept"), "{chosen}");
        for rank in 0..4 {
            let flags = format!("--rank {rank} --recompute auto {flags}");
            assert_eq!(policy(&said(&flags)), chosen);
            assert!(bytes(&plan(&flags), name) <= most);
        }
    }
}
