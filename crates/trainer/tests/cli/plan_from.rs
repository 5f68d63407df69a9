//! `plan --from`: configurations as other trainers publish them are planned as runs of this one, and no key is lost.

use crate::workplace::Workplace;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;

type Case = (&'static [&'static str], &'static str, &'static str);

/// Configurations, what the command line adds, and flags that say the same.
const CASES: [Case; 14] = [
    (
        &["axolotl-fft-8b.yaml"],
        "",
        "--config llama-3-8b --seq 8192 --micro-batch 1 --accum 8 --epochs 1 --state-dtype 8bit --offload-optimizer pinned \
         --schedule cosine --lr 2e-5 --dtype bf16 --recompute full --attention flash --warmup 100 --weight-decay 0 --set \
         optim.beta2=0.999 --set log.every=1",
    ),
    (
        &["axolotl-lora-1b.yml"],
        "",
        "--config llama-3.2-1b --seq 2048 --micro-batch 2 --accum 2 --epochs 1 --state-dtype 8bit --schedule cosine --lr 2e-4 \
         --dtype bf16 --recompute full --attention flash --warmup 10 --weight-decay 0 --set optim.beta2=0.999 --set log.every=1 \
         --lora 16 --set lora.alpha=32 --set lora.dropout=0.05 --set \
         lora.targets=[\"gate_proj\",\"down_proj\",\"up_proj\",\"q_proj\",\"v_proj\",\"k_proj\",\"o_proj\"]",
    ),
    (
        &["llama-factory-full-sft.yaml", "deepspeed-z3-offload.json"],
        "--ranks 8",
        "--ranks 8 --config llama-3-8b --seq 2048 --micro-batch 1 --accum 2 --epochs 3 --schedule cosine --lr 1e-5 --dtype bf16 \
         --recompute full --zero 3 --offload-optimizer pinned --offload-parameters pinned --overlap-grad-reduce=false \
         --weight-decay 0 --set optim.beta2=0.999 --save-every 500 --set log.every=10",
    ),
    (
        &["megatron-llama3-8b.txt"],
        "--set model.norm=rms --steps 1000 --attention flash",
        "--ranks 8 --set model.norm=rms --steps 1000 --attention flash --set model.layers=32 --set model.hidden=4096 --set \
         model.ffn=14336 --set model.heads=32 --set model.kv_heads=8 --set model.head_dim=128 --set model.vocab=128256 --seq 8192 \
         --set model.rope_theta=1e6 --set model.init_std=0.0134 --set model.tie_embeddings=false --micro-batch 1 --accum 16 --lr 1.5e-4 \
         --schedule cosine --set lr.min_ratio=0.066667 --clip 1 --weight-decay 0.1 --set optim.beta2=0.95 --dtype bf16 --grad-dtype bf16 \
         --zero 1 --save-every 1000 --set log.every=1 --set collectives.timeout_s=3600 --fp8 tensor",
    ),
    (
        &["megatron-bridge-llama3-8b.yaml"],
        "--config llama-3-8b --seq 4096 --ranks 8",
        "--config llama-3-8b --seq 4096 --ranks 8 --pp 2 --steps 500000 --micro-batch 4 --accum 16 --lr 2.5e-4 --set lr.min_ratio=0.1 \
         --warmup 1000 --save-every 1000 --set log.every=5 --seed 42 --grad-dtype f32",
    ),
    (
        &["transformers-smollm-sft.yaml", "smollm-360m/config.json"],
        "",
        "--init-from FIXTURES/smollm-360m --seq 2048 --micro-batch 4 --accum 4 --epochs 1 --lr 1e-3 --schedule cosine --dtype bf16 \
         --recompute full --attention flash --seed 42 --set log.every=5 --weight-decay 0 --set optim.beta2=0.999",
    ),
    (&["smollm-360m"], "", "--init-from FIXTURES/smollm-360m"),
    (
        &["smollm-360m"],
        "--seq 512 --micro-batch 2 --largest micro-batch --device-memory h100",
        "--init-from FIXTURES/smollm-360m --seq 512 --micro-batch 2 --largest micro-batch --device-memory h100",
    ),
    (
        &["deepspeed-z3-offload.json"],
        "--config llama-3.2-1b --seq 512 --micro-batch 2 --ranks 2 --overlap-grad-reduce",
        "--config llama-3.2-1b --seq 512 --micro-batch 2 --accum 1 --ranks 2 --zero 3 --offload-optimizer pinned \
         --offload-parameters pinned",
    ),
    (
        &["trl-sft-1b.yaml", "accelerate-zero3-offload.yaml"],
        "",
        "--ranks 4 --config llama-3.2-1b --seq 2048 --micro-batch 2 --accum 2 --epochs 1 --lr 2e-5 --schedule cosine --set \
         lr.min_ratio=0.2 --dtype bf16 --recompute full --zero 3 --offload-optimizer pinned --weight-decay 0 --set optim.beta2=0.999",
    ),
    (
        &["trl-sft-1b.yaml", "accelerate-fsdp2.yaml"],
        "--steps 70",
        "--ranks 16 --config llama-3.2-1b --seq 2048 --micro-batch 2 --accum 1 --steps 70 --lr 2e-5 --schedule cosine --set \
         lr.min_ratio=0.2 --warmup 7 --save-every 18 --dtype bf16 --recompute full --zero 3 --reshard-after-forward=false \
         --weight-decay 0 --set optim.beta2=0.999",
    ),
    (
        &["axolotl-shares.yaml"],
        "--ranks 2",
        "--ranks 2 --config llama-3.2-1b --seq 512 --micro-batch 2 --accum 1 --steps 200 --warmup 10 --save-every 50 --set log.every=1 \
         --lr 2e-4 --optimizer adafactor --lora 8 --set lora.alpha=16 --set lora.targets=[\"all-linear\"] --zero 3 --dtype bf16 \
         --weight-decay 0",
    ),
    (
        &["llama-factory-v1-qlora.yaml"],
        "",
        "--config llama-3.2-1b --seq 1024 --micro-batch 1 --accum 1 --steps 1000 --lr 1e-4 --schedule linear --dtype bf16 --recompute full --lora 8 --set \
         lora.alpha=16 --set lora.dropout=0.05 --base-dtype nf4 --weight-decay 0 --set optim.beta2=0.999",
    ),
    (
        &["deepspeed-bf16-states.json"],
        "--config llama-3-8b --seq 2048 --ranks 4",
        "--ranks 4 --config llama-3-8b --seq 2048 --micro-batch 1 --accum 1 --zero 1 --bucket-size 1000000000 --dtype bf16 --master none \
         --grad-dtype bf16 --state-dtype bf16 --lr 1e-4 --set optim.eps=1e-6 --weight-decay 0.01 --schedule cosine --warmup 20 \
         --set lr.decay_steps=1000",
    ),
];

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/foreign")
}

fn from(files: &[&str]) -> String {
    let flags = files
        .iter()
        .map(|file| format!("--from {}", fixtures().join(file).display()));
    flags.collect::<Vec<_>>().join(" ")
}

/// What `plan` prints, after it succeeded without a warning.
fn printed(place: &Workplace, flags: &str) -> String {
    let flags = flags.replace("FIXTURES", &fixtures().display().to_string());
    let outcome = place.trainer(&format!("plan {flags}")).succeeds();
    assert_eq!(outcome.stderr, "", "{flags}");
    outcome.stdout
}

/// The rows of all keys.
fn keys(place: &Workplace, flags: &str) -> Vec<Value> {
    let plan: Value = serde_json::from_str(&printed(place, &format!("--json {flags}"))).unwrap();
    plan["from"]["keys"].as_array().unwrap().clone()
}

#[test]
fn a_foreign_configuration_is_planned_as_the_same_flags_are() {
    let place = Workplace::new();
    for (files, more, ours) in CASES {
        let foreign = format!("{} {more}", from(files));
        let (text, of_ours) = (printed(&place, &foreign), printed(&place, ours));
        assert!(text.starts_with(&of_ours), "{files:?}:\n{text}\n{of_ours}");
        let json = |flags: &str| printed(&place, &format!("--json {flags}"));
        let (text, of_ours) = (json(&foreign), json(ours));
        let fields = of_ours.strip_suffix("\n}\n").unwrap();
        assert!(text.starts_with(fields), "{files:?}");
        assert_ne!(
            json(&format!(
                "{ours} --set model.dropout=0 --set memory.head_chunk=100"
            )),
            of_ours
        );
        // The command that it prints is planned the same.
        let plan: Value = serde_json::from_str(&text).unwrap();
        let command = plan["from"]["command"].as_str().unwrap();
        let command = command
            .replace("trainer train ", "--json ")
            .replace("mpirun -n", "--ranks");
        let words: Vec<String> = format!("plan {command}")
            .split(' ')
            .map(|word| word.trim_matches('\'').into())
            .collect();
        let again: Value =
            serde_json::from_str(&place.trainer_words(&words).succeeds().stdout).unwrap();
        assert_eq!(again["peak_bytes"], plan["peak_bytes"], "{command}");
    }
}

/// Every key of all files, with what becomes of it, as `keys.txt` has it.
#[test]
fn the_table_of_all_keys_is_as_it_was() {
    let place = Workplace::new();
    let mut table = String::new();
    for (files, more, _) in CASES {
        table += &format!("{}\n", [files, &[more][..]].concat().join(" "));
        for row in keys(&place, &format!("{} {more}", from(files))) {
            let text = |name: &str| row[name].as_str().unwrap().to_owned();
            let here: Vec<&str> = row["here"]
                .as_array()
                .unwrap()
                .iter()
                .flat_map(Value::as_str)
                .collect();
            let by_itself = ["", " (by itself)"][usize::from(row["file"].is_null())];
            let what = match here.is_empty() {
                true => text("remark"),
                false => here.join(" "),
            };
            let [key, value, outcome] = ["key", "value", "outcome"].map(text);
            table += &format!("  {key}{by_itself} = {value} | {outcome} | {what}\n");
        }
    }
    let path = fixtures().join("keys.txt");
    let table = table.replace(&fixtures().display().to_string(), "FIXTURES");
    if std::env::var_os("BLESS_FOREIGN").is_some() {
        std::fs::write(&path, &table).unwrap();
    }
    assert!(std::fs::read_to_string(path).unwrap() == table, "{table}");
}

/// The names of what is no section, below a value.
fn leaves(name: &str, value: &Value, into: &mut BTreeSet<String>) {
    match value.as_object() {
        Some(section) => section
            .iter()
            .for_each(|(key, value)| leaves(&format!("{name}.{key}"), value, into)),
        None => {
            into.insert(name.trim_start_matches('.').into());
        }
    }
}

#[test]
fn every_key_is_listed_with_what_became_of_it() {
    let place = Workplace::new();
    let flags = "--config llama-3.2-1b --seq 512 --micro-batch 2 --ranks 2";
    let text = std::fs::read_to_string(fixtures().join("deepspeed-z3-offload.json")).unwrap();
    let mut expected = BTreeSet::new();
    leaves("", &serde_json::from_str(&text).unwrap(), &mut expected);
    assert_eq!(expected.len(), 30);
    let rows = keys(
        &place,
        &format!("{flags} {}", from(&["deepspeed-z3-offload.json"])),
    );
    let of_file = rows.iter().filter(|row| !row["file"].is_null());
    let listed: BTreeSet<String> = of_file
        .map(|row| row["key"].as_str().unwrap().into())
        .collect();
    assert_eq!(listed, expected);

    place.file("odd.yaml", "base_model: Qwen/Qwen3-8B\nsequence_len: 64\nno_such_key: 7\nfp16: true\nuse_dora: true\nnew:\n  - deep: {er: 1}\n");
    let rows = keys(&place, "--from odd.yaml");
    let became: Vec<[&str; 3]> = rows
        .iter()
        .filter(|row| !row["file"].is_null())
        .map(|row| ["key", "value", "outcome"].map(|name| row[name].as_str().unwrap()))
        .collect();
    let odd = [
        ["base_model", "Qwen/Qwen3-8B", "taken_over"],
        ["sequence_len", "64", "taken_over"],
        ["no_such_key", "7", "unknown"],
        ["fp16", "true", "near"],
        ["use_dora", "true", "not_built"],
        ["new[0].deep.er", "1", "unknown"],
    ];
    assert_eq!(became, odd);
    assert_eq!(rows[3]["here"], serde_json::json!(["train.dtype=bf16"]));
    let assumed: Vec<&Value> = rows
        .iter()
        .filter(|row| row["file"].is_null())
        .map(|row| &row["key"])
        .collect();
    assert!(
        assumed.contains(&&Value::from("micro_batch_size")),
        "{rows:?}"
    );
    let text = printed(&place, "--from odd.yaml");
    for part in [
        "taken over",
        "near, and not the same here",
        "not built",
        "in no table",
        "no_such_key",
        "plain adapters",
        "another figure",
        "logits of a whole",
    ] {
        assert!(text.contains(part), "no {part} in\n{text}");
    }
}

/// Other trainers compute scales in another way. So their FP8 is planned with our scales, and listed as near.
#[test]
fn fp8_of_others_is_planned_with_scales_of_ours() {
    let place = Workplace::new();
    let text = "base_model: Qwen/Qwen3-8B\nsequence_len: 64\nbf16: true\nfp8: e4m3\nfp8_recipe: blockwise\nfp8_enable_fsdp_float8_all_gather: true\nfp8_margin: 0\n";
    place.file("fp8.yaml", text);
    let rows = keys(&place, "--from fp8.yaml");
    let of = |key: &str| rows.iter().find(|row| row["key"] == key).unwrap();
    let sets = serde_json::json!(["fp8.recipe=tensor", "fp8.gradients=e4m3"]);
    assert_eq!(of("fp8")["here"], sets);
    assert_eq!(of("fp8")["outcome"], "near");
    for key in ["fp8_recipe", "fp8_enable_fsdp_float8_all_gather"] {
        assert_eq!(of(key)["outcome"], "not_built", "{key}");
    }
    assert_eq!(of("fp8_margin")["outcome"], "without_meaning");
}

/// Others count pairs in a micro-batch, where here it has both sequences of each.
#[test]
fn a_pair_is_two_sequences() {
    let place = Workplace::new();
    let text = "base_model: Qwen/Qwen3-8B\nsequence_len: 64\nrl: dpo\nmicro_batch_size: 3\nadapter: lora\nlora_r: 8\n";
    place.file("dpo.yaml", text);
    let documents = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/documents");
    let rows = keys(
        &place,
        &format!("--from dpo.yaml --data {}", documents.display()),
    );
    let micro = rows.iter().find(|row| row["key"] == "micro_batch_size");
    assert_eq!(micro.unwrap()["here"], serde_json::json!(["batch.micro=6"]));
}

/// Packing needs documents; a plan without any names the flag.
#[test]
fn packing_is_taken_over_where_there_are_documents() {
    let place = Workplace::new();
    let documents = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/documents");
    let documents = format!("--data {}", documents.display());
    let start = "per_device_train_batch_size: 1\nlearning_rate: 1e-4\nmodel_name_or_path: meta-llama/Llama-3.2-1B\n";
    let axolotl = "base_model: Qwen/Qwen3-8B\nsequence_len: 64\nmicro_batch_size: 1\n";
    for (start, rest, packing) in [
        (axolotl, "sample_packing: true", "first-fit"),
        (axolotl, "sample_packing: false", "pad"),
        (start, "max_length: 64\npacking: true", "first-fit"),
        (start, "max_length: 64\npacking: false", "pad"),
        (start, "cutoff_len: 64\npacking: true", "concatenate"),
        (start, "cutoff_len: 64\nneat_packing: true", "first-fit"),
        (
            start,
            "cutoff_len: 64\npacking: true\nneat_packing: true",
            "first-fit",
        ),
        (
            start,
            "cutoff_len: 64\npacking: false\nneat_packing: true",
            "first-fit",
        ),
    ] {
        place.file("packing.yaml", format!("{start}{rest}\n"));
        let row = |more: &str| {
            let rows = keys(&place, &format!("--from packing.yaml {more}"));
            let is_it = |row: &&Value| row["value"] == "true" || packing == "pad";
            let mut packing = rows
                .iter()
                .filter(|row| row["key"].as_str().unwrap().ends_with("packing"));
            packing.rfind(is_it).unwrap().clone()
        };
        let taken = serde_json::json!([format!("data.packing={packing}")]);
        assert_eq!(row(&documents)["here"], taken, "{rest}");
        let without = row("");
        assert_eq!(without["outcome"], "not_built");
        let remark = without["remark"].as_str().unwrap();
        assert!(
            remark.starts_with(&format!("--packing {packing}")),
            "{remark}"
        );
    }
}

/// A run is as long as its steps say, in whatever order a file has its keys.
#[test]
fn steps_go_before_epochs() {
    let place = Workplace::new();
    place.file(
        "one.json",
        r#"{"per_device_train_batch_size": 1, "max_steps": 70, "num_train_epochs": 3}"#,
    );
    place.file(
        "other.json",
        r#"{"per_device_train_batch_size": 1, "num_train_epochs": 3, "max_steps": 70}"#,
    );
    for (more, steps) in [("", "--steps 70"), ("--steps 90", "--steps 90")] {
        for file in ["one.json", "other.json"] {
            let text = printed(
                &place,
                &format!("--json --from {file} --config tiny --seq 64 {more}"),
            );
            let plan: Value = serde_json::from_str(&text).unwrap();
            let command = plan["from"]["command"].as_str().unwrap();
            assert!(
                command.contains(steps) && !command.contains("--epochs"),
                "{command}"
            );
        }
    }
}

#[test]
fn what_is_missing_is_asked_for_by_name() {
    let place = Workplace::new();
    for (files, flags, words) in [
        (
            &["transformers-smollm-sft.yaml"][..],
            "",
            &["the model", "config.json"][..],
        ),
        (
            &["megatron-bridge-llama3-8b.yaml"],
            "",
            &["the model", "the sequence length (--seq S)", "--ranks N"],
        ),
        (
            &["deepspeed-z3-offload.json"],
            "--config tiny --seq 64",
            &["the micro-batch (--micro-batch B)", "--ranks N"],
        ),
    ] {
        let flags = format!("plan {} {flags}", from(files));
        place.trainer(&flags).fails(2, words);
    }
    place.file(
        "some.txt",
        "--num-layers 2 --hidden-size 64 --micro-batch-size 1",
    );
    place.trainer("plan --from some.txt").fails(
        2,
        &[
            "model.heads (--set model.heads=VALUE)",
            "model.vocab",
            "--seq S",
        ],
    );
}

#[test]
fn broken_files_are_answered_in_a_sentence() {
    let place = Workplace::new();
    let lines = "a: &a [x, x, x, x, x, x, x, x, x]\n".to_owned();
    let aliases = ('b'..'k').fold(lines, |text, name| {
        let before = (name as u8 - 1) as char;
        let many = vec![format!("*{before}"); 9].join(", ");
        format!("{text}{name}: &{name} [{many}]\n")
    });
    for (code, name, text, words) in [
        (4, "a.yaml", "base_model: [1, 2", "as YAML"),
        (4, "b.yaml", "- 1\n- 2\n", "it has no keys"),
        (4, "c.json", "{\"output_dir\": }", "as JSON"),
        (
            4,
            "twice.json",
            "{\"lr\": 1, \"lr\": 2}",
            "as JSON: `lr` is there twice",
        ),
        (
            4,
            "d.toml",
            "[training]\nsteps = 3\n",
            "--config takes a configuration of this trainer",
        ),
        (4, "f.sh", "echo hello", "no trainer that is known"),
        (4, "g.yaml", &aliases, "as YAML"),
        (
            2,
            "h.yaml",
            "base_model: Qwen/Qwen3-8B\nsequence_len: much\n",
            "`sequence_len` of h.yaml",
        ),
        (
            2,
            "i.yaml",
            "base_model: Qwen/Qwen3-8B\nsequence_len: 64\nmax_steps: soon\n",
            "`max_steps` of i.yaml is soon, which is no number",
        ),
        (
            4,
            "j.json",
            "{\"model_type\": \"bloom\", \"hidden_size\": 3}",
            "has to be called config.json",
        ),
        (4, "k.yaml", "\u{0}", "k.yaml"),
    ] {
        place.file(name, text);
        place
            .trainer(&format!("plan --from {name}"))
            .fails(code, &[words]);
    }
    place.folder("bloom");
    place.file(
        "bloom/config.json",
        "{\"model_type\": \"bloom\", \"hidden_size\": 3}",
    );
    place
        .trainer("plan --from bloom --seq 8 --micro-batch 1")
        .fails(4, &["model_type `bloom`"]);
    place.file("l.yaml", [0xff, 0xfe, 0xfa]);
    place
        .trainer("plan --from l.yaml")
        .fails(4, &["it is no text"]);
    place
        .trainer("plan --from absent.yaml")
        .fails(4, &["absent.yaml"]);
    place.file(
        "m.yaml",
        "base_model: Qwen/Qwen3-8B\nsequence_len: 64\nmicro_batch_size: 1\n",
    );
    place.file("ds.json", "{\"train_micro_batch_size_per_gpu\": 2}");
    place.trainer("plan --from m.yaml --from ds.json").fails(
        2,
        &[
            "`micro_batch_size` of m.yaml says batch.micro=1",
            "`train_micro_batch_size_per_gpu` of ds.json",
            "--micro-batch B",
        ],
    );
    place
        .trainer("plan --from m.yaml --from ds.json --micro-batch 4")
        .succeeds();
    place.file(
        "n.json",
        "{\"train_batch_size\": 7, \"train_micro_batch_size_per_gpu\": 2}",
    );
    place
        .trainer("plan --from n.json --config tiny --seq 64 --ranks 2")
        .fails(2, &["asks for 7 sequences"]);
}

/// Ranks that share sequences count once in a step.
#[test]
fn a_global_batch_is_divided_by_groups_of_ranks() {
    let place = Workplace::new();
    let file = r#"{"context-parallel-size": 4, "num-layers": 2, "hidden-size": 64, "num-attention-heads": 4,
        "ffn-hidden-size": 128, "seq-length": 1024, "max-position-embeddings": 4096, "micro-batch-size": 1,
        "global-batch-size": 32, "bf16": true, "padded-vocab-size": 256}"#;
    place.file("args.json", file);
    let plan = place
        .trainer("plan --json --from args.json --ranks 8")
        .succeeds();
    let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
    assert_eq!(plan["context"], 4);
    assert_eq!(plan["tokens_a_step"], 32 * 1024);
}

/// Blocks of a virtual stage are taken over where there are several stages, wherever the number of these stands.
#[test]
fn virtual_stages_of_one_stage_say_nothing() {
    let place = Workplace::new();
    let flags = "--config tiny --ranks 8 --seq 64 --zero 2 --accum 4 --set model.tie_embeddings=false --set model.layers=8";
    let both = [
        "parallel.schedule=interleaved",
        "parallel.virtual_stage_layers=1",
    ];
    for (stages, taken) in [(1, &both[..0]), (4, &both[..])] {
        let file = format!(
            r#"{{"num-layers-per-virtual-pipeline-stage": 1, "pipeline-model-parallel-size": {stages}, "micro-batch-size": 1}}"#
        );
        place.file("args.json", file);
        let rows = keys(&place, &format!("--from args.json {flags}"));
        assert_eq!(rows[0]["here"], serde_json::json!(taken), "{stages}");
    }
}

/// A script is not guessed at: it is refused with the command by which it says its arguments, and these are planned.
#[test]
fn a_script_is_refused_and_its_arguments_are_planned() {
    let place = Workplace::new();
    let script = |program: &str| {
        format!(
            "#!/bin/bash\nset -e\nHEADS=4\nARGS=\" \\\n --num-layers 4 --hidden-size 256 --num-attention-heads $HEADS \\\n \
             --seq-length $((2 * 256)) --max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 16 --vocab-size 8000 \
             --train-iters 50 --lr 2.0e-4 \\\n\"\nif true; then ARGS+=--bf16; fi\ntorchrun --nproc_per_node=8 {program} $ARGS\n"
        )
    };
    let arguments = |program: &str| {
        place.file("it's run.sh", script(program));
        let words = ["plan", "--from", "it's run.sh"].map(String::from);
        let refused = place.trainer_words(&words).fails(
            2,
            &[
                "it's run.sh is a shell script",
                "`set`",
                "--from arguments.txt",
            ],
        );
        let command = refused.stderr.split('`').nth(3).unwrap();
        let mut bash = std::process::Command::new("bash");
        let ran = bash
            .args(["-c", command])
            .current_dir(place.path(""))
            .status();
        assert!(ran.unwrap().success(), "{command}");
    };
    arguments("pretrain_gpt.py");
    let rows = keys(&place, "--from arguments.txt");
    let value = |key: &str| {
        let row = rows.iter().find(|row| row["key"] == key);
        row.unwrap_or_else(|| panic!("{key}"))["value"].clone()
    };
    for (key, expected) in [
        ("nproc_per_node", "8"),
        ("num-layers", "4"),
        ("num-attention-heads", "4"),
        ("seq-length", "512"),
        ("bf16", "true"),
    ] {
        assert_eq!(value(key), expected, "{key}");
    }
    arguments("pretrain_bert.py");
    place
        .trainer("plan --from arguments.txt")
        .fails(2, &["starts pretrain_bert.py", "only pretrain_gpt.py"]);
}
