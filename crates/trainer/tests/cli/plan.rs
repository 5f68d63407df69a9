//! `plan`: the table, the file, and every preset.

use crate::workplace::{Workplace, outcome};
use serde_json::Value;
use std::collections::BTreeMap;

fn plan_json(place: &Workplace, settings: &str) -> Value {
    let outcome = place.trainer(&format!("plan --json {settings}")).succeeds();
    assert_eq!(outcome.stderr, "", "{settings}");
    serde_json::from_str(&outcome.stdout).unwrap()
}

#[test]
fn the_table_is_for_people() {
    let place = Workplace::new();
    let settings = "--config llama-3-8b --recompute full --seq 8192 --micro-batch 2";
    let outcome = place.trainer(&format!("plan {settings}")).succeeds();
    assert_eq!(outcome.stderr, "");
    let table = &outcome.stdout;
    let peak = plan_json(&place, settings)["peak_bytes"].to_string();
    let mut expected = vec!["plan for cuda in bf16: 8030261248 parameters", &peak];
    expected.extend(["parameter ", "gradient ", "optimizer_state", "activation "]);
    expected.extend(["peak in forward", "peak in recompute", "peak in backward"]);
    expected.extend(["kept", "core_attn", "largest at the peak", "GiB"]);
    expected.extend([
        "fits B200",
        "too large for RTX 4090 24GB, A100 40GB, L40S 48GB, H100 80GB,",
        "full:uniform:6",
        "(--offload-optimizer pinned), 89.7 GiB of host memory",
        "extra FLOPs",
        "kv_heads = 32",
    ]);
    expected.extend([
        "head_chunk = 16384",
        "accum",
        "Korthikanti",
        "18 bytes a parameter",
    ]);
    for part in expected {
        assert!(table.contains(part), "no {part:?} in\n{table}");
    }
    let longest = table.lines().map(|line| line.chars().count()).max();
    assert!(longest <= Some(160), "{table}");
    assert!(table.lines().count() < 120, "{table}");
}

/// Another program on the same GPU takes nothing of a limit, and all of what it keeps of the device.
#[test]
fn a_plan_beside_another_program_is_for_the_rest_of_the_device() {
    let place = Workplace::new();
    let run = "--config llama-15m --device cuda --micro-batch 2 --largest seq";
    let beside = format!("{run} --device-memory 24GiB --beside 20GiB");
    let (rest, plan) = (
        plan_json(&place, &format!("{run} --device-memory 4GiB")),
        plan_json(&place, &beside),
    );
    assert_eq!(plan["beside_bytes"], 20u64 << 30);
    assert_eq!(rest["beside_bytes"], Value::Null);
    assert_eq!(plan["largest"], rest["largest"]);
    let text = place.trainer(&format!("plan {beside}")).succeeds().stdout;
    let line = "\nbeside another program that keeps 20.0 GiB of the device (21474836480 bytes)\n";
    assert!(text.contains(line), "{text}");
    let refused = |flags: &str, words: &[&str]| {
        place
            .trainer(&format!("plan {run} {flags}"))
            .fails(2, words);
    };
    for all in ["24GiB", "100%"] {
        refused(
            &format!("--device-memory 24GiB --beside {all}"),
            &["--beside", "24.0 GiB", "leaves nothing"],
        );
    }
    refused("--device-memory 24GiB --beside much", &["--beside", "much"]);
    refused("--memory-limit 24GiB --beside 1GiB", &["--device-memory"]);
}

/// What is planned comes first, then what was asked for, then the rest; rules of thumb come last.
#[test]
fn the_answer_comes_before_the_tables() {
    let place = Workplace::new();
    let asked = "plan --config llama-15m --seq 512 --micro-batch 2 --accum 3 --recompute mlp --largest seq --device-memory h100 \
                 --memory-limit 10GiB --device cuda";
    let text = place.trainer(asked).succeeds().stdout;
    let tokens = 512 * 2 * 3;
    let first = format!(
        "llama-15m: {tokens} tokens a step (seq 512 x micro-batch 2 x accum 3), recompute mlp\nplan for cuda in "
    );
    assert!(text.starts_with(&first), "{text}");
    let order = [
        "the largest seq that fits is ",
        "the peak fits the limit",
        "\npeak ",
        "\n  fits ",
        "largest at the peak",
        "what another setting would change",
        "operations read and write",
        "rule of thumb",
        "the plan differs from",
    ];
    let places = order.map(|words| {
        text.find(words)
            .unwrap_or_else(|| panic!("{words}: {text}"))
    });
    assert!(places.is_sorted(), "{places:?} {text}");
    let auto = "plan --config small.toml --device cpu --recompute auto --memory-budget 1GiB --ranks 4 --cp 2 --seq 64";
    let text = place.trainer(auto).succeeds().stdout;
    let first = "small: 512 tokens a step (seq 64 x micro-batch 2 x accum 2 x 2 groups of ranks), recompute ";
    assert!(text.starts_with(first), "{text}");
}

/// What a stage keeps across steps, and sends, is in the table of stages as in its own plan.
#[test]
fn ranks_have_a_plan_each_and_stages_a_table() {
    let place = Workplace::new();
    let of = |flags: &str| plan_json(&place, &format!("--config small.toml --ranks 4 {flags}"));
    let plan = of("--rank 2 --zero 2");
    for (name, value) in [("ranks", 4), ("rank", 2), ("zero", 2)] {
        assert_eq!(plan[name], value, "{name}");
    }
    let stages = plan["stages"].as_array().unwrap();
    let numbers: Vec<u64> = stages
        .iter()
        .map(|one| one["zero"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, [0, 1, 2, 3]);
    for (zero, stage) in stages.iter().enumerate() {
        let alone = of(&format!("--rank 2 --zero {zero}"));
        for name in [
            "persistent_bytes",
            "peak_bytes",
            "reserved_bytes",
            "sent_bytes",
        ] {
            assert_eq!(stage[name], alone[name], "{name} under --zero {zero}");
        }
        let bytes = |name: &str| stage[name].as_u64().unwrap();
        let whole = bytes("persistent_bytes") + bytes("transient_bytes");
        assert_eq!(whole, bytes("peak_bytes"));
        let time = &stage["time"];
        assert!(time["exposed_ms"].as_f64().unwrap() >= 0.0, "{stage}");
        assert_eq!(time["link_gbps"], 450.0);
    }
    let persistent = |zero: usize| stages[zero]["persistent_bytes"].as_u64().unwrap();
    assert!(
        (1..4).all(|zero| persistent(zero) < persistent(zero - 1)),
        "{stages:?}"
    );
    assert!(
        stages
            .iter()
            .all(|stage| stage["sent_bytes"].as_u64() > Some(0))
    );
    let overhead = |plan: &Value| plan["device_overhead_bytes"].as_u64().unwrap();
    let alone = plan_json(&place, "--config small.toml");
    let nccl = &plan["nccl"];
    assert_eq!(nccl["bytes"], 16 * 3 * (12 << 20), "{nccl}");
    assert_eq!(nccl["is_measured"], false);
    assert_eq!(
        overhead(&plan) - overhead(&alone),
        nccl["bytes"].as_u64().unwrap()
    );
    for name in ["ranks", "rank", "zero", "sent_bytes", "stages"] {
        assert!(alone.get(name).is_none(), "{name} of a process alone");
    }

    let settings = "--config small.toml --ranks 4 --rank 2 --zero 3";
    let table = place.trainer(&format!("plan {settings}")).succeeds().stdout;
    for words in [
        "rank 2 of 4 under --zero 3",
        "3 *",
        "sent a step",
        "576 MiB of it NCCL's: 16 channels to each of 3 peers, 12.0 MiB each",
        "hardware.link_gbps",
    ] {
        assert!(table.contains(words), "no {words:?} in\n{table}");
    }
    // Nobody has measured a link between processors.
    let cpu = plan_json(&place, "--config small.toml --ranks 4 --device cpu");
    assert!(cpu["stages"][0]["time"].is_null());
    let measured = "--config small.toml --ranks 4 --device cpu --set hardware.link_gbps=1.5";
    assert_eq!(
        plan_json(&place, measured)["stages"][0]["time"]["link_gbps"],
        1.5
    );
}

#[test]
fn the_file_has_the_fields_of_the_contract() {
    let place = Workplace::new();
    let plan = plan_json(&place, "--config small.toml --recompute layernorm");
    let bytes = |name: &str| plan[name].as_u64().unwrap_or_else(|| panic!("{name}"));
    let by_category = plan["peak_by_category"].as_object().unwrap();
    let names: Vec<&String> = by_category.keys().collect();
    assert_eq!(
        names,
        [
            "parameter",
            "gradient",
            "optimizer_state",
            "activation",
            "temporary",
            "input"
        ]
    );
    let sum: u64 = by_category
        .values()
        .map(|bytes| bytes.as_u64().unwrap())
        .sum();
    assert_eq!(bytes("peak_bytes"), sum);
    let phases = plan["phase_peak_bytes"].as_object().unwrap();
    let names: Vec<&String> = phases.keys().collect();
    assert_eq!(
        names,
        [
            "load",
            "forward",
            "recompute",
            "backward",
            "optimizer",
            "eval",
            "checkpoint"
        ]
    );
    assert!(phases.contains_key(plan["peak_phase"].as_str().unwrap()));
    assert!(plan["peak_layer"].is_null() || plan["peak_layer"].is_u64());
    assert_eq!(
        bytes("reserved_bytes"),
        bytes("persistent_bytes") + bytes("slab_bytes")
    );
    assert_eq!(bytes("host_pinned_bytes"), 0);
    assert!(bytes("peak_bytes") <= bytes("reserved_bytes"));
    assert_eq!(bytes("peak_bytes") % bytes("granularity_bytes"), 0);
    assert!(bytes("parameters") > 0 && bytes("flops_per_token") > 6 * bytes("parameters") / 2);
    // bf16 weights, f32 gradient, master and two moments: 18 bytes, and padding.
    let each = plan["bytes_per_parameter"].as_f64().unwrap();
    assert!((18.0..19.0).contains(&each), "{each}");

    let arenas = plan["arenas"].as_array().unwrap();
    let names: Vec<&Value> = arenas.iter().map(|arena| &arena["name"]).collect();
    let expected = [
        "parameters",
        "gradients",
        "master",
        "first_moment",
        "second_moment",
    ];
    assert_eq!(names, expected);
    let sum: f64 = arenas
        .iter()
        .map(|arena| {
            let per_parameter = arena["bytes_per_parameter"].as_f64().unwrap();
            let held = arena["bytes"].as_u64().unwrap() as f64;
            assert_eq!(per_parameter, held / bytes("parameters") as f64, "{arena}");
            per_parameter
        })
        .sum();
    assert!((sum - each).abs() < 1e-9, "{sum} {each}");

    let activations = plan["activations"].as_array().unwrap();
    for activation in activations {
        assert!(activation["layer"].as_u64().unwrap() < 2);
        let shape = activation["shape"].as_array().unwrap();
        let elements: u64 = shape.iter().map(|size| size.as_u64().unwrap()).product();
        assert!(activation["bytes"].as_u64().unwrap() >= 2 * elements);
        assert!(activation["name"].is_string() && activation["dtype"].is_string());
        let is_norm = activation["label"] == "layernorm";
        let expected = if is_norm { "recompute" } else { "keep" };
        assert_eq!(activation["action"], expected, "{activation}");
    }
    assert!(activations.iter().any(|one| one["action"] == "recompute"));

    assert_eq!(plan["fits"]["H100 80GB"], true);
    assert!(bytes("device_overhead_bytes") > 0);
    let fraction = plan["recompute_flops_fraction"].as_f64().unwrap();
    assert_eq!(fraction, 0.0, "norms are no matrix products");
    assert!(plan["formulas"].as_array().unwrap().len() >= 5);
    let largest = plan["largest_at_peak"].as_array().unwrap();
    let sizes: Vec<u64> = largest
        .iter()
        .map(|one| one["bytes"].as_u64().unwrap())
        .collect();
    assert!(
        sizes.len() > 3 && sizes.is_sorted_by(|a, b| a >= b),
        "{sizes:?}"
    );
    assert!(largest.iter().all(|one| one["name"].is_string()));
    assert!(
        largest
            .iter()
            .all(|one| by_category.contains_key(one["category"].as_str().unwrap()))
    );
}

/// A plan by a process that is killed once it has used two seconds of a processor, whatever else the machine does.
fn plan_in_two_seconds(place: &Workplace, settings: &str) -> Value {
    let arguments = format!("plan --json {settings}");
    let plan = place.command(&arguments);
    let mut limited = std::process::Command::new("sh");
    limited
        .args(["-c", r#"ulimit -t 2 && exec "$0" "$@""#])
        .arg(plan.get_program())
        .args(plan.get_args())
        .current_dir(place.path(""))
        .stdin(std::process::Stdio::null());
    for (name, value) in plan.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    serde_json::from_str(&outcome(limited, &arguments).succeeds().stdout).unwrap()
}

/// Shapes alone: the largest takes milliseconds, and no memory.
#[test]
fn every_preset_is_planned_at_once() {
    let place = Workplace::new();
    let presets = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs")).unwrap();
    let mut planned = 0;
    for preset in presets {
        let path = preset.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        let is_preset = path.extension().is_some_and(|end| end == "toml") && name != "reference";
        if !is_preset {
            continue;
        }
        for device in ["cpu", "cuda"] {
            let settings = format!("--config {name} --device {device}");
            let plan = plan_in_two_seconds(&place, &settings);
            assert_eq!(plan["device"], device);
            assert!(
                plan["peak_bytes"].as_u64() > plan["parameters"].as_u64(),
                "{name}"
            );
        }
        planned += 1;
    }
    assert!(planned >= 10, "{planned}");
}

#[test]
fn recompute_lowers_the_peak() {
    let place = Workplace::new();
    let peak = |mode: &str| {
        let plan = plan_json(
            &place,
            &format!("--config llama-3.1-405b --recompute {mode}"),
        );
        plan["peak_bytes"].as_u64().unwrap()
    };
    let (none, core_attn, full) = (peak("none"), peak("core_attn"), peak("full"));
    assert!(
        full < core_attn && core_attn < none,
        "{full} {core_attn} {none}"
    );
}

/// A plan needs no data: only the sequence length of a batch file, unless that is given.
#[test]
fn data_need_not_be_there() {
    let place = Workplace::new();
    let tokens = plan_json(&place, "--config small.toml --data elsewhere.bin");
    assert_eq!(tokens, plan_json(&place, "--config small.toml"));
    let rows = plan_json(
        &place,
        "--config small.toml --data elsewhere.safetensors --seq 32",
    );
    assert_eq!(rows, tokens);
    place
        .trainer("plan --config small.toml --data elsewhere.safetensors")
        .fails(4, &["elsewhere.safetensors", "does not exist"]);
}

/// Where the states are on the host already, or the device's memory is the host's, offload would change nothing.
#[test]
fn offload_of_the_optimizer_is_an_effect_where_it_is_one() {
    let place = Workplace::new();
    let pinned = |settings: &str| -> Vec<Value> {
        let plan = plan_json(&place, &format!("--config llama-15m {settings}"));
        let effects = plan["effects"].as_array().unwrap().iter();
        let offload = effects.filter(|effect| effect.to_string().contains("--offload-optimizer"));
        offload.cloned().collect()
    };
    let offloaded = plan_json(&place, "--config llama-15m --offload-optimizer pinned");
    let effects = pinned("");
    assert_eq!(effects.len(), 1);
    for field in ["peak_bytes", "host_pinned_bytes"] {
        assert_eq!(effects[0][field], offloaded[field], "{field}");
    }
    assert_eq!(pinned("--offload-optimizer pinned").len(), 0);
    assert_eq!(pinned("--device cpu").len(), 0);
}

/// What single layers are told holds in every row of the table.
#[test]
fn strategies_go_with_the_specifications_of_single_layers() {
    let place = Workplace::new();
    let plan = |layers: &str| -> Value {
        let settings = format!("plan --json --config small.toml --device cpu {layers}");
        serde_json::from_str(&place.trainer(&settings).succeeds().stdout).unwrap()
    };
    let none = |plan: &Value| {
        let strategies = plan["strategies"].as_array().unwrap().iter();
        let mut none = strategies.filter(|strategy| strategy["recompute"] == "none");
        none.next().unwrap()["peak_bytes"].clone()
    };
    let (alone, first) = (plan(""), plan("--set recompute.layers={\"0\"=\"full\"}"));
    assert_ne!(alone["peak_bytes"], first["peak_bytes"]);
    for plan in [alone, first] {
        assert_eq!(none(&plan), plan["peak_bytes"]);
    }
}

/// Kinds of kernels lease the same memory, and the head's chunk does not depend on them; only times on paper do.
#[test]
fn plans_have_the_same_memory_for_every_kind_of_kernels() {
    let place = Workplace::new();
    // The times of operations by group, what notes and effects say of times, and all else.
    let planned = |set: &str| -> (BTreeMap<String, f64>, Value) {
        let mut plan = plan_json(&place, &format!("--config qwen3-30b-a3b {set}"));
        let mut times = BTreeMap::new();
        for operation in plan["operations"].as_array_mut().unwrap() {
            let [_, ms] = ["update_ms", "micro_batch_ms"].map(|time| operation[time].take());
            let group = operation["group"].as_str().unwrap();
            times.insert(group.to_owned(), ms.as_f64().unwrap());
        }
        for effect in plan["effects"].as_array_mut().unwrap() {
            effect["change"].take();
        }
        plan["notes"].take();
        (times, plan)
    };
    let (times, plain) = planned("");
    for (kernels, slower) in [
        ("experts.kernels=sm80", Some("products")),
        ("experts.kernels=sm90", None),
        ("attention.kernels=sm80", Some("attention")),
        ("attention.kernels=sm90", None),
    ] {
        let (other, memory) = planned(&format!("--set {kernels}"));
        assert_eq!(memory, plain, "{kernels}");
        for (group, ms) in &times {
            let is_slower = other[group] > 1.05 * ms;
            assert_eq!(is_slower, slower == Some(group), "{kernels}: {group}");
        }
    }
    let nowhere = "plan --config tiny-moe --dtype bf16 --set experts.kernels=sm90 --device cpu";
    place.trainer(nowhere).fails(2, &["experts.kernels"]);
}
