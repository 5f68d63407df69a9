//! The command line: what it sets, and what wins.

mod hostile;
mod ranks;
mod refused;

use clap::Parser;
use optim::ScheduleKind;
use settings::{AttentionBackend, Config, ConfigError, Device, FloatType, Resolved, Size, Task};
use trainer::cli::Cli;

fn resolve(arguments: &[&str]) -> Result<Resolved, ConfigError> {
    let cli = Cli::try_parse_from([&["trainer"], arguments].concat());
    cli.unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
        .resolve()
}

fn config(arguments: &[&str]) -> Config {
    resolve(arguments).unwrap().config
}

#[track_caller]
fn assert_refused(arguments: &[&str], parts: &[&str]) {
    let message = match resolve(arguments) {
        Ok(_) => panic!("{arguments:?} is accepted"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "{arguments:?}: {message}");
    }
    assert!(!message.contains('\n'), "{message}");
}

/// A file in a folder that lives as long as the returned guard.
fn file(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, text).unwrap();
    (folder, path.to_str().unwrap().to_owned())
}

#[test]
fn without_arguments_tiny_is_trained_on_the_best_device() {
    let run = resolve(&[]).unwrap();
    assert_eq!((run.task, run.name.as_str()), (Task::Train, "tiny"));
    let dtype = match Device::best() {
        Device::Cpu => FloatType::F32,
        Device::Cuda { .. } => FloatType::Bf16,
    };
    assert_eq!((run.device(), run.dtype()), (Device::best(), dtype));
    assert_eq!(run.config.model.vocab, 256);
    assert_eq!(run.config.data.path, None);
    assert!(run.explicit_model_keys.is_empty());
}

#[test]
fn flags_without_a_command_are_those_of_train() {
    let bare = resolve(&["--recompute", "core_attn", "--quiet"]).unwrap();
    assert_eq!(bare.config.recompute.spec, "core_attn");
    assert!(bare.options.quiet);
    assert_eq!(
        resolve(&["train", "--recompute", "core_attn", "--quiet"]).unwrap(),
        bare
    );
}

#[test]
fn later_layers_win() {
    // Defaults, then the preset, then --set, then flags.
    assert_eq!(Config::default().data.seq, 1024);
    assert_eq!(config(&["--config", "llama-15m"]).data.seq, 256);
    assert_eq!(
        config(&["--config", "llama-15m", "--set", "data.seq=64"])
            .data
            .seq,
        64
    );
    assert_eq!(
        config(&["--config", "llama-15m", "--seq", "32"]).data.seq,
        32
    );
    assert_eq!(
        config(&["--set", "data.seq=64", "--set", "data.seq=65"])
            .data
            .seq,
        65
    );
    // What a preset does not say keeps its default.
    assert_eq!(
        config(&["--config", "llama-15m"]).optim,
        Config::default().optim
    );
}

#[test]
fn set_values_are_toml_or_plain_text() {
    let set = |setting: &str| config(&["--set", setting]);
    assert_eq!(set("optim.beta2=0.99").optim.beta2, 0.99);
    assert_eq!(set("lr.peak=1").lr.peak, 1.0);
    assert_eq!(set("lr.peak=.5").lr.peak, 0.5);
    assert_eq!(set("optim.clip_norm=inf").optim.clip_norm, f64::INFINITY);
    assert_eq!(set("lr.schedule=wsd").lr.schedule, ScheduleKind::Wsd);
    assert_eq!(set("lr.schedule=\"wsd\"").lr.schedule, ScheduleKind::Wsd);
    assert_eq!(
        set("recompute.spec=core_attn,mlp").recompute.spec,
        "core_attn,mlp"
    );
    assert_eq!(set("data.path=123").data.path, Some("123".into()));
    assert_eq!(
        set("memory.limit=24GiB").memory.limit,
        Some(Size::Bytes(24 << 30))
    );
    assert_eq!(
        set("memory.limit=1500000").memory.limit,
        Some(Size::Bytes(1_500_000))
    );
    assert!(!set("data.shuffle=false").data.shuffle);
    let scaling = set(
        "model.rope_scaling={factor=8, low_freq_factor=1, high_freq_factor=4, \
         original_max_position=64}",
    );
    assert_eq!(scaling.model.rope_scaling.unwrap().factor(), 8.0);
    let yarn = set("model.rope_scaling={kind=\"yarn\", factor=4, original_max_position=64}");
    let expected = model::RopeScaling::Yarn {
        factor: 4.0,
        original_max_position: 64,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale_all_dim: None,
        truncate: true,
    };
    assert_eq!(yarn.model.rope_scaling, Some(expected));
    let linear = set("model.rope_scaling={kind=\"linear\", factor=2}");
    let expected = model::RopeScaling::Linear { factor: 2.0 };
    assert_eq!(linear.model.rope_scaling, Some(expected));
}

#[test]
fn every_flag_sets_its_key() {
    let arguments = "--data d.bin --no-shuffle --steps 5 --micro-batch 2 --accum 3 --seq 16 --lr 0.5 \
                     --seed 9 --device cpu --dtype bf16 --threads 2 --recompute full --attention \
                     eager --memory-limit 80GB --state-dtype f32 --optimizer adamw --master f32 \
                     --grad-dtype f32 --offload-optimizer none --offload-activations none --out o \
                     --init-from i --save-final s --dump-gradients 5 --quiet";
    let run = resolve(&arguments.split_whitespace().collect::<Vec<_>>()).unwrap();
    let mut expected = config(&["--init-from", "i"]);
    expected.data.path = Some("d.bin".into());
    (expected.data.shuffle, expected.data.seq) = (false, 16);
    (expected.batch.micro, expected.batch.accum) = (2, 3);
    (
        expected.train.steps,
        expected.train.seed,
        expected.train.threads,
    ) = (5, 9, Some(2));
    (expected.train.device, expected.train.dtype) = (Some(Device::Cpu), Some(FloatType::Bf16));
    expected.lr.peak = 0.5;
    expected.recompute.spec = "full".to_owned();
    expected.attention.backend = AttentionBackend::Eager;
    expected.memory.limit = Some(Size::Bytes(80_000_000_000));
    assert_eq!(run.config, expected);
    assert_eq!(run.options.out, Some("o".into()));
    assert_eq!(run.options.init_from, Some("i".into()));
    assert_eq!(run.options.save_final, Some("s".into()));
    assert_eq!(run.options.dump_gradients, Some(5));
}

#[test]
fn cuda_can_be_planned_for_and_trained_on_where_it_was_built_in() {
    for device in ["cuda", "cuda:0", "cuda:1"] {
        let arguments = ["--device", device];
        if cfg!(feature = "cuda") {
            let run = resolve(&arguments).unwrap();
            assert_eq!(
                (run.device().to_string(), run.dtype()),
                (device.replace(":0", ""), FloatType::Bf16)
            );
        } else {
            assert_refused(&arguments, &["built without CUDA", "trainer plan"]);
        }
    }
    let plan = resolve(&["plan", "--config", "llama-3-8b", "--json"]).unwrap();
    assert_eq!(plan.task, Task::Plan);
    assert!(plan.options.json);
    assert_eq!(
        (plan.device(), plan.dtype()),
        (Device::Cuda { index: 0 }, FloatType::Bf16)
    );
    let plan = resolve(&["plan", "--device", "cuda:1", "--dtype", "f32"]).unwrap();
    assert_eq!(
        (plan.device(), plan.dtype()),
        (Device::Cuda { index: 1 }, FloatType::F32)
    );
    let plan = resolve(&["plan", "--config", "llama-15m", "--device", "cpu"]).unwrap();
    assert_eq!((plan.device(), plan.dtype()), (Device::Cpu, FloatType::F32));
}

#[test]
fn init_takes_a_folder_and_a_seed() {
    let init = resolve(&["init", "--out", "m", "--config", "llama-15m", "--seed", "3"]).unwrap();
    assert_eq!((init.task, init.config.train.seed), (Task::Init, 3));
    assert_eq!(init.options.out, Some("m".into()));
    assert_eq!(init.device(), Device::Cpu);
    assert!(Cli::try_parse_from(["trainer", "init"]).is_err());
}

/// What needs experts is checked once the folder's model is known.
#[test]
fn a_folders_model_may_have_experts() {
    for set in ["optim.router_bias_rate=1e-3", "model.router_aux=0.01"] {
        assert_refused(&["--set", set], &["experts"]);
        let run = resolve(&["--init-from", "d", "--set", set]);
        assert!(run.is_ok(), "{set}: {run:?}");
    }
}

#[test]
fn explicit_model_keys_are_those_the_user_set() {
    let keys = |arguments: &[&str]| -> Vec<String> {
        let resolved = resolve(arguments).unwrap();
        resolved.explicit_model_keys.into_iter().collect()
    };
    assert_eq!(keys(&["--init-from", "d", "--seq", "8"]), [""; 0]);
    let set = ["--set", "model.layers=2", "--set", "model.hidden=8"];
    assert_eq!(keys(&set), ["model.hidden", "model.layers"]);
    let (_folder, path) = file("[model]\nvocab = 99\nkv_heads = 3\n");
    let from_file = [
        "--config",
        &path,
        "--init-from",
        "d",
        "--set",
        "model.vocab=98",
    ];
    assert_eq!(keys(&from_file), ["model.kv_heads", "model.vocab"]);
    assert!(keys(&["--config", "llama-3.2-1b"]).contains(&"model.rope_scaling".to_owned()));
    let (_folder, path) = file("[data]\nseq = 8\n");
    assert_eq!(keys(&["--config", &path]), [""; 0]);
}

#[test]
fn a_files_model_is_complete_or_absent() {
    let (_folder, path) = file("[model]\nhidden = 64\nlayers = 2\nheads = 4\nvocab = 256\n");
    assert_refused(&["--config", &path], &["`model.ffn`", "missing", &path]);
    // The missing key may come from the command line; head counts and widths follow.
    let run = resolve(&["--config", &path, "--set", "model.ffn=99"]).unwrap();
    assert_eq!(run.name, "mine");
    let model = run.config.model;
    assert_eq!((model.ffn, model.kv_heads, model.head_dim), (99, 4, 16));
    let odd = [
        "--config",
        &path,
        "--set",
        "model.ffn=9",
        "--set",
        "model.hidden=63",
    ];
    assert_refused(&odd, &["`model.head_dim`", "missing"]);

    let (_folder, path) = file("[data]\nseq = 8\n");
    assert_eq!(config(&["--config", &path]).model, Config::default().model);

    assert_refused(
        &["--set", "model.rope_scaling.factor=8"],
        &["rope_scaling", "missing"],
    );
    let refused = [
        (
            "model.rope_scaling={kind=\"linear\", factor=2, beta_fast=32}",
            "says nothing with kind = \"linear\"",
        ),
        (
            "model.rope_scaling={kind=\"yarn\", factor=2}",
            "`model.rope_scaling.original_max_position` is missing",
        ),
        (
            "model.rope_scaling={kind=\"dynamic\", factor=2}",
            "one of llama3, linear, yarn",
        ),
        (
            "model.full_attention_layers=[0]",
            "they differ from others by model.sliding_window",
        ),
        (
            "model.full_attention_layers=[-1]",
            "a list of whole numbers",
        ),
        ("model.o_bias=true", "no family"),
    ];
    for (set, words) in refused {
        assert_refused(&["--set", set], &[words]);
    }
}

#[test]
fn help_names_presets_and_flags() {
    let help = |arguments: &[&str]| {
        let error = Cli::try_parse_from(arguments).unwrap_err();
        assert_eq!(error.exit_code(), 0);
        error.to_string()
    };
    for text in [
        help(&["trainer", "--help"]),
        help(&["trainer", "train", "--help"]),
    ] {
        assert!(
            text.contains("--recompute <SPEC>") && text.contains("qwen3-8b"),
            "{text}"
        );
        for built in [
            "--state-dtype <f32|bf16|8bit>",
            "--offload-optimizer",
            "auto|eager|flash",
            "--memory-budget <SIZE|auto>",
            "--trace [<DIR>]",
            "--resume <DIR|latest|auto>",
            "--save-every <N>",
        ] {
            assert!(text.contains(built), "{text}");
        }
    }
    let misspelt = Cli::try_parse_from(["trainer", "--sec", "3"]).unwrap_err();
    assert_eq!(misspelt.exit_code(), 2);
}

#[test]
fn the_command_line_is_well_formed() {
    use clap::CommandFactory;
    Cli::command().debug_assert();
}
