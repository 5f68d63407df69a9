//! `plan --device-memory` and `plan --largest`: what they say holds when it is planned by itself, and when it is run.

#[path = "../cli/workplace.rs"]
#[allow(dead_code, reason = "this binary uses its own part")]
mod workplace;

use crate::common::odd_model;
use kernels::Target;
use memory::{DType, Rank};
use model::ModelConfig;
use planner::{Advice, Grid, Largest, Layouts, Plan, Room, Rung, Sought};
use serde_json::Value;
use settings::{Config, Fp8Recipe, Settings};
use units::Zero;
use workplace::Workplace;

/// A configuration with something to save by every kind of rung.
fn wasteful(dtype: DType) -> Config {
    let mut config = crate::common::config(odd_model(12), dtype, "none");
    (config.data.seq, config.batch.micro) = (256, 4);
    config
}

/// The whole ladder: nothing fits a byte.
fn ladder(config: &Config, target: Target) -> Vec<Rung> {
    let advice = Advice::new(config, target, 1).unwrap();
    assert!(!advice.fits && advice.command.is_none());
    let needed = advice.rungs.last().unwrap().reserved_bytes;
    // 16 channels of 12 MiB to each of at most 7 peers.
    let peers = config.rank.map_or(0, |rank| rank.of.min(8) - 1);
    let beside = match target {
        Target::Cpu => 0,
        Target::Cuda => 16 * peers as u64 * (12 << 20),
    };
    assert_eq!(advice.needs_bytes, needed + overhead_bytes(target) + beside);
    advice.rungs
}

fn overhead_bytes(target: Target) -> u64 {
    match target {
        Target::Cpu => 0,
        Target::Cuda => planner::CUDA_OVERHEAD_BYTES,
    }
}

fn plan(config: &Config, target: Target) -> Plan {
    Plan::new(&Settings::new(config).unwrap(), target).unwrap()
}

/// The same with products in FP8, which take more than they need.
fn wasteful_in_fp8() -> Config {
    let model = ModelConfig {
        hidden: 64,
        head_dim: 16,
        ffn: 144,
        ..odd_model(12)
    };
    let mut config = crate::common::config(model, DType::BF16, "none");
    (config.data.seq, config.batch.micro) = (256, 4);
    let keys = ["fp8.recipe=tensor", "fp8.weights=step", "fp8.save=false"];
    config.with(&keys.map(String::from)).unwrap()
}

#[test]
fn each_rung_saves_the_difference_of_two_plans() {
    let runs = [
        (wasteful(DType::F32), Target::Cpu),
        (wasteful(DType::BF16), Target::Cuda),
        (wasteful_in_fp8(), Target::Cuda),
    ];
    for (mut config, target) in runs {
        let is_in_fp8 = config.fp8.recipe != Fp8Recipe::Off;
        let mut before = plan(&config, target);
        let rungs = ladder(&config, target);
        for rung in &rungs {
            config = config.with(&rung.set).unwrap();
            let then = plan(&config, target);
            assert!(rung.saves_bytes > 0);
            assert_eq!(
                rung.saves_bytes,
                before.peak_bytes - then.peak_bytes,
                "{rung:?}"
            );
            let figures = (then.peak_bytes, then.reserved_bytes, then.host_pinned_bytes);
            let listed = (rung.peak_bytes, rung.reserved_bytes, rung.host_pinned_bytes);
            assert_eq!(listed, figures, "{rung:?}");
            before = then;
        }
        let sets: Vec<&String> = rungs.iter().flat_map(|rung| &rung.set).collect();
        let everywhere = [
            "batch.micro=1",
            "attention.backend=flash",
            "recompute.spec=full",
        ];
        let with_target: &[&str] = match target {
            Target::Cpu => &["train.dtype=bf16"],
            Target::Cuda if is_in_fp8 => &["fp8.weights=use", "fp8.save=true"],
            Target::Cuda => &["optim.master=bf16-split", "offload.activations=block_input"],
        };
        for expected in everywhere.iter().chain(with_target) {
            assert!(
                sets.contains(&&expected.to_string()),
                "{expected}: {sets:?}"
            );
        }
    }
}

/// Ranks divide more before anything else that costs time, with the same bits; what does not go with ranks is not tried.
#[test]
fn ranks_may_divide_what_each_has() {
    let mut config = wasteful(DType::BF16)
        .with(&["collectives.zero=0".into()])
        .unwrap();
    config.join(memory::Rank { number: 0, of: 8 }).unwrap();
    let rungs = ladder(&config, Target::Cuda);
    let sets = |set: &str| {
        rungs
            .iter()
            .find(|rung| rung.set.iter().any(|one| one == set))
    };
    let last = sets("collectives.zero=3").unwrap_or_else(|| panic!("{rungs:#?}"));
    assert!(!last.changes_math && last.saves_bytes > 0, "{last:?}");
    for untried in ["offload.gradients=pinned", "optim.release=backward"] {
        assert_eq!(sets(untried), None);
    }
    let alone = ladder(&wasteful(DType::BF16), Target::Cuda);
    let of_ranks = alone.iter().flat_map(|rung| &rung.set);
    assert!(
        of_ranks
            .into_iter()
            .all(|set| !set.starts_with("collectives."))
    );
}

/// Free ones that keep the bits, free ones that do not, those that cost something; and shorter sequences.
#[test]
fn what_costs_nothing_comes_first_and_shorter_sequences_last() {
    let rungs = ladder(&wasteful(DType::BF16), Target::Cuda);
    let order = [
        "optim.master=bf16-split",
        "optim.state_dtype=8bit",
        "optim.master=bf16+8",
        "offload.optimizer=pinned",
        "data.seq=128",
    ];
    let positions = order.map(|set| {
        let found = rungs.iter().position(|rung| rung.set[0] == set);
        found.unwrap_or_else(|| panic!("{set}: {rungs:#?}"))
    });
    assert!(positions.is_sorted(), "{positions:?}: {rungs:#?}");
    assert_eq!((positions[0], positions[4]), (0, rungs.len() - 1));
    let first = &rungs[0];
    assert!(
        !first.changes_math && first.cost_fraction <= 0.0,
        "{first:?}"
    );
    assert!(rungs[positions[2]].changes_math, "{rungs:?}");
    assert!(rungs[positions[3]].cost_fraction > 0.0, "{rungs:?}");
}

/// A rung that saves much may do without dear ones before it.
#[test]
fn no_rung_costs_time_in_vain() {
    let (config, target) = (wasteful(DType::BF16), Target::Cuda);
    let needs_bytes = |sets: Vec<String>| {
        let changed = config.with(&sets).unwrap();
        plan(&changed, target).reserved_bytes + overhead_bytes(target)
    };
    let whole = ladder(&config, target);
    let least = whole.last().unwrap().reserved_bytes + overhead_bytes(target);
    let (most, mut dropped) = (needs_bytes(Vec::new()), 0);
    for share in 1..8 {
        let room = least + (most - least) * share / 8;
        let advice = Advice::new(&config, target, room).unwrap();
        assert!(advice.fits && advice.needs_bytes <= room);
        assert_eq!(advice.needs_bytes, needs_bytes(advice.set()));
        let too_large = |rung: &&Rung| rung.reserved_bytes + overhead_bytes(target) > room;
        dropped += whole.iter().take_while(too_large).count() + 1 - advice.rungs.len();
        for rung in &advice.rungs {
            // Of rungs with the same key, such as labels that are recomputed, the last one has it all.
            let key = |rung: &Rung| rung.set[0].split('=').next().map(String::from);
            let same_key = advice.rungs.iter().filter(|other| key(other) == key(rung));
            if same_key.count() > 1 || rung.cost_fraction <= 0.0 {
                continue;
            }
            let others = advice.rungs.iter().filter(|other| *other != rung);
            let others = others.flat_map(|other| other.set.clone()).collect();
            assert!(needs_bytes(others) > room, "{rung:?}");
        }
    }
    assert!(dropped > 0);
}

const RUN: &str = "--config tiny --attention eager --micro-batch 8 --device cpu";

fn json(place: &Workplace, flags: &str) -> Value {
    let printed = place.trainer(&format!("plan --json {flags}")).succeeds();
    serde_json::from_str(&printed.stdout).unwrap()
}

/// A plan that is printed although what was asked for does not fit.
fn json_without_fit(place: &Workplace, flags: &str, words: &[&str]) -> Value {
    let printed = place.trainer(&format!("plan --json {flags}"));
    serde_json::from_str(&printed.prints_and_fails(3, words).stdout).unwrap()
}

/// The lines of commands that a plan prints.
fn commands(plan: &str) -> Vec<&str> {
    let lines = plan.lines().map(str::trim_start);
    lines
        .filter(|line| line.starts_with("trainer train "))
        .collect()
}

#[test]
fn the_command_at_the_end_runs_within_the_memory() {
    let place = Workplace::new();
    let nothing = ["nothing that is known here makes the run fit: the least needs "];
    let ladder = json_without_fit(&place, &format!("{RUN} --device-memory 1"), &nothing);
    assert_eq!(
        (&ladder["advice"]["fits"], &ladder["advice"]["command"]),
        (&Value::Bool(false), &Value::Null)
    );
    let rungs = ladder["advice"]["rungs"].as_array().unwrap();
    let reserved = |rung: &Value| rung["reserved_bytes"].as_u64().unwrap();
    let as_it_is = reserved(&ladder);
    let rooms = [&rungs[0], &rungs[rungs.len() / 2], &rungs[rungs.len() - 1]].map(reserved);
    for room in [as_it_is].into_iter().chain(rooms) {
        let printed = place
            .trainer(&format!("plan {RUN} --device-memory {room}"))
            .succeeds();
        let command = commands(&printed.stdout)[0];
        let flags = command.strip_prefix("trainer train ").unwrap();
        assert_eq!(flags.contains("--set"), room < as_it_is, "{command}");
        let run = format!("{flags} --steps 2 --out {room} --memory-limit {room}");
        place.trainer(&run).succeeds();
        let planned = json(&place, flags);
        assert!(reserved(&planned) <= room, "{command}");
        let metrics = place.text(&format!("{room}/metrics.jsonl"));
        let peak = format!("\"peak_bytes\":{},", planned["peak_bytes"]);
        assert_eq!(metrics.matches(&peak).count(), 2, "{peak} {metrics}");
    }
}

#[test]
fn a_gpu_stands_for_its_memory() {
    let place = Workplace::new();
    let advice = |memory: &str| {
        let plan = json(
            &place,
            &format!("--config llama-3-8b --device-memory {memory}"),
        );
        plan["advice"].clone()
    };
    let named = advice("h100");
    assert_eq!(
        (&named["fits"], named["device_memory_bytes"].as_u64()),
        (&Value::Bool(true), Some(80_998 << 20))
    );
    assert!(!named["rungs"].as_array().unwrap().is_empty());
    assert_eq!(advice("80998MiB"), named);
    let (command, rungs) = (
        named["command"].as_str().unwrap(),
        named["rungs"].as_array().unwrap(),
    );
    assert!(
        command.starts_with("trainer train --config llama-3-8b --device cuda --set "),
        "{command}"
    );
    let last = rungs.last().unwrap()["set"][0].as_str().unwrap();
    // The chunk of the output head, which the command would choose anew, may follow.
    assert!(command.contains(last), "{command}");
}

/// Units of weights and of gradients are on the device, however much of the rest is not.
#[test]
fn where_nothing_fits_the_least_is_named_with_what_would_hold_it() {
    let place = Workplace::new();
    let printed = place
        .trainer("plan --config llama-3-70b --device-memory 4GiB")
        .prints_and_fails(3, &["the least needs "]);
    let least = "nothing that is known here makes it fit: the least needs ";
    let mut lines = printed.stdout.lines();
    let line = lines.find(|line| line.starts_with(least)).unwrap();
    for words in ["that fits ", "H100 80GB"] {
        assert!(line.contains(words), "{words}: {line}");
    }
}

#[test]
fn what_names_no_memory_is_refused() {
    let place = Workplace::new();
    for (flags, words) in [
        (
            "--device-memory h1000",
            ["`h1000`", "rtx-4090, a100-40gb, l40s, h100"],
        ),
        ("--device-memory 95%", ["share of a device", "80GiB"]),
        ("--device-memory 24G", ["--device-memory", "not a size"]),
        (
            "--largest seq",
            ["--device-memory SIZE|NAME", "--memory-limit"],
        ),
        (
            "--largest seq --memory-limit 95%",
            ["--device-memory SIZE|NAME", "in bytes"],
        ),
    ] {
        place.trainer(&format!("plan {flags}")).fails(2, &words);
    }
}

/// The value fits, the next one does not.
#[test]
fn the_largest_is_exact_at_its_border() {
    let place = Workplace::new();
    let peak = |flags: &str| json(&place, flags)["peak_bytes"].as_u64().unwrap();
    for (what, step, bound) in [("micro-batch", 1, "--micro-batch"), ("seq", 128, "--seq")] {
        let limit = 80 << 20;
        let plan = json(
            &place,
            &format!("--device cpu --largest {what} --memory-limit {limit}"),
        );
        let largest = &plan["largest"];
        let value = largest["value"].as_u64().unwrap();
        assert_eq!((largest["what"].as_str(), value % step), (Some(what), 0));
        assert!(value > step, "{largest}");
        let with = |value: u64| peak(&format!("--device cpu {bound} {value}"));
        assert_eq!(with(value), largest["peak_bytes"].as_u64().unwrap());
        assert!(
            with(value) <= limit && with(value + step) > limit,
            "{largest}"
        );
        assert!(plan["advice"].is_null());

        // On a GPU what is reserved counts, with the overhead.
        let search = format!("--largest {what} --config llama-15m --device-memory");
        let reserved = json(&place, &format!("{search} rtx-4090"))["largest"]["reserved_bytes"]
            .as_u64()
            .unwrap();
        let exactly = reserved + planner::CUDA_OVERHEAD_BYTES;
        let values = [exactly, exactly - 1].map(|room| {
            json(&place, &format!("{search} {room}"))["largest"]["value"]
                .as_u64()
                .unwrap()
        });
        assert!(values[0] == values[1] + step, "{values:?}");
    }
    let none = json_without_fit(
        &place,
        "--device cpu --largest micro-batch --memory-limit 1MiB",
        &["no micro-batch fits, not even 1"],
    );
    assert!(
        none["largest"]["value"].is_null()
            && none["largest"]["peak_bytes"].as_u64() > Some(1 << 20)
    );
    // GPT-2 has learned 1024 positions.
    let bounded = json(&place, "--config gpt2 --largest seq --device-memory b200");
    assert_eq!(bounded["largest"]["value"], 1024);
    assert!(bounded["largest"]["next_needs_bytes"].is_null());
}

/// The commonest question: adapters come last, as another training, and are planned by the command that is printed for them.
#[test]
fn adapters_are_offered_last_as_another_training() {
    let place = Workplace::new();
    let asked =
        "plan --config llama-3-8b --seq 4096 --micro-batch 1 --accum 1 --device-memory 24GB";
    let text = place.trainer(asked).succeeds().stdout;
    let (ladder, others) = text
        .split_once("another training, in which adapters alone learn, fits too:")
        .unwrap();
    assert_eq!(commands(ladder).len(), 1, "{ladder}");
    let plan = json(&place, &asked["plan ".len()..]);
    let others_of_plan = plan["advice"]["other_trainings"].as_array().unwrap();
    let sets = [
        vec!["lora.rank=16"],
        vec!["lora.rank=16", "lora.base_dtype=nf4"],
    ];
    assert_eq!(others_of_plan.len(), sets.len(), "{others_of_plan:?}");
    for ((other, set), printed) in others_of_plan.iter().zip(sets).zip(commands(others)) {
        let own = other["set"].as_array().unwrap();
        assert!(
            set.iter().all(|one| own.contains(&Value::from(*one))),
            "{other}"
        );
        assert_eq!(other["command"], printed);
        assert!(other["needs_bytes"].as_u64() <= Some(24_000_000_000));
        let flags = printed.strip_prefix("trainer train ").unwrap();
        assert_eq!(planned_needs(&json(&place, flags)), other["needs_bytes"]);
    }
    let adapted = format!("{asked} --lora 16");
    let words = "\nthe same adapters on a model in 4 bits, which is another training, fits too:";
    let text = place.trainer(&adapted).succeeds().stdout;
    assert!(text.contains(words), "{text}");
    let adapted = json(&place, &adapted["plan ".len()..]);
    let others = adapted["advice"]["other_trainings"].as_array();
    let others: Vec<&Value> = others.into_iter().flatten().collect();
    assert!(
        others
            .iter()
            .all(|other| other["set"][0] == "lora.base_dtype=nf4"),
        "{others:?}"
    );
    let fits = json(&place, "--config tiny --device-memory 24GB");
    assert!(fits["advice"].get("other_trainings").is_none());
}

/// Reserved bytes and the overhead of a plan in JSON.
fn planned_needs(plan: &Value) -> u64 {
    let bytes = |name: &str| plan[name].as_u64().unwrap();
    bytes("reserved_bytes") + bytes("device_overhead_bytes")
}

/// A model's folder says how long sequences it was made for.
#[test]
fn the_longest_sequence_is_shown_beside_that_of_the_model() {
    let place = Workplace::new();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/foreign/smollm-360m");
    let asked = format!("--init-from {folder} --largest seq --device-memory h100");
    let plan = json(&place, &asked);
    let largest = &plan["largest"];
    assert_eq!(largest["context_length"], 2048);
    let value = largest["value"].as_u64().unwrap();
    assert!(value > 2048, "{largest}");
    let text = place.trainer(&format!("plan {asked}")).succeeds().stdout;
    let both = format!(
        "the largest seq that fits is {value}\n  the model was made for sequences of up to 2048\n"
    );
    assert!(text.contains(&both), "{text}");
    // The settings that are shown are those of the bytes beside them.
    let set = largest["set"].as_array().unwrap().iter();
    let set: String = set
        .map(|one| format!(" --set {}", one.as_str().unwrap()))
        .collect();
    let planned = json(&place, &format!("--init-from {folder}{set}"));
    assert_eq!(planned["reserved_bytes"], largest["reserved_bytes"]);
    let note = planned["notes"][0].as_str().unwrap();
    assert!(
        note.contains("up to 2048 (max_position_embeddings"),
        "{note}"
    );
    let within = json(&place, &format!("--init-from {folder} --seq 2048"));
    assert!(
        !within["notes"].to_string().contains("max_position"),
        "{within}"
    );
}

#[test]
fn layouts_are_planned_as_they_are_said() {
    let target = Target::Cuda;
    let mut config = wasteful(DType::BF16);
    (config.model.heads, config.model.kv_heads) = (4, 2);
    config.batch.accum = 2;
    config.join(Rank { number: 0, of: 8 }).unwrap();
    let whole = plan(&config, target);
    let room = needs(&whole) - whole.reserved_bytes / 4;
    let found = Layouts::new(&config, target, room).unwrap();
    let is_tried = |is_meant: fn(&Grid) -> bool| {
        let shown = found.layouts.iter().map(|layout| &layout.grid);
        shown.chain(&found.slower).any(is_meant)
    };
    let (shared, staged) = (
        is_tried(|grid| grid.context > 1),
        is_tried(|grid| grid.pipeline > 1),
    );
    assert!(shared && staged, "{found}");
    assert_planned(&found, &config, 8);
}

/// On paper links within a machine are faster than those between machines, so its ranks gather weights from each other where they fit.
#[test]
fn layouts_of_several_machines_gather_within_each() {
    let mut config = wasteful(DType::BF16);
    config.collectives.zero = Some(Zero::Weights);
    (config.model.heads, config.model.kv_heads) = (4, 2);
    config.join(Rank { number: 0, of: 16 }).unwrap();
    let found = Layouts::new(&config, Target::Cuda, 80 << 30).unwrap();
    let groups = found.layouts.iter().map(|layout| layout.shard_group);
    assert!(groups.clone().count() > 1);
    assert!({ groups }.all(|group| group == Some(8)), "{found}");
    assert_planned(&found, &config, 16);
    // A device with room for the first without groups alone.
    let first = &found.layouts[0];
    let set = first.set.iter().filter(|set| !set.contains("shard_group"));
    let mut without = config.with(&set.cloned().collect::<Vec<_>>()).unwrap();
    without.join(Rank { number: 0, of: 16 }).unwrap();
    let needs = needs(&plan(&without, Target::Cuda));
    assert!(needs < first.needs_bytes);
    let tight = Layouts::new(&config, Target::Cuda, needs).unwrap();
    let mut same = tight
        .layouts
        .iter()
        .filter(|layout| layout.grid == first.grid);
    let same = same.next().unwrap_or_else(|| panic!("{tight}"));
    assert_eq!((same.shard_group, same.needs_bytes), (None, needs));
}

fn needs(plan: &Plan) -> u64 {
    plan.reserved_bytes + plan.device_overhead_bytes
}

/// Each layout, planned by itself, needs what was said, and a step of it has the same tokens.
fn assert_planned(found: &Layouts, config: &Config, of: usize) {
    let mut fastest = f64::INFINITY;
    for layout in &found.layouts {
        let stages = layout.grid.pipeline;
        let stages = (0..stages).map(|stage| {
            let mut config = config.with(&layout.set).unwrap();
            let number = stage * of / stages;
            config.join(Rank { number, of }).unwrap();
            plan(&config, Target::Cuda)
        });
        let largest = stages.max_by_key(needs).unwrap();
        assert_eq!(needs(&largest), layout.needs_bytes, "{layout:?}");
        assert!(layout.needs_bytes <= found.device_memory_bytes);
        assert_eq!(largest.host_pinned_bytes, layout.host_pinned_bytes);
        let ranks = largest.ranks.unwrap();
        let grid = (ranks.context, ranks.pipeline);
        assert_eq!(grid, (layout.grid.context, layout.grid.pipeline));
        assert_eq!(ranks.zero, layout.zero);
        assert_eq!(ranks.shard_group, layout.shard_group);
        assert_eq!(ranks.tokens_a_step, found.tokens_a_step);
        assert!(layout.time.tokens_per_s <= fastest);
        fastest = layout.time.tokens_per_s;
    }
}

#[test]
fn layouts_that_are_not_shown_are_told_with_the_reason() {
    let target = Target::Cuda;
    let mut config = wasteful(DType::BF16);
    (config.model.heads, config.model.kv_heads) = (4, 2);
    config.model.tie_embeddings = true;
    config.batch.accum = 2;
    config.join(Rank { number: 0, of: 8 }).unwrap();
    let none = Layouts::new(&config, target, 1).unwrap();
    assert!(none.layouts.is_empty() && none.command.is_none());
    let too_large = none.too_large.iter();
    let mut sizes: Vec<usize> = too_large.map(|layout| layout.grid.context).collect();
    sizes.sort();
    assert_eq!(sizes, [1, 2, 4], "sizes that divide 4 heads");
    let told = none.to_string();
    for refused in [
        "--cp 8: refused; parallel.context is 8: it has to divide",
        "--cp 1 --pp 2: refused; --pp 2 divides the model among stages",
    ] {
        assert!(told.contains(refused), "{told}");
    }
    assert!(!told.contains("--pp 4"), "a tied head is told once: {told}");
}

/// Ranks that share sequences take longer ones, whose length they divide.
#[test]
fn the_longest_sequence_is_shared() {
    let mut config = wasteful(DType::BF16);
    (config.model.heads, config.model.kv_heads) = (4, 2);
    let found = |context: usize| {
        let mut config = config.clone();
        config.parallel.context = context;
        config.data.seq = 4 * 128;
        config.join(Rank { number: 0, of: 4 }).unwrap();
        let room = Room::Limit(64 << 20);
        Largest::new(&config, Target::Cuda, Sought::Seq, room)
            .unwrap()
            .value
            .unwrap()
    };
    let (alone, shared) = (found(1), found(4));
    assert!(
        shared > 2 * alone && shared.is_multiple_of(4),
        "{alone} {shared}"
    );
}
