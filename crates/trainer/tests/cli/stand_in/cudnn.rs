//! Attention by cuDNN, on a library that stands in for it.

use super::{on_gpu, plan};
use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace};

const CUDNN_VERSION: &str = "STAND_IN_CUDNN_VERSION";

/// As [`on_gpu`], with a cuDNN to be found.
#[track_caller]
fn with_cudnn(place: &Workplace, arguments: &str, settings: &[(&str, &str)]) -> Outcome {
    let driver = emulation::stand_in_folder();
    let folders = std::env::join_paths([driver, &emulation::cudnn_folder()]).unwrap();
    let found = ("LD_LIBRARY_PATH", folders.to_str().unwrap());
    let outcome = place.trainer_with(arguments, &[settings, &[found]].concat());
    assert!(!outcome.stderr.contains("stand-in: "), "{outcome:?}");
    outcome
}

const LONG: &str =
    "--config small.toml --device cuda --seq 256 --micro-batch 1 --accum 1 --steps 1";

/// That cuDNN computes is written down. The trial's device is closed before the run opens its own, and the context
/// stays: the stand-in says so where one is released that has code of libraries in it.
#[test]
fn cudnn_computes_where_it_is_asked_for_and_was_tried() {
    let place = Workplace::new();
    let run = format!("{LONG} --attention cudnn --out run");
    with_cudnn(&place, &run, &[]).succeeds();
    assert!(
        place
            .text("run/config.toml")
            .contains("backend = \"cudnn\"")
    );
    let metrics = Metrics::read(&place, "run");
    for record in [&metrics.0[0], &plan(&place, "run")] {
        assert_eq!(record["attention"], "cudnn");
        assert_eq!(record["cudnn_version"], "9.28.0");
    }
    for step in metrics.steps() {
        assert_eq!(step["peak_bytes"], step["planned_peak_bytes"]);
        assert_eq!(step["driver_allocations"], 0);
    }
    // Where nobody asks for it, our own is faster.
    with_cudnn(&place, &format!("{LONG} --out auto"), &[]).succeeds();
    assert_eq!(plan(&place, "auto")["attention"], "flash");
}

#[test]
fn cudnn_that_is_asked_for_and_not_there_is_refused() {
    let place = Workplace::new();
    let run = format!("{LONG} --attention cudnn --out run");
    let words = [
        "`attention.backend` is cudnn",
        "pip install nvidia-cudnn-cu13",
        "--attention flash",
    ];
    on_gpu(&place, &run, &[]).fails(5, &words);
    let old = with_cudnn(&place, &run, &[(CUDNN_VERSION, "92100")]);
    old.fails(5, &["cuDNN 9.21.0 was found", "9.25.0 or newer"]);
    let ampere = [("STAND_IN_CAPABILITY", "8.0")];
    with_cudnn(&place, &run, &ampere).fails(5, &["compute capability 9.0", "8.0"]);
    let f32 = format!("{run} --dtype f32");
    with_cudnn(&place, &f32, &[]).fails(2, &["computes in bf16", "--attention flash"]);
    assert!(!place.path("run").exists());
}

/// A trial on a full card says nothing of cuDNN: no run takes the machine for one that lacks it.
#[test]
fn a_full_card_is_not_taken_for_a_missing_cudnn() {
    let place = Workplace::new();
    let full = "the GPU's memory is full, so that cuDNN could not be tried";
    let run = format!("{LONG} --attention cudnn --out run");
    // Room for the workspace of products and no plan; for part of the workspace.
    for free in [40 << 20, 16 << 20] {
        let others = ((80_u64 << 30) - free).to_string();
        let settings = [
            ("STAND_IN_OTHERS_BYTES", others.as_str()),
            ("STAND_IN_PRODUCT_BYTES", "33554432"),
        ];
        let refused = with_cudnn(&place, &run, &settings);
        refused.fails(3, &[full, "nvidia-smi", "--attention flash"]);
    }
}

/// Sums of short sequences cannot come in another order: what is planned is what is tried, and on data, since sums of zeros are
/// always the same.
#[test]
fn attention_that_does_not_repeat_itself_at_the_planned_length_is_not_taken() {
    let place = Workplace::new();
    let from = |tokens| [("STAND_IN_CUDNN_UNORDERED", tokens)];
    let run = |out: &str| format!("{LONG} --attention cudnn --out {out}");
    let words = "cuDNN 9.28.0 gives other bits from time to time for 1 x 256 tokens";
    let refused = with_cudnn(&place, &run("refused"), &from("256"));
    refused.fails(5, &[words, "--attention flash"]);
    with_cudnn(&place, &run("longer"), &from("257")).succeeds();
    assert_eq!(plan(&place, "longer")["attention"], "cudnn");
}

/// What is computed again, by whichever outputs are still needed, and on tiles of tokens, has the bits of the first time. Texts
/// between steps come from copies of packed queries, keys and values in a cache.
#[test]
fn cudnn_agrees_with_itself_in_every_mode_and_nearly_with_ours() {
    let place = Workplace::new();
    let losses = |attention: &str, recompute: &str| {
        let out = format!("{attention}-{recompute}").replace(' ', "");
        let flags = format!("--attention {attention} --recompute {recompute} --out {out}");
        let run = format!("--config small.toml --device cuda --seq 40 --steps 2 {flags}");
        with_cudnn(&place, &run, &[]).succeeds();
        let metrics = Metrics::read(&place, &out);
        for step in metrics.steps() {
            assert_eq!(step["peak_bytes"], step["planned_peak_bytes"], "{out}");
        }
        (metrics.losses(), metrics.steps()[0]["peak_bytes"].as_u64())
    };
    let (kept, peak) = losses("cudnn", "none");
    for recompute in ["core_attn", "qkv", "full"] {
        let (again, lower) = losses("cudnn", recompute);
        assert_eq!(again, kept, "{recompute}");
        assert!(lower < peak, "{recompute}");
    }
    let tiles = "qkv --set memory.tile_tokens=16";
    let texts = "none --sample-every 1 --set log.sample_tokens=5";
    for changed in [tiles, texts] {
        assert_eq!(losses("cudnn", changed).0, kept, "{changed}");
    }
    let (own, _) = losses("flash", "none");
    for (cudnn, own) in kept.iter().zip(&own) {
        assert!((cudnn / own - 1.0).abs() < 1e-3, "{cudnn} {own}");
    }
}

/// Losses of a run on packed documents, the bytes that are planned for it, and how often it launches a graph.
fn packed(place: &Workplace, flags: &str) -> (Vec<f64>, u64, usize) {
    let out = flags.replace(|letter: char| !letter.is_alphanumeric(), "");
    let shape =
        "--seq 96 --micro-batch 1 --accum 4 --steps 2 --set model.vocab=257 --set model.layers=1";
    let run = format!(
        "--config small.toml --device cuda {shape} --packing first-fit {flags} --out {out}"
    );
    let notes = format!("{out}.graphs");
    place.file(&notes, "");
    let path = place.path(&notes);
    let noted = [("STAND_IN_GRAPHS", path.to_str().unwrap())];
    with_cudnn(place, &run, &noted).succeeds();
    let notes = place.text(&notes);
    let launched = |line: &&str| line.starts_with("launched");
    let metrics = Metrics::read(place, &out);
    for step in metrics.steps() {
        assert_eq!(step["peak_bytes"], step["planned_peak_bytes"], "{out}");
        assert_eq!(step["driver_allocations"], 0, "{out}");
    }
    let planned = metrics.steps()[0]["planned_peak_bytes"].as_u64();
    let graphs = notes.lines().filter(launched).count();
    (metrics.losses(), planned.unwrap(), graphs)
}

/// Rows of one long document and padding are cuDNN's; those of many short ones our own kernels', to the bit. Bytes that are planned do
/// not depend on which they are. Where both come, there is a graph of each, and
/// every later micro-batch of a step is launched as one.
#[test]
fn packed_documents_are_cudnns_where_there_is_room_for_them() {
    let place = Workplace::new();
    let lines = |words: usize, count: usize| -> String {
        let line = |number| {
            format!(
                "{{\"text\": \"{number:03} {}\"}}\n",
                "word ".repeat(words + number % 3)
            )
        };
        (0..count).map(line).collect()
    };
    // No short one fits beside a long one.
    let (long, short) = (lines(16, 20), lines(2, 60));
    for (name, lines) in [
        ("long", &long),
        ("short", &short),
        ("both", &(short.clone() + &long)),
    ] {
        place.file(&format!("{name}.jsonl"), lines);
        let prepare = format!("prepare {name}.jsonl --out {name} --tokenizer bytes");
        place.trainer(&prepare).succeeds();
    }
    let losses = |flags: &str| packed(&place, flags);
    let short = ["flash", "cudnn"].map(|kind| losses(&format!("--data short --attention {kind}")));
    assert_eq!(short[0].0, short[1].0);
    let long = ["flash", "cudnn"].map(|kind| losses(&format!("--data long --attention {kind}")));
    assert_ne!(long[0].0, long[1].0);
    for (own, cudnn) in long[0].0.iter().zip(&long[1].0) {
        assert!((cudnn / own - 1.0).abs() < 1e-3, "{cudnn} {own}");
    }
    assert_eq!(short[1].1, long[1].1);
    assert!(short[0].1 < short[1].1);
    let both = ["auto", "off"].map(|graphs| {
        losses(&format!(
            "--data both --attention cudnn --set train.graphs={graphs}"
        ))
    });
    let [graphs, none] = both;
    assert_eq!((&graphs.0, graphs.1), (&none.0, none.1));
    assert_eq!([short[1].2, long[1].2, graphs.2, none.2], [6, 6, 6, 0]);
}
