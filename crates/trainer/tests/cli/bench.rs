//! `trainer bench`: strategies measured side by side, and peaks guarded.

use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace};
use serde_json::Value;

/// A matrix of runs that take moments each.
const MATRIX: &str = "config = 'small.toml'\nwarmup = 1\nsteps = 2\nrounds = 2\n[matrix]\nrecompute = ['none', 'core_attn', 'full']\n\
                      [[strategy]]\nname = 'states on the host'\nset = ['offload.optimizer=pinned']\n\
                      [[strategy]]\nname = 'no labels'\nset = ['recompute.spec=full', 'offload.activations=mlp']\n";

fn place() -> Workplace {
    let place = Workplace::new();
    place.file("matrix.toml", MATRIX);
    place
}

#[track_caller]
fn bench(place: &Workplace, flags: &str) -> Outcome {
    place.trainer(&format!("bench --matrix matrix.toml --device cpu {flags}"))
}

fn rows(outcome: &Outcome) -> Vec<Value> {
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    report["rows"].as_array().unwrap().clone()
}

/// Every strategy that ran needed what was planned, to the byte; what does not go together is skipped, with the reason.
#[test]
fn what_is_measured_is_what_was_planned() {
    let place = place();
    let outcome = bench(&place, "--json --plot peaks.svg").succeeds();
    let rows = rows(&outcome);
    assert_eq!(rows.len(), 5);
    let (skipped, ran) = rows.split_last().unwrap();
    for row in ran {
        assert_eq!(row["result"], "ok", "{row}");
        assert_eq!(row["peak_bytes"], row["planned_peak_bytes"], "{row}");
        assert_eq!(row["loss"], rows[0]["loss"], "{row}");
        assert!(row["tokens_per_s"].as_f64().unwrap() > 0.0);
        assert!(row["dominated_by"].is_null() || row["dominated_by"].is_string());
    }
    assert!(ran[2]["peak_bytes"].as_u64() < ran[0]["peak_bytes"].as_u64());
    assert_eq!(rows[0]["against_baseline"], 1.0);
    assert_eq!(skipped["result"], "skipped");
    assert!(
        skipped["reason"].as_str().unwrap().contains("mlp"),
        "{skipped}"
    );
    let picture = place.text("peaks.svg");
    assert!(picture.contains("core_attn") && picture.trim_end().ends_with("</svg>"));
}

/// A group of one is measured; several ranks are planned, and a launcher starts them.
#[test]
fn ranks_and_stages_are_axes() {
    let place = place();
    place.file(
        "ranks.toml",
        "config = 'small.toml'\nwarmup = 0\nsteps = 1\nrounds = 1\n[matrix]\nranks = [1, 2]\nzero = [0, 3]\n",
    );
    let outcome = place.trainer("bench --matrix ranks.toml --device cpu --json");
    let rows = rows(&outcome.succeeds());
    let named = |name: &str| rows.iter().find(|row| row["strategy"] == name).unwrap();
    for zero in ["zero 0", "zero 3"] {
        let one = named(&format!("ranks 1 / {zero}"));
        assert_eq!(
            (&one["result"], &one["planned_sent_bytes"]),
            (&"ok".into(), &0.into())
        );
        assert_eq!(one["peak_bytes"], one["planned_peak_bytes"], "{one}");
        let two = named(&format!("ranks 2 / {zero}"));
        assert_eq!(
            (&two["result"], &two["ranks"]),
            (&"skipped".into(), &2.into())
        );
        assert!(two["planned_sent_bytes"].as_u64() > Some(0), "{two}");
        let reason = two["reason"].as_str().unwrap();
        assert!(reason.contains("mpirun -n 2 trainer train"), "{reason}");
    }
    let forced = bench(&place, "--json --ranks 2 --force").succeeds();
    let forced: Value = serde_json::from_str(&forced.stdout).unwrap();
    assert_eq!(forced["rows"][0]["result"], "skipped");
    let bytes = |name: &str| named(name)["planned_peak_bytes"].as_u64().unwrap();
    assert!(bytes("ranks 2 / zero 3") < bytes("ranks 2 / zero 0"));
}

/// What is above a limit is not run, and planned all the same.
#[test]
fn what_does_not_fit_is_planned() {
    let place = place();
    let peaks = |row: &Value| row["planned_peak_bytes"].as_u64().unwrap();
    let planned = rows(&bench(&place, "--json --plan-only").succeeds());
    let limit = peaks(&planned[1]);
    let rows =
        rows(&bench(&place, &format!("--json --rounds 1 --memory-limit {limit}")).succeeds());
    let results: Vec<&Value> = rows.iter().map(|row| &row["result"]).collect();
    assert_eq!(results[..3], ["oom", "ok", "ok"]);
    assert_eq!(peaks(&rows[0]), peaks(&planned[0]));
    assert!(
        rows[0]["reason"]
            .as_str()
            .unwrap()
            .contains("above the limit")
    );
}

#[test]
fn tables_for_people_and_spreadsheets() {
    let place = place();
    let text = bench(&place, "--plan-only").succeeds().stdout;
    assert!(
        text.contains("planned peak") && !text.contains("tokens/s"),
        "{text}"
    );
    let markdown = bench(&place, "--plan-only --markdown").succeeds().stdout;
    assert!(
        markdown.starts_with("| strategy | result | planned peak |"),
        "{markdown}"
    );
    assert_eq!(markdown.lines().nth(1).unwrap(), "|---|---|---:|---:|");
    let csv = bench(&place, "--plan-only --csv").succeeds().stdout;
    let columns = csv.lines().next().unwrap().split(',').count();
    assert_eq!(csv.lines().nth(1).unwrap().split(',').count(), columns);
}

/// A one-line change of a shape is a change of the peak, by named tensors; a blessed file passes right away.
#[test]
fn a_peak_that_moves_fails_and_names_what_grew() {
    let place = place();
    bench(&place, "--plan-only --bless peaks.json").succeeds();
    bench(&place, "--plan-only --check peaks.json").succeeds();
    let wider = bench(&place, "--plan-only --check peaks.json --set model.ffn=70");
    assert_eq!(wider.code, Some(1), "{wider:?}");
    for word in [
        "none: planned peak",
        "`gradients`",
        "grew by",
        "--bless FILE",
    ] {
        assert!(wider.stderr.contains(word), "{wider:?}");
    }
    assert!(
        wider.stdout.contains("planned peak"),
        "the table is printed all the same"
    );
    let measured = bench(&place, "--rounds 1 --bless measured.json").succeeds();
    assert!(measured.stdout.contains("measured peak"));
    assert!(place.text("measured.json").contains("\"peak_bytes\""));
    bench(&place, "--plan-only --check measured.json").succeeds();
    let missing = bench(&place, "--rounds 1 --check no-such.json");
    assert_eq!(missing.code, Some(4), "{missing:?}");
    assert!(missing.stderr.contains("no-such.json") && missing.stderr.contains("--bless FILE"));
    assert!(!missing.stderr.contains("--init-from"), "{missing:?}");
    assert_eq!(missing.stdout, "", "it is told before anything is measured");
}

/// What was measured is not measured again, and measurements of something else are refused.
#[test]
fn an_interrupted_matrix_goes_on() {
    let place = place();
    let first = rows(&bench(&place, "--json --rounds 1 --continue journal.json").succeeds());
    let journal: Value = serde_json::from_str(&place.text("journal.json")).unwrap();
    assert_eq!(journal["runs"].as_array().unwrap().len(), 4);
    let again = rows(&bench(&place, "--json --rounds 1 --continue journal.json").succeeds());
    for (first, again) in first.iter().zip(&again) {
        assert_eq!(first["peak_bytes"], again["peak_bytes"]);
        // Read back from a file, a figure may differ in its last digit.
        let [first, again] = [first, again].map(|row| row["tokens_per_s"].as_f64().unwrap_or(0.0));
        assert!((first - again).abs() <= 1e-9 * first, "{first} {again}");
    }
    // A model's folder may change under its name.
    place
        .trainer("--config small.toml --steps 1 --save-final model")
        .succeeds();
    let of_model = "--rounds 1 --init-from model --continue of-model.json";
    bench(&place, of_model).succeeds();
    bench(&place, of_model).succeeds();
    let config = place.text("model/config.json");
    place.file("model/config.json", format!("{config} "));
    bench(&place, of_model).fails(2, &["another matrix, other settings"]);
    bench(&place, "--json --rounds 2 --continue journal.json").succeeds();
    let journal: Value = serde_json::from_str(&place.text("journal.json")).unwrap();
    assert_eq!(journal["runs"].as_array().unwrap().len(), 8);
    let other = bench(&place, "--rounds 1 --continue journal.json --seed 7");
    other.fails(2, &["another matrix, other settings", "journal.json"]);
}

#[test]
fn what_bench_cannot_do_is_said() {
    let place = place();
    bench(&place, "--out run").fails(2, &["--out is for a single run"]);
    bench(&place, "--plan-only --plot x.svg").fails(2, &["--plot", "--plan-only"]);
    place
        .trainer("bench --matrix no-such")
        .fails(2, &["quick, full"]);
    bench(&place, "--set model.hiden=3").fails(2, &["model.hiden"]);
}

/// A flag that says something else than a strategy would go unheeded there.
#[test]
fn a_matrix_and_a_flag_that_differ_contradict_each_other() {
    let place = place();
    place.file(
        "models.toml",
        "[matrix]\nmodel = ['tiny', 'gpt2']\noptimizer = ['f32', '8bit']\nranks = [1, 2]\n",
    );
    for (matrix, flag, words) in [
        ("models", "--config small.toml", ["axis `model`", "`tiny`"]),
        (
            "models",
            "--config no-such.toml",
            ["axis `model`", "`tiny`"],
        ),
        ("models", "--init-from folder", ["axis `model`", "`tiny`"]),
        ("models", "--lora-from folder", ["axis `model`", "`tiny`"]),
        (
            "models",
            "--optimizer adamw8bit",
            ["optim.state_dtype=f32", "f32"],
        ),
        (
            "models",
            "--ranks 4",
            ["ranks = 1", "`tiny / ranks 1 / f32`"],
        ),
        (
            "matrix",
            "--recompute full",
            ["recompute.spec=none", "`none`"],
        ),
        (
            "matrix",
            "--set recompute.spec=full",
            ["recompute.spec=none", "`none`"],
        ),
        (
            "matrix",
            "--set offload.optimizer=none",
            ["offload.optimizer=pinned", "`states on the host`"],
        ),
        (
            "matrix",
            "--recompute-granularity selective",
            ["recompute.spec=none", "`none`"],
        ),
    ] {
        let command = format!("bench --matrix {matrix}.toml --plan-only {flag}");
        let refused = place.trainer(&command).fails(2, &words);
        let named = flag.split(' ').next().unwrap();
        assert!(refused.stderr.contains(named), "{refused:?}");
    }
    // What says the same does not contradict.
    place.file(
        "full.toml",
        "config = 'tiny'\n[matrix]\nrecompute = ['full']\n",
    );
    place
        .trainer("bench --matrix full.toml --plan-only --recompute full --config small.toml")
        .succeeds();
}

#[test]
fn what_is_not_there_is_refused_in_plans_too() {
    let place = place();
    place.file(
        "models.toml",
        "[matrix]\nmodel = ['tiny', 'no-such.toml']\n",
    );
    for (matrix, flags, code) in [
        ("models.toml", "", 2),
        ("matrix.toml", "--config no-such.toml", 2),
        ("matrix.toml", "--init-from no-such", 4),
        ("matrix.toml", "--lora-from no-such", 4),
        ("matrix.toml", "--data no-such.bin", 4),
    ] {
        for plan_only in ["--plan-only", "--rounds 1"] {
            let bench = format!("bench --matrix {matrix} --device cpu {plan_only} {flags}");
            place.trainer(&bench).fails(code, &["no-such"]);
        }
        if !flags.is_empty() {
            let train = format!("train --out run {flags}");
            place.trainer(&train).fails(code, &["no-such"]);
        }
    }
}

/// A model folder with its tokens, adapters on it, and what a run has saved: each is measured as it is trained.
#[test]
fn what_folders_hold_is_benched() {
    let place = Workplace::new();
    let init = "init --config small.toml --set model.vocab=363 --set model.ffn=64 --out model";
    place.trainer(init).succeeds();
    let fixtures = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tokenization/tests/fixtures"
    );
    let tokenizer = std::fs::read(format!("{fixtures}/chatml/tokenizer.json")).unwrap();
    place.file("model/tokenizer.json", tokenizer);
    place.file("text.txt", "Some words to train on. ".repeat(50));
    place
        .trainer("prepare text.txt --tokenizer model --out tokens")
        .succeeds();
    let matrix = "config = 'small.toml'\nwarmup = 1\nsteps = 2\nrounds = 1\n[matrix]\nrecompute = ['none', 'full']\n";
    place.file("matrix.toml", matrix);
    let data = "--data tokens --seq 16 --micro-batch 2";
    let train = format!(
        "train --device cpu --init-from model {data} --steps 3 --save-every 3 --save-final"
    );
    place
        .trainer(&format!("{train} whole --out run"))
        .succeeds();
    place
        .trainer(&format!("{train} adapters --lora 4 --out lora"))
        .succeeds();
    let of_run = "--config run/config.toml --init-from run/checkpoints/step-3";
    for (flags, run) in [
        (format!("--init-from model {data}"), "run"),
        (format!("--init-from model --lora 4 {data}"), "lora"),
        (format!("--lora-from adapters {data}"), ""),
        (of_run.to_owned(), ""),
    ] {
        let rows = rows(&bench(&place, &format!("--json {flags}")).succeeds());
        let plan = place.trainer(&format!("plan --json --device cpu {flags}"));
        let plan: Value = serde_json::from_str(&plan.succeeds().stdout).unwrap();
        assert_eq!(rows[0]["planned_peak_bytes"], plan["peak_bytes"], "{flags}");
        for row in &rows {
            assert_eq!(row["result"], "ok", "{row}");
            assert_eq!(row["peak_bytes"], row["planned_peak_bytes"], "{row}");
        }
        if !run.is_empty() {
            let losses = Metrics::read(&place, run).losses();
            assert_eq!(rows[0]["loss"].as_f64(), losses.last().copied(), "{flags}");
        }
    }
    let steps = bench(
        &place,
        "--json --init-from model --data tokens --seq 16 --steps 1",
    );
    let report: Value = serde_json::from_str(&steps.succeeds().stdout).unwrap();
    assert_eq!(report["steps"], 1);
}

/// What needs more than the device holds is `oom`, and automatic recompute fills the device.
#[test]
fn a_device_holds_what_its_memory_says() {
    let place = place();
    let matrix = MATRIX.replace("'full']", "'full', 'auto']");
    place.file("matrix.toml", matrix);
    let reserved = |row: &Value| row["planned_reserved_bytes"].as_u64().unwrap();
    let planned = rows(&bench(&place, "--json --plan-only").succeeds());
    assert_eq!(planned[3]["result"], "ok", "this machine's memory is known");
    let elsewhere = "bench --matrix matrix.toml --json --plan-only --device cuda";
    let elsewhere = rows(&place.trainer(elsewhere).succeeds());
    assert_eq!(elsewhere[3]["result"], "skipped");
    let reason = elsewhere[3]["reason"].as_str().unwrap();
    assert!(reason.contains("--device-memory"), "{reason}");
    let holds = reserved(&planned[1]);
    assert!(reserved(&planned[0]) > holds && holds > reserved(&planned[2]));
    for more in ["--plan-only", "--rounds 1"] {
        let flags = format!("--json --device-memory {holds} {more}");
        let rows = rows(&bench(&place, &flags).succeeds());
        let results: Vec<&Value> = rows.iter().map(|row| &row["result"]).collect();
        assert_eq!(results[..4], ["oom", "ok", "ok", "ok"], "{more}");
        let reason = rows[0]["reason"].as_str().unwrap();
        assert!(reason.contains("more than --device-memory"), "{reason}");
        assert!(reserved(&rows[3]) <= holds && reserved(&rows[3]) > reserved(&rows[2]));
    }
    // Nothing fits so little; shares are of the device; and a device that is there is filled.
    let least = reserved(&planned[2]) / 2;
    let small = rows(
        &bench(
            &place,
            &format!("--json --plan-only --device-memory {least}"),
        )
        .succeeds(),
    );
    assert!(
        small[..4].iter().all(|row| row["result"] == "oom"),
        "{small:?}"
    );
    let share = bench(&place, "--plan-only --memory-limit 50%");
    share.fails(2, &["--memory-limit", "--device-memory SIZE|NAME"]);
    let double = 2 * planned[1]["planned_peak_bytes"].as_u64().unwrap();
    let share = format!("--json --plan-only --memory-limit 50% --device-memory {double}");
    let limited = rows(&bench(&place, &share).succeeds());
    assert_eq!(
        [&limited[0]["result"], &limited[1]["result"]],
        ["oom", "ok"]
    );
    place.file(
        "matrix.toml",
        "config = 'small.toml'\nwarmup = 0\nsteps = 1\nrounds = 1\n[matrix]\nrecompute = ['auto', 'none']\n",
    );
    let there = rows(&bench(&place, "--json").succeeds());
    assert_eq!([&there[0]["result"], &there[1]["result"]], ["ok", "ok"]);
    assert_eq!(there[0]["peak_bytes"], there[1]["peak_bytes"]);
}

/// A limit holds for all stages of a pipeline, whichever rank is planned.
#[test]
fn a_stage_that_needs_more_counts() {
    let place = place();
    place.file(
        "matrix.toml",
        "config = 'small.toml'\n[matrix]\nrecompute = ['none']\n",
    );
    let stages = [0, 1].map(|rank| {
        let flags = format!("--config small.toml --device cpu --ranks 2 --pp 2 --rank {rank}");
        let plan = place.trainer(&format!("plan --json {flags}")).succeeds();
        let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
        (plan["peak_bytes"].as_u64().unwrap(), rank)
    });
    let (least, small) = stages.into_iter().min().unwrap();
    let (most, _) = stages.into_iter().max().unwrap();
    assert!(least < most);
    for (limit, result) in [(most, "ok"), (least, "oom")] {
        let flags =
            format!("--json --plan-only --ranks 2 --pp 2 --rank {small} --memory-limit {limit}");
        let rows = rows(&bench(&place, &flags).succeeds());
        assert_eq!(rows[0]["planned_peak_bytes"], least);
        assert_eq!(rows[0]["result"], result);
    }
}

/// A step on paper has the copies that computing does not hide.
#[test]
fn what_fits_and_how_long_it_takes_stand_on_paper() {
    let place = place();
    let matrix = MATRIX.replace("[matrix]", "paper = true\n[matrix]");
    place.file("matrix.toml", matrix);
    let plan = "bench --matrix matrix.toml --device cuda --plan-only";
    let rows = rows(&place.trainer(&format!("{plan} --json")).succeeds());
    let ms = |row: &Value, name: &str| row["paper"][name].as_f64().unwrap();
    let (kept, on_host) = (&rows[0], &rows[3]);
    assert_eq!(ms(kept, "step_ms"), ms(kept, "compute_ms"), "{kept}");
    assert!(
        ms(on_host, "step_ms") > ms(on_host, "compute_ms"),
        "{on_host}"
    );
    let head = "| strategy | result | planned peak | saved | computes, on paper | step, on paper | cost a GiB | H100 | H200 |";
    let table = place
        .trainer(&format!("{plan} --markdown"))
        .succeeds()
        .stdout;
    assert!(table.starts_with(head), "{table}");
}
