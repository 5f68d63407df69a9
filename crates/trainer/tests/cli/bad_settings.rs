//! Keys, presets, labels, flags and configuration files that cannot be followed: exit code 2, and what to write.

use crate::workplace::Workplace;

#[track_caller]
fn refused(arguments: &str, words: &[&str]) {
    Workplace::new().trainer(arguments).fails(2, words);
}

/// `mine.toml` has `contents`.
#[track_caller]
fn file_refused(contents: impl AsRef<[u8]>, words: &[&str]) {
    let place = Workplace::new();
    place.file("mine.toml", contents);
    place.trainer("--config mine.toml").fails(2, words);
    place.trainer("plan --config mine.toml").fails(2, words);
}

#[test]
fn an_unknown_key_names_the_nearest() {
    for (key, nearest) in [
        ("model.hiden", "model.hidden"),
        ("steps", "train.steps"),
        ("optim.seed", "train.seed"),
        ("batch.microbatch", "batch.micro"),
        ("optim.lr", "lr.peak"),
        ("micro_batch", "batch.micro"),
    ] {
        let unknown = format!("unknown key `{key}` in --set {key}=3");
        let question = format!("did you mean `{nearest}`?");
        let (section, _) = nearest.split_once('.').unwrap();
        let has = format!("hint: [{section}] has ");
        let words = [&unknown[..], &question, &has, "reference.toml"];
        refused(&format!("--set {key}=3"), &words);
    }
    file_refused(
        "[train]\nstep = 3",
        &[
            "unknown key `train.step` in mine.toml",
            "did you mean `train.steps`?",
        ],
    );
}

/// Whoever has the binary alone finds the way from here.
#[test]
fn a_name_that_is_like_no_other_is_not_guessed_at() {
    for (arguments, words) in [
        (
            "--set nonsense=1",
            "hint: the sections are model, data, batch, ",
        ),
        (
            "--set memory.unheard_of_thing=1",
            "hint: [memory] has limit, budget, force, head_chunk, expert_unit, tile_tokens; ",
        ),
        ("--config nonsense", "hint: the presets are tiny, "),
    ] {
        let outcome = Workplace::new().trainer(arguments).fails(2, &[words]);
        assert!(!outcome.stderr.contains("did you mean"), "{outcome:?}");
    }
}

#[test]
fn an_unknown_preset_names_the_nearest() {
    refused(
        "--config tinny",
        &["`tinny`", "did you mean `tiny`?", "llama-15m", "qwen3-8b"],
    );
    refused(
        "plan --config llama-8b",
        &["`llama-8b`", "did you mean `llama-3-8b`?"],
    );
}

#[test]
fn configuration_files_that_cannot_be_read() {
    let hint = "hint: --config takes a TOML file or a preset";
    refused(
        "--config nowhere.toml",
        &["cannot read", "nowhere.toml", "No such file", hint],
    );
    file_refused(
        b"[train]\nsteps = 3 # \xff",
        &["cannot read", "mine.toml", "UTF-8"],
    );
    file_refused(
        "[train]\nsteps = = 3",
        &["mine.toml is not a valid configuration", "line 2"],
    );
    file_refused(
        "[model]\nhidden = 32",
        &["`model.layers` is missing in mine.toml"],
    );
    file_refused(
        "[model]\nhidden = 32\nlayers = 1\nheads = 3\nffn = 8\nvocab = 9",
        &["head_dim", "multiple"],
    );
    file_refused("train = 3", &["`train` is 3 in mine.toml", "section"]);
    let place = Workplace::new();
    place.folder("settings");
    place
        .trainer("--config settings")
        .fails(2, &["cannot read", "settings", "directory", hint]);
}

#[test]
fn values_of_another_kind() {
    refused(
        "--set train.steps",
        &["sets nothing", "--set section.key=value"],
    );
    refused(
        "--set train.steps=many",
        &["\"many\"", "--set train.steps=many", "whole number"],
    );
    refused("--set model.tie_embeddings=1", &["true or false"]);
    refused("--set lr.schedule=cos", &["constant, linear, cosine, wsd"]);
    refused("--dtype f64", &["\"f64\"", "--dtype f64", "f32, bf16"]);
    refused("--device gpu", &["\"gpu\"", "cpu, cuda or cuda:N"]);
    refused("--attention fast", &["\"fast\"", "auto, eager"]);
    refused("--memory-limit lots", &["\"lots\"", "24GiB"]);
    refused("--memory-limit 101%", &["at most 100%"]);
}

#[test]
fn fp16_is_refused_with_the_reason() {
    for settings in ["--dtype fp16", "--dtype float16", "--set train.dtype=fp16"] {
        refused(
            settings,
            &["fp16", "bf16 has f32's range", "use bf16 or f32"],
        );
    }
}

#[test]
fn recompute_labels_that_cannot_be_followed() {
    for command in ["train", "plan"] {
        let refused = |spec: &str, words: &[&str]| {
            refused(&format!("{command} --recompute {spec}"), words);
        };
        refused("core_atn", &["`core_atn`", "did you mean `core_attn`?"]);
        refused(
            "everything",
            &["`everything`", "full:block:N, or a comma list"],
        );
        refused("mlp,full", &["`full` stands alone"]);
        refused("none,mlp", &["`none` stands alone"]);
        refused("mlp,mlp", &["`mlp` is given twice"]);
        refused("mlp,", &["empty"]);
        refused("moe", &["`moe`", "does not have"]);
        refused("full:uniform:0", &["from 1 to 4"]);
        refused("full:sideways:2", &["no form of full"]);
    }
}

#[test]
fn settings_that_contradict() {
    refused(
        "--recompute mlp --recompute-granularity selective",
        &["`--recompute mlp`", "contradict", "keep one"],
    );
    refused(
        "--recompute-granularity full --recompute-modules mlp",
        &["--recompute-modules", "selective"],
    );
    refused(
        "--config small.toml --recompute full:uniform:9",
        &["full:uniform:9", "from 1 to 2"],
    );
    refused(
        "--config small.toml --set lr.decay_steps=3",
        &["lr.decay_steps", "schedule is constant"],
    );
    refused("--set data.format=u16", &["data.format", "u16", "--data"]);
    refused(
        "--config small.toml --set model.kv_heads=3",
        &["model.heads = 2", "multiple of model.kv_heads = 3"],
    );
    refused(
        "--config small.toml --set model.head_dim=15",
        &["is 15, which is odd", "even"],
    );
    refused(
        "--dump-gradients 9 --steps 5",
        &["--dump-gradients 9", "5 steps"],
    );
    let place = Workplace::new();
    place.file(
        "rows.safetensors",
        crate::batches::batch_file(&[1; 32], &[2; 32], 8),
    );
    place
        .trainer("--config small.toml --data rows.safetensors --seq 16")
        .fails(2, &["rows of 8 tokens", "data.seq=16"]);
}

#[test]
fn arguments_that_are_not_known() {
    refused("--frobnicate", &["'--frobnicate'", "Usage"]);
    refused("--stpes 3", &["'--stpes'", "'--steps'"]);
    refused("trian", &["'trian'", "'train'"]);
    refused("train extra", &["'extra'"]);
    refused("--steps", &["'--steps <N>'", "value is required"]);
    refused("--out a --out b", &["'--out <DIR>'", "multiple times"]);
    refused("init", &["--out <DIR>", "required"]);
    refused("--json", &["'--json'"]);
}

/// Whether a GPU would run them is known once it is asked; the processor runs none.
#[test]
fn kernels_that_the_device_does_not_run() {
    for (command, key) in [
        ("", "experts.kernels"),
        ("plan ", "experts.kernels"),
        ("", "attention.kernels"),
        ("plan ", "attention.kernels"),
    ] {
        let kernels = format!("{key} is sm90, which GPUs of compute capability 9.0 run");
        let run = format!("{command}--config tiny-moe --set {key}=sm90 --device cpu");
        refused(&run, &[&kernels, "on the processor", "leave it at auto"]);
    }
}
