//! Every refusal, with the words that make it useful.

use super::{assert_refused, config, file, resolve};
use memory::{Home, Homes};
use settings::{Config, preset};

#[test]
fn unknown_keys_name_the_nearest() {
    let parts = ["unknown key `model.hiden`", "did you mean `model.hidden`?"];
    assert_refused(&["--set", "model.hiden=3"], &parts);
    let (_folder, path) = file("[model]\nhiden = 3\n");
    assert_refused(&["--config", &path], &[&parts[..], &[&path]].concat());
    assert_refused(&["--set", "seq=3"], &["`seq`", "`data.seq`"]);
    assert_refused(
        &["--set", "modle={hidden=3}"],
        &["`modle.hidden`", "`model.hidden`"],
    );
    assert_refused(
        &["--set", "train.seed.x=3"],
        &["`train.seed.x`", "`train.seed`"],
    );
    let (_folder, path) = file("[trian]\nsteps = 3\n");
    assert_refused(&["--config", &path], &["`trian.steps`", "`train.steps`"]);
    let (_folder, path) = file("seed = 3\n");
    assert_refused(&["--config", &path], &["`seed`", "`train.seed`"]);
}

#[test]
fn unknown_presets_name_the_nearest_and_all() {
    assert_refused(
        &["--config", "lama-15m"],
        &["`lama-15m`", "did you mean `llama-15m`?"],
    );
    let hint = resolve(&["--config", "x"]).unwrap_err().hint().unwrap();
    for name in preset::names() {
        assert!(hint.contains(name), "{hint}");
    }
    assert_refused(
        &["--config", "nowhere/x.toml"],
        &["cannot read", "nowhere/x.toml"],
    );
    assert_refused(&["--config", "/"], &["cannot read"]);
}

#[test]
fn unfitting_values_are_refused_with_what_fits() {
    let cases: &[(&[&str], &str)] = &[
        (&["--seq", "0"], "at least 1"),
        (&["--seq", "-4"], "at least 1"),
        (&["--seq", "1e3"], "whole number"),
        (&["--steps", "0"], "at least 1"),
        (&["--micro-batch", "0"], "at least 1"),
        (&["--accum", "-1"], "at least 1"),
        (&["--threads", "0"], "at least 1"),
        (&["--seed", "-1"], "0 or more"),
        (&["--seed", "99999999999999999999"], "whole number"),
        (&["--lr", "nan"], "finite"),
        (&["--lr", "-0.1"], "0 or more"),
        (&["--lr", "fast"], "finite number"),
        (&["--memory-limit", "0"], "above 0"),
        (&["--memory-limit", "-5GiB"], "above 0"),
        (&["--memory-limit", "24Gi"], "24GiB"),
        (&["--set", "memory.limit=true"], "24GiB"),
        (&["--set", "optim.beta1=1.0"], "below 1"),
        (&["--set", "optim.beta2=-0.1"], "from 0"),
        (&["--set", "optim.beta2=nan"], "from 0"),
        (&["--set", "optim.eps=0"], "above 0"),
        (&["--set", "optim.clip_norm=0"], "above 0"),
        (&["--set", "optim.weight_decay=-1"], "0 or more"),
        (&["--set", "lr.min_ratio=2"], "from 0 to 1"),
        (&["--set", "lr.schedule=cosin"], "cosine"),
        (&["--set", "data.shuffle=1"], "true or false"),
        (&["--set", "data.format=[1]"], "one of"),
        (&["--set", "model.layers=0"], "at least 1"),
        (&["--set", "model=3"], "section"),
        (&["--set", "optim.f32_states=[1]"], "list of texts"),
        (&["--set", "train.max_skipped=-1"], "0 or more"),
        (&["--set", "model.rope_theta=inf"], "finite"),
        (&["--device", "gpu"], "cuda:N"),
        (&["--dtype", "int4"], "f32, bf16"),
        (&["--dtype", "fp16"], "no loss scaling"),
        (&["--set", "train.dtype=f16"], "bf16"),
        (&["--set", "memory.head_chunk=0"], "at least 1"),
        (&["--set", "offload.slab_mib=0"], "from 1 to 1048576"),
        (&["--set", "offload.parameter_slots=0"], "at least 1"),
        (&["--set", "memory.tile_tokens=0"], "at least 1"),
        (&["--offload-parameters", "disk"], "none, pinned"),
        (&["--offload-optimizer", ""], "path of a folder"),
        (&["--set", "offload.slab_mib=1048577"], "from 1 to 1048576"),
        (
            &["--set", "offload.slab_mib=17592186044416"],
            "from 1 to 1048576",
        ),
        (&["--set", "log.every=0"], "at least 1"),
        (&["--set", "hardware.peak_tflops=0"], "above 0"),
        (&["--set", "model.hidden"], "section.key=value"),
        (&["--set", "=3"], "section.key=value"),
    ];
    for (arguments, expected) in cases {
        // The message says what fits, and where the value came from.
        assert_refused(arguments, &[expected, arguments[1]]);
    }
    let (_folder, path) = file("[data]\nseq = \"long\"\n");
    assert_refused(
        &["--config", &path],
        &["`data.seq`", "\"long\"", &path, "whole number"],
    );
}

#[test]
fn broken_files_are_refused_with_the_line() {
    let (_folder, path) = file("[data]\nseq = 3\nseq = 4\n");
    assert_refused(&["--config", &path], &[&path, "line 3"]);
    let (_folder, path) = file("\n[data\n");
    assert_refused(&["--config", &path], &[&path, "line 2"]);
}

#[test]
fn contradictions_are_refused() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["--set", "offload.window=end"],
            "--offload-optimizer pinned",
        ),
        (
            &[
                "--offload-optimizer",
                "pinned",
                "--set",
                "offload.fraction=0",
            ],
            "`offload.fraction` is 0",
        ),
        (
            &["--set", "lr.schedule=constant", "--set", "lr.decay_steps=5"],
            "constant",
        ),
        (&["--set", "optim.ns_steps=3"], "add --optimizer muon"),
        (
            &[
                "--set",
                "lr.schedule=wsd",
                "--set",
                "lr.decay_steps=5",
                "--steps",
                "4",
            ],
            "4 steps",
        ),
        (&["--set", "data.format=u16"], "--data"),
        (&["--dump-gradients", "9", "--steps", "8"], "8 steps"),
        (
            &["--set", "model.heads=5", "--set", "model.kv_heads=2"],
            "not a multiple",
        ),
        (&["--set", "model.head_dim=15"], "odd"),
        (
            &["--set", "model.vocab=9000000000000000000"],
            "larger than any machine",
        ),
        (&["--seq", "9000000000000000000"], "larger than any machine"),
        (
            &["--accum", "9000000000000000000"],
            "larger than any machine",
        ),
        (
            &["--recompute", "mlp", "--recompute-granularity", "selective"],
            "`--recompute mlp`",
        ),
        (
            &["--recompute-granularity", "full"],
            "needs --recompute-method",
        ),
        (
            &["--optimizer", "adamw8bit", "--state-dtype", "f32"],
            "`--optimizer adamw8bit`",
        ),
        (
            &["--config", "tiny-moe", "--set", "memory.tile_tokens=64"],
            "experts take the rows of a whole one",
        ),
        (
            &[
                "--config",
                "tiny-moe",
                "--set",
                "optim.router_bias_rate=1e-3",
            ],
            "set model.experts.choice_bias",
        ),
        (&["--set", "model.router_aux=0.1"], "has no experts"),
        (
            &["--config", "tiny-moe", "--set", "model.experts.chosen=9"],
            "from 1 to 8",
        ),
    ];
    for (arguments, expected) in cases {
        assert_refused(arguments, &[expected]);
    }
    // Saying the same thing twice is no contradiction, and `--set` has the last word: the fixes of an
    // out-of-memory error are added to the command that failed.
    for seq in ["64", "32"] {
        let set = format!("data.seq={seq}");
        assert_eq!(
            config(&["--set", &set, "--seq", "64"]).data.seq.to_string(),
            seq
        );
    }
    // If the command line picks another optimizer or a constant rate, the file's keys for the old one are ignored, and keys of
    // the command line are not.
    let muon = "[optim]\nkind = \"muon\"\nns_steps = 3\n";
    let (_folder, path) = file(&format!(
        "{muon}[lr]\nschedule = \"wsd\"\ndecay_steps = 5\n"
    ));
    let others = [
        "--config",
        &path,
        "--optimizer",
        "adamw",
        "--schedule",
        "constant",
    ];
    assert_eq!(config(&["--config", &path]).optim.ns_steps, 3);
    assert_eq!(config(&others).optim, Config::default().optim);
    assert_eq!(config(&others).lr, Config::default().lr);
    let kept = [&others[..], &["--set", "optim.ns_steps=4"]].concat();
    assert_refused(&kept, &["`optim.ns_steps` is a number of muon"]);
    // A run may be shorter than the warmup of its preset.
    assert_eq!(
        config(&["--config", "llama-3-8b", "--steps", "2"])
            .train
            .steps,
        2
    );
}

/// What is elsewhere is said once, with what says how only where there is something, and gradients that are released where
/// nothing needs them after the backward pass.
#[test]
fn places_that_contradict_are_refused() {
    let one = "batch.accum=1";
    let release: &[&str] = &["optim.release=backward", "optim.clip_norm=inf", one];
    let and = |more: &'static str| [release, &["offload.optimizer=pinned", more]].concat();
    let cases: &[(&[&str], &str)] = &[
        (&["offload.optimizer=disk"], "add offload.path"),
        (
            &["offload.optimizer=pinned", "offload.path=/scratch"],
            "keep one of the two",
        ),
        (
            &["offload.optimizer=/states", "offload.path=/scratch"],
            "/scratch; keep one",
        ),
        (&["offload.slab_mib=3"], "--offload-optimizer pinned"),
        (
            &["offload.parameters=pinned", "offload.fraction=0.5"],
            "`offload.fraction` says",
        ),
        (
            &["offload.gradients=pinned", "offload.parameter_slots=3"],
            "--offload-parameters pinned",
        ),
        (
            &["offload.path=/scratch", "offload.fraction=0"],
            "`offload.fraction` is 0",
        ),
        (
            &["optim.release=backward", one],
            "optim.clip_norm = 1 needs",
        ),
        (&and("batch.accum=2"), "of 2 micro-batches"),
        (&and("offload.gradients=pinned"), "none to send"),
        (&and("offload.window=end"), "`offload.window` is end"),
    ];
    for (settings, expected) in cases {
        let arguments: Vec<&str> = settings.iter().flat_map(|set| ["--set", set]).collect();
        assert_refused(&arguments, &[expected]);
    }
    let arguments = [
        "--set",
        "optim.release=backward",
        "--set",
        "optim.clip_norm=inf",
        "--accum",
        "1",
        "--dump-gradients",
        "1",
    ];
    assert_refused(&arguments, &["--dump-gradients", "never all of them"]);
}

#[test]
fn places_that_go_together_are_read() {
    let homes = |arguments: &[&str]| config(arguments).homes().unwrap();
    let disk = |folder: &str| Home::Disk(folder.into());
    for (arguments, states) in [
        (&["--offload-optimizer", "none"][..], Home::Device),
        (&["--offload-optimizer", "pinned"], Home::Pinned),
        (&["--offload-optimizer", "states"], disk("states")),
        (&["--offload-optimizer", "./pined"], disk("./pined")),
        (&["--set", "offload.path=/scratch"], disk("/scratch")),
        (
            &["--offload-optimizer", "disk", "--set", "offload.path=/a"],
            disk("/a"),
        ),
    ] {
        assert_eq!(homes(arguments).states, states, "{arguments:?}");
    }
    // What is misspelt is no folder.
    let misspelt = ["--offload-optimizer", "pined"];
    assert_refused(&misspelt, &["none, pinned, disk", "such as ./pined"]);
    for word in ["PINNED", "cpu", "nvme", "true", " "] {
        assert_refused(&["--offload-optimizer", word], &["none, pinned, disk"]);
    }
    assert_refused(&["--set", "offload.path="], &["`offload.path` is empty"]);
    assert_refused(
        &["--offload-optimizer", "none", "--set", "offload.path=/a"],
        &["`--offload-optimizer none`", "offload.path=/a"],
    );
    // A place that is asked for replaces that of a file, with all that the file says of how things come from there.
    let (_folder, path) = file(
        "[offload]\npath = \"/a\"\nparameters = \"pinned\"\nparameter_slots = 3\nwindow = \"end\"\nfraction = 0.5\n",
    );
    let of_file = homes(&["--config", &path]);
    assert_eq!(
        (of_file.states, of_file.weights, of_file.unit_slots),
        (disk("/a"), Home::Pinned, 3)
    );
    let nowhere = [
        "--offload-optimizer",
        "none",
        "--offload-parameters",
        "none",
    ];
    let replaced = homes(&[&["--config", &path][..], &nowhere].concat());
    assert_eq!(replaced, Homes::default());
    let pinned = homes(&["--config", &path, "--offload-optimizer", "pinned"]);
    assert_eq!((pinned.states, pinned.fraction), (Home::Pinned, 0.5));

    let all = homes(&[
        "--offload-parameters",
        "pinned",
        "--offload-gradients",
        "pinned",
        "--set",
        "offload.parameter_slots=4",
        "--set",
        "offload.slab_mib=3",
    ]);
    assert!(all.streams_updates() && all.update_time() == memory::UpdateTime::NextForward);
    assert_eq!((&all.weights, all.unit_slots), (&Home::Pinned, 4));
    assert_eq!(all.gradients, Home::Pinned);
    assert_eq!(all.words(), ", weights offloaded, gradients offloaded");

    let set = ["--accum", "1", "--set", "optim.release=backward", "--set"];
    let released = homes(&[&set[..], &["optim.clip_norm=inf"]].concat());
    assert_eq!(released.gradients, Home::Released);
    assert!(!released.streams_updates());
    assert_eq!(homes(&[]), Homes::default());
}

#[test]
fn a_choice_that_is_gone_says_what_to_write() {
    let words = ["one of auto, eager, flash", "cuDNN", "write flash"];
    assert_refused(&["train", "--attention", "cudnn"], &words);
    let (_folder, path) = file("[attention]\nbackend = \"cudnn\"\n");
    assert_refused(&["--config", &path], &words);
}

#[test]
fn blocks_that_nothing_computes_are_refused() {
    let no_gate = ["--set", "model.activation=gelu_tanh"];
    let words = ["model.activation", "model.norm = \"rms\"", "swiglu"];
    assert_refused(&no_gate, &words);
    let experts = ["--config", "tiny-moe"];
    let words = ["model.activation", "model.experts", "swiglu"];
    assert_refused(&[experts, no_gate].concat(), &words);
    let latents = [
        "--config",
        "tiny-mla",
        "--set",
        "model.norm_placement=after",
    ];
    assert_refused(&latents, &["model.norm_placement", "before"]);
}
