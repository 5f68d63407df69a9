//! `--recompute auto`: within its budget, with the bits of any other run, and written down.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

fn planned(place: &Workplace, flags: &str) -> Value {
    let plan = place.trainer(&format!(
        "plan --json --config small.toml --device cpu {flags}"
    ));
    serde_json::from_str(&plan.succeeds().stdout).unwrap()
}

fn peak(plan: &Value) -> u64 {
    plan["peak_bytes"].as_u64().unwrap()
}

#[test]
fn a_run_stays_within_its_budget_and_can_be_made_again() {
    let place = Workplace::new();
    let (most, least) = (planned(&place, ""), planned(&place, "--recompute full"));
    let budget = (peak(&most) + peak(&least)) / 2;
    let flags = format!("--recompute auto --memory-budget {budget}");
    let chosen = planned(&place, &flags);
    assert!(peak(&chosen) <= budget && peak(&chosen) < peak(&most));

    let run = |flags: &str, out: &str| {
        let flags = format!("--config small.toml --device cpu --steps 4 {flags} --out {out}");
        place.trainer(&flags).succeeds()
    };
    run("", "kept");
    let auto = run(&flags, "auto");
    assert!(
        auto.stderr.contains("recompute auto: a peak of"),
        "{auto:?}"
    );
    let again = place.trainer("--config auto/config.toml --out again");
    again.succeeds();
    let losses = |out: &str| -> Vec<Value> {
        let metrics = Metrics::read(&place, out);
        let steps = metrics.steps().into_iter();
        steps.map(|step| step["loss"].clone()).collect()
    };
    assert_eq!(losses("kept"), losses("auto"));
    assert_eq!(losses("again"), losses("auto"));
    for out in ["auto", "again"] {
        for step in Metrics::read(&place, out).steps() {
            assert_eq!(step["peak_bytes"], chosen["peak_bytes"]);
            let replays = step["replayed"].as_object().unwrap().values();
            assert!(replays.map(|count| count.as_u64().unwrap()).sum::<u64>() > 0);
        }
    }
}

#[test]
fn a_budget_that_is_too_small_and_flags_that_do_not_go_together_are_refused() {
    let place = Workplace::new();
    let refused = |flags: &str, code: i32, words: &[&str]| {
        let flags = format!("plan --config small.toml --device cpu {flags}");
        place.trainer(&flags).fails(code, words);
    };
    let auto = "--recompute auto";
    refused(
        &format!("{auto} --memory-budget 100KiB"),
        3,
        &["the least is", "`parameters`", "hint: --set memory.budget="],
    );
    refused(auto, 2, &["--memory-budget SIZE"]);
    refused(
        &format!("{auto} --memory-budget 1GiB --offload-activations mlp"),
        2,
        &["every label itself"],
    );
    refused(
        &format!("{auto} --memory-budget 1GiB --costs missing.json"),
        4,
        &["missing.json", "trainer profile --json"],
    );
    for budget in ["90%", "auto"] {
        let on_gpu = "plan --config small.toml --device cuda --recompute auto --memory-budget";
        let words = ["--device-memory SIZE|NAME", "in bytes"];
        place
            .trainer(&format!("{on_gpu} {budget}"))
            .fails(2, &words);
    }
}

/// `auto` is what the device has free: in a plan, what is named as its memory but for the overhead.
#[test]
fn the_budget_may_be_what_is_free() {
    let place = Workplace::new();
    let auto = "--config llama-15m --recompute auto --memory-budget auto";
    let plan = |flags: &str| -> Value {
        let plan = place.trainer(&format!("plan --json {flags}"));
        serde_json::from_str(&plan.succeeds().stdout).unwrap()
    };
    let needs = |plan: &Value| {
        let bytes = |name: &str| plan[name].as_u64().unwrap();
        bytes("reserved_bytes") + bytes("device_overhead_bytes")
    };
    let run = "--device cuda --set memory.head_chunk=512";
    let whole = plan(&format!("--config llama-15m {run}"));
    let least = plan(&format!("--config llama-15m {run} --recompute full"));
    let room = (needs(&whole) + needs(&least)) / 2;
    let within = plan(&format!("{auto} {run} --device-memory {room}"));
    assert!(
        needs(&within) <= room && needs(&within) > needs(&least),
        "{within}"
    );
    assert!(within.get("advice").is_none());
    let roomy = plan(&format!("{auto} {run} --device-memory {}", needs(&whole)));
    assert_eq!(roomy["peak_bytes"], whole["peak_bytes"]);

    let on_cpu = "--config small.toml --device cpu --steps 1 --recompute auto --memory-budget auto --out free";
    let free = place.trainer(on_cpu).succeeds();
    assert!(
        free.stderr.contains("recompute auto: a peak of"),
        "{free:?}"
    );
    let run = Metrics::read(&place, "free");
    assert_eq!(
        run.steps()[0]["peak_bytes"],
        planned(&place, "")["peak_bytes"]
    );
    place
        .trainer("plan --memory-limit auto")
        .fails(2, &["memory.limit", "a size of memory"]);
}

/// Each hint about a budget that is too small can be appended to the command as it is.
#[test]
fn hints_about_a_budget_are_accepted_as_written() {
    let place = Workplace::new();
    let least = peak(&planned(&place, "--recompute full"));
    for more in ["", "--offload-activations auto"] {
        let auto = format!(
            "plan --json --config small.toml --device cpu --micro-batch 2 --recompute auto --memory-budget {} {more}",
            least * 9 / 10
        );
        let refused = place.trainer(&auto).fails(3, &["the least is"]);
        let hints = refused
            .stderr
            .lines()
            .filter_map(|line| line.strip_prefix("hint: "));
        let hints: Vec<&str> = hints.collect();
        assert!(hints.len() >= 3, "{refused:?}");
        for hint in hints {
            let sets = hint
                .split(" --set ")
                .enumerate()
                .filter_map(|(at, part)| match at {
                    0 => part.strip_prefix("--set "),
                    _ => Some(part),
                });
            let set: Vec<&str> = sets
                .map(|part| part.split(' ').next().unwrap().trim_end_matches(','))
                .collect();
            assert!(!set.is_empty(), "{hint}");
            let given = format!("{auto} --set {}", set.join(" --set "));
            let plan: Value =
                serde_json::from_str(&place.trainer(&given).succeeds().stdout).unwrap();
            if let Some((_, said)) = hint.split_once(" has a peak of ") {
                let bytes = memory::format_bytes(peak(&plan));
                assert!(said.starts_with(&bytes), "{bytes}: {hint}");
            }
        }
    }
}

/// The limit counts beside the budget, and another specification on the same command line takes the place of `auto`, as the
/// fixes of an out-of-memory error do.
#[test]
fn a_limit_and_other_specifications_go_with_it() {
    let place = Workplace::new();
    let full = peak(&planned(&place, "--recompute full"));
    let auto = "--config small.toml --device cpu --steps 1 --recompute auto --memory-budget 1GiB";
    let limited = format!("{auto} --memory-limit {}", full + full / 8);
    place
        .trainer(&format!("{limited} --out limited"))
        .succeeds();
    let chosen = &Metrics::read(&place, "limited").steps()[0]["peak_bytes"].clone();
    assert!(chosen.as_u64().unwrap() <= full + full / 8);

    let kept = peak(&planned(&place, ""));
    let short = format!(
        "{auto} --set recompute.spec=none --memory-limit {}",
        kept - 256
    );
    let failed = place
        .trainer(&format!("{short} --out failed"))
        .fails(3, &["cheapest fix"]);
    assert!(
        failed.stderr.contains("memory.budget has no effect"),
        "{failed:?}"
    );
    let oom: Value = serde_json::from_str(&place.text("failed/oom.json")).unwrap();
    let fixes = oom["fixes"].as_array().unwrap();
    let is_auto = |fix: &&Value| fix["set"][0] == "recompute.spec=auto";
    assert!(fixes.iter().any(|fix| is_auto(&fix)), "{fixes:?}");
    for (number, fix) in fixes.iter().enumerate() {
        let set = fix["set"].as_array().unwrap().iter();
        let set: String = set
            .map(|one| format!(" --set {}", one.as_str().unwrap()))
            .collect();
        place
            .trainer(&format!("{short}{set} --out fixed-{number}"))
            .succeeds();
    }
}

/// What a profile measured counts instead of rates: it chooses by what is slow here.
#[test]
fn a_profile_of_this_machine_is_a_file_of_costs() {
    let place = Workplace::new();
    let profile = place.trainer("profile --json --config small.toml --device cpu");
    place.file("costs.json", profile.succeeds().stdout);
    let full = peak(&planned(&place, "--recompute full"));
    let flags = format!(
        "--recompute auto --memory-budget {} --costs costs.json",
        full + full / 4
    );
    assert!(peak(&planned(&place, &flags)) <= full + full / 4);
}

/// Times of another model are none of this run's; the command that is named makes the right ones.
#[test]
fn a_profile_of_another_model_is_refused_and_the_right_one_is_named() {
    let place = Workplace::new();
    let profile = place.trainer("profile --json --config small.toml --device cpu");
    place.file("costs.json", profile.succeeds().stdout);
    let other = "--config small.toml --device cpu --set model.ffn=64 --recompute auto --memory-budget 1GiB --costs costs.json";
    let plan = format!("plan {other}");
    let difference = "model.ffn = 48, and this run has 64";
    let refused = place.trainer(&plan).fails(4, &["costs.json", difference]);
    place
        .trainer(&format!("{other} --steps 1 --out run"))
        .fails(4, &[difference]);
    let command = refused.stderr.split('`').nth(1).unwrap();
    assert!(command.ends_with("> costs.json"), "{command}");
    let trainer = std::path::Path::new(env!("CARGO_BIN_EXE_trainer"));
    let path = format!(
        "{}:{}",
        trainer.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let made = std::process::Command::new("sh")
        .args(["-c", command])
        .env("PATH", path)
        .current_dir(place.path("."))
        .status();
    assert!(made.unwrap().success(), "{command}");
    place.trainer(&plan).succeeds();
}

/// Peaks rise and times fall from row to row, and no preset with as much memory is faster.
#[test]
fn budgets_are_compared_with_presets() {
    let place = Workplace::new();
    let plan = planned(&place, "--pareto --plot pareto.svg");
    let points = |name: &str| -> Vec<(u64, f64)> {
        let points = plan["pareto"][name].as_array().unwrap().iter();
        let point = |point: &Value| {
            (
                point["peak_bytes"].as_u64().unwrap(),
                point["step_ms"].as_f64().unwrap(),
            )
        };
        points.map(point).collect()
    };
    let (chosen, presets) = (points("chosen"), points("presets"));
    assert!(chosen.len() > 4);
    assert!(
        chosen.is_sorted_by(|a, b| a.0 < b.0 && a.1 > b.1),
        "{chosen:?}"
    );
    assert_eq!(chosen.last().unwrap().0, peak(&plan));
    for preset in presets.iter().filter(|preset| preset.0 >= chosen[0].0) {
        let best = chosen.iter().rfind(|point| point.0 <= preset.0).unwrap();
        // Budgets lie between those of the list.
        assert!(best.1 <= preset.1 * 1.02, "{preset:?} {best:?}");
    }
    let svg = place.text("pareto.svg");
    assert!(svg.contains("core_attn,layernorm,mlp") && svg.contains("step on paper"));
}

/// As the tables show them, too: a short step's times differ in their last digits alone.
#[test]
fn no_two_rows_show_one_time() {
    let text = Workplace::new().trainer("plan --pareto --device cuda");
    let text = text.succeeds().stdout;
    let (_, table) = text.split_once("recompute auto\n").unwrap();
    let rows = table.lines().take_while(|line| !line.is_empty());
    let times: Vec<&str> = rows
        .map(|row| row.split_whitespace().nth(2).unwrap())
        .collect();
    assert!(times.len() > 6, "{table}");
    assert!(times.is_sorted_by(|a, b| a != b), "{table}");
}

/// The small model in which ways are tried has not all layers that patterns name.
#[test]
fn patterns_may_name_any_layers() {
    let place = Workplace::new();
    let plan = "plan --config small.toml --device cpu --set model.layers=12 --recompute auto --memory-budget 1GiB";
    for patterns in [
        "--optimizer muon --set optim.matrices=[\"*.layers.1?.*proj*\"]",
        "--set train.freeze=[\"*embed_tokens*\",\"*.layers.?.*\"]",
        "--set train.freeze=[\"*.layers.11.*norm*\"]",
    ] {
        place.trainer(&format!("{plan} {patterns}")).succeeds();
    }
    let nothing = "plan --config small.toml --optimizer muon --set train.freeze=[\"*.layers.*\"]";
    place
        .trainer(nothing)
        .fails(2, &["muon has no matrix to update"]);
}
