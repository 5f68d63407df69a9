//! The reference pages, and the picture of the README: they name every field that is written and no other, and show what the
//! program says and draws.

use crate::metrics::Metrics;
use crate::workplace::{SMALL, Workplace};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

const RUN_DIRECTORY: &str = include_str!("../../../../docs/reference/run-directory.md");
const EXIT_CODES: &str = include_str!("../../../../docs/reference/exit-codes.md");
const HARDWARE: &str = include_str!("../../../../docs/reference/hardware.md");
/// Pages with pictures.
const PICTURED: [&str; 4] = [
    include_str!("../../../../README.md"),
    include_str!("../../../../docs/guides/guard-your-peak.md"),
    include_str!("../../../../docs/guides/offload.md"),
    include_str!("../../../../docs/guides/recompute.md"),
];

/// Fields whose own keys are the names of stages, of GPUs, and ranges of layers.
const BY_NAME: [&str; 3] = ["replayed", "fits", "layers"];

/// Fields of steps that programs make, and no command: tests of the wheel and of `steps` make them.
const OF_PROGRAMS: [&str; 2] = ["policy_kl", "policy_clip_share"];

/// Fields that only a run on a GPU has.
const OF_A_GPU: [&str; 5] = [
    "algorithms",
    "device_reserved_high_bytes",
    "device_total_used_bytes",
    "device_used_high_bytes",
    "driver_allocations",
];

/// Collects the names of all fields, at any depth.
fn collect(value: &Value, names: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                names.insert(name.clone());
                if !BY_NAME.contains(&name.as_str()) {
                    collect(field, names);
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, names)),
        _ => {}
    }
}

/// What the first columns of the page's tables name: fields, and kinds of records.
fn listed(page: &str) -> impl Iterator<Item = &str> {
    let cells = page.lines().filter_map(|line| line.strip_prefix("| "));
    let cells = cells.filter_map(|line| line.split(" | ").next());
    let quoted = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    quoted.filter(|name| {
        name.bytes()
            .all(|byte| byte == b'_' || byte.is_ascii_lowercase() || byte.is_ascii_digit())
    })
}

/// The names of all fields, and kinds of records, that runs and plans of all kinds write.
fn written() -> BTreeSet<String> {
    let place = Workplace::new();
    place.file("text.txt", "Some words to train on. ".repeat(200));
    let small = "--config small.toml --device cpu --quiet";
    let between = "--eval-data text.txt --eval-every 2 --sample-every 2 --save-every 2";
    let run = format!("{small} --data text.txt {between} --zero 1 --optimizer muon --out run");
    place.trainer(&run).succeeds();
    let resumed = "--resume run/checkpoints/step-2 --out resumed --quiet";
    place.trainer(resumed).succeeds();
    let mixture = "--config tiny-moe --steps 1 --seq 16 --micro-batch 1 --out mixture --quiet";
    place.trainer(mixture).succeeds();
    let in_fp8 = "--config tiny --dtype bf16 --fp8 tensor --steps 1 --seq 16 --micro-batch 1 --out in-fp8 --quiet";
    place.trainer(in_fp8).succeeds();
    let pair = r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#;
    place.file("pairs.jsonl", pair);
    let prepare = "prepare pairs.jsonl --tokenizer bytes --out pairs";
    place.trainer(prepare).succeeds();
    let dpo = "--objective dpo --packing pad --lora 2 --data pairs --steps 1";
    place
        .trainer(&format!("{small} {dpo} --out preferring"))
        .succeeds();
    let short = format!("{small} --memory-limit 400KiB --out short");
    place.trainer(&short).fails(3, &["oom.json"]);

    let mut names = BTreeSet::new();
    let folders = [
        "run",
        "run/ranks/0",
        "resumed",
        "mixture",
        "in-fp8",
        "preferring",
    ];
    for folder in folders {
        for record in Metrics::read(&place, folder).0 {
            names.insert(record["kind"].as_str().unwrap().to_owned());
            collect(&record, &mut names);
        }
    }
    let plans = [
        "--offload-optimizer pinned --device-memory 640.5MiB",
        "--ranks 2 --zero 1 --set train.freeze=[\"*norm*\"]",
        "--pareto --largest micro-batch --device-memory h100",
        "--ranks 4 --layout auto --device-memory h100 --beside 1GiB",
        "--ranks 4 --layout auto --device-memory 3GiB",
        "--ranks 4 --pp 2 --set model.tie_embeddings=false",
        "--from args.json",
    ];
    place.file(
        "args.json",
        r#"{"per_device_train_batch_size": 2, "max_length": 32}"#,
    );
    let plans = plans.map(|flags| {
        let plan = format!("plan --json --config small.toml --device cuda {flags}");
        let outcome = place.trainer(&plan);
        // A plan that does not fit is printed all the same.
        assert!(matches!(outcome.code, Some(0 | 3)), "{outcome:?}");
        outcome.stdout
    });
    let files =
        ["run/plan.json", "mixture/plan.json", "short/oom.json"].map(|file| place.text(file));
    for text in plans.iter().chain(&files) {
        collect(&serde_json::from_str(text).unwrap(), &mut names);
    }
    names
}

#[test]
fn every_field_is_named_and_no_other() {
    let written = written();
    let is_missing = |name: &&String| !RUN_DIRECTORY.contains(&format!("`{name}`"));
    let missing: Vec<&String> = written.iter().filter(is_missing).collect();
    assert!(missing.is_empty(), "the page does not name {missing:?}");
    let elsewhere = |name: &str| OF_A_GPU.contains(&name) || OF_PROGRAMS.contains(&name);
    let is_gone = |name: &&str| !written.contains(*name) && !elsewhere(name);
    let gone: Vec<&str> = listed(RUN_DIRECTORY).filter(is_gone).collect();
    assert!(gone.is_empty(), "nothing writes {gone:?}");
}

/// The examples of the page, up to where they are cut short.
#[test]
fn exit_codes_are_shown_with_what_the_program_says() {
    let cases = [
        (2, "--set model.hiden=64"),
        (3, "--device cpu --memory-limit 27MiB"),
        (4, "--data nowhere.bin"),
    ];
    let examples = EXIT_CODES
        .lines()
        .filter(|line| line.starts_with("error: "));
    for (code, flags) in cases {
        let outcome = Workplace::new()
            .trainer(&format!("{flags} --out run"))
            .fails(code, &[]);
        let shown = |example: &str| outcome.stderr.contains(example.trim_end_matches(" ..."));
        assert!(examples.clone().any(shown), "{flags}: {}", outcome.stderr);
    }
}

/// The rates of a GPU, and the memory of every GPU that is known.
#[test]
fn hardware_is_what_plans_assume() {
    let place = Workplace::new();
    let plan = "plan --json --config small.toml --device cuda --ranks 2 --zero 1 --offload-optimizer states";
    let plan: Value = serde_json::from_str(&place.trainer(plan).succeeds().stdout).unwrap();
    let (offload, link) = (&plan["offload"], &plan["stages"][1]["time"]["link_gbps"]);
    let products = offload["assumed_tflops"].as_f64().unwrap();
    let rates = [
        ("peak_tflops", format!("0.7 of {:.0}", products / 0.7)),
        ("h2d_gbps", offload["h2d_gbps"].to_string()),
        ("d2h_gbps", offload["d2h_gbps"].to_string()),
        ("both_ways_gbps", offload["both_ways_gbps"].to_string()),
        ("disk_gbps", offload["disk_gbps"].to_string()),
        ("link_gbps", link.to_string()),
    ];
    for (key, rate) in rates {
        let row = format!("| `hardware.{key}` | {}", rate.trim_end_matches(".0"));
        assert!(HARDWARE.contains(&row), "{row}");
    }
    for (row, heads) in [("33 to 64", 64), ("65 to 128", 128)] {
        let estimates = [512, 4096, 8192].map(|seq| {
            let set = format!("--device cuda --set model.head_dim={heads} --seq {seq}");
            let plan = place.trainer(&format!("plan --config small.toml {set}"));
            let text = plan.succeeds().stdout;
            let (_, rates) = text.split_once("attention forward at ").unwrap();
            let (rates, _) = rates.split_once(" TFLOP/s").unwrap();
            rates.replace(" and backward at", ",")
        });
        let row = format!(
            "| attention, heads of {row} | {} |\n",
            estimates.join(" | ")
        );
        assert!(HARDWARE.contains(&row), "{row}");
    }
    for name in plan["fits"].as_object().unwrap().keys() {
        let mib = planner::gpu_memory_bytes(name).unwrap() >> 20;
        let row = format!("| {name} | {mib} |");
        assert!(HARDWARE.contains(&row), "{row}");
    }
}

/// A page that has a picture has its command too: `--trace NAME` or `--plot NAME.svg`. Traces may also be what a later command
/// draws. `report.png` is a browser's: `scripts/check-pages` compares it.
#[test]
fn pictures_are_those_of_their_commands() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
    let (place, mut drawn) = (Workplace::new(), vec!["report.png".to_string()]);
    place.file("my-run.toml", SMALL);
    let pages = PICTURED.map(|page| page.replace("\\\n", " "));
    let lines = pages.iter().flat_map(|page| page.lines());
    for command in lines.filter_map(|line| line.strip_prefix("$ trainer ")) {
        let mut drawing = [(" --trace ", "/timeline.svg"), (" --plot ", "")].into_iter();
        let drawing = drawing.find_map(|(flag, file)| Some((command.split_once(flag)?.1, file)));
        let Some((name, file)) = drawing else {
            continue;
        };
        let outcome = place.trainer(command);
        let (kind, _) = command.split_once(' ').unwrap();
        match kind {
            "plan" => outcome.succeeds(),
            _ => outcome.prints_and_fails(1, &["the peak grew"]),
        };
        let picture = format!("{}.svg", name.trim_end_matches(".svg"));
        let link = format!("pictures/{picture})");
        if file.starts_with('/') && !pages.iter().any(|page| page.contains(&link)) {
            continue;
        }
        let text = place.text(&format!("{name}{file}"));
        let is_plan = kind == "check" || text.contains("on paper");
        assert!(is_plan, "{picture} is no plan's");
        let committed = folder.join(&picture);
        if std::env::var_os("BLESS_PICTURES").is_some() {
            std::fs::write(&committed, &text).unwrap();
        }
        let shown = std::fs::read_to_string(&committed).unwrap();
        assert!(
            shown == text,
            "docs/pictures/{picture} is another: BLESS_PICTURES=1 draws it anew"
        );
        drawn.push(picture);
    }
    drawn.sort();
    let mut files: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(drawn, files);
    for file in files {
        let link = format!("pictures/{file})");
        assert!(pages.iter().any(|page| page.contains(&link)), "{link}");
    }
}
