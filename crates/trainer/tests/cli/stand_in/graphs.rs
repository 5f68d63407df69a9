//! Micro-batches as CUDA graphs: the same bits, peaks and bytes as without. The stand-in keeps the arguments of a captured
//! call, and runs a graph in another order than its program's, so that what a graph has baked in, or what no event orders,
//! shows.

use super::{figures, on_gpu, plan};
use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace};
use serde_json::Value;

/// A model with everything that changes from micro-batch to micro-batch: dropout at each of its sites.
const DROPOUT: &str = r#"
[model]
hidden = 32
layers = 2
heads = 2
ffn = 64
vocab = 256
tie_embeddings = true
norm = "layer"
activation = "gelu_tanh"
positions = "learned"
max_positions = 32
biases = true
dropout = 0.25
[data]
seq = 32
[batch]
micro = 1
accum = 4
[train]
steps = 3
[lr]
peak = 1e-3
"#;

/// Trains a configuration, and counts the graphs that were captured and launched.
#[track_caller]
fn graphed(place: &Workplace, flags: &str, out: &str) -> (Outcome, [usize; 2]) {
    graphed_with(place, flags, out, &[])
}

#[track_caller]
fn graphed_with(
    place: &Workplace,
    flags: &str,
    out: &str,
    settings: &[(&str, &str)],
) -> (Outcome, [usize; 2]) {
    let notes = format!("{out}.graphs");
    place.file(&notes, "");
    let path = place.path(&notes);
    let noted = [("STAND_IN_GRAPHS", path.to_str().unwrap())];
    let arguments = format!("--config dropout.toml --device cuda {flags} --out {out}");
    let outcome = on_gpu(place, &arguments, &[&noted[..], settings].concat()).succeeds();
    let notes = place.text(&notes);
    // Of all streams, those that nothing was asked of included: no call has to know which a graph joins.
    let whole = |line: &str| !line.starts_with("captured") || line.ends_with(" 5");
    assert!(notes.lines().all(whole), "{notes}");
    let lines = |what| notes.lines().filter(|line| line.starts_with(what)).count();
    (outcome, ["captured", "launched"].map(lines))
}

fn workplace() -> Workplace {
    let place = Workplace::new();
    place.file("dropout.toml", DROPOUT);
    place
}

/// What a step has that no clock tells.
fn steps(place: &Workplace, out: &str) -> Vec<Value> {
    let mut steps: Vec<Value> = Metrics::read(place, out)
        .steps()
        .into_iter()
        .cloned()
        .collect();
    for step in &mut steps {
        let step = step.as_object_mut().unwrap();
        for clock in [
            "step_ms",
            "phase_ms",
            "tokens_per_s",
            "data_wait_ms",
            "tflops",
            "mfu",
        ] {
            step.remove(clock);
        }
    }
    steps
}

fn run_record(place: &Workplace, out: &str) -> Value {
    let text = place.text(&format!("{out}/metrics.jsonl"));
    serde_json::from_str(text.lines().next().unwrap()).unwrap()
}

fn weights(place: &Workplace, folder: &str) -> Vec<u8> {
    std::fs::read(place.path(&format!("{folder}/model.safetensors"))).unwrap()
}

#[test]
fn graphs_change_no_bit_and_no_byte() {
    let place = workplace();
    for (number, (flags, sections)) in [
        ("--dtype f32 --attention eager", 3),
        ("--dtype bf16 --attention flash", 3),
        ("--dtype bf16 --attention flash --recompute full", 3),
        ("--dtype bf16 --offload-activations mlp,block_input", 3),
        ("--dtype bf16 --offload-parameters pinned --recompute full", 3),
        // The last micro-batch of a step is none: gradients leave, and what the update needs comes.
        ("--dtype bf16 --offload-optimizer pinned", 2),
        (
            "--dtype bf16 --offload-optimizer states --offload-parameters pinned --offload-gradients pinned \
             --offload-activations block_input",
            2,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let [on, off] = ["on", "off"].map(|name| format!("{name}-{number}"));
        let (_, graphs) = graphed(&place, &format!("{flags} --save-final {on}-model"), &on);
        let without = format!("{flags} --set train.graphs=off --save-final {off}-model");
        let (_, none) = graphed(&place, &without, &off);
        assert_eq!(none, [0, 0], "{flags}");
        assert_eq!(graphs, [1, 3 * sections], "{flags}");
        assert_eq!(steps(&place, &on), steps(&place, &off), "{flags}");
        let [on_weights, off_weights] =
            [&on, &off].map(|out| weights(&place, &format!("{out}-model")));
        assert!(on_weights == off_weights, "{flags}");
        let (record, planned) = (run_record(&place, &on), plan(&place, &on));
        assert_eq!((&record["graphs"], &planned["graphs"]), (&true.into(), &true.into()));
        let record = run_record(&place, &off);
        assert_eq!(record["graphs"], false);
        assert_eq!(record["graphs_off"], "train.graphs is off");
    }
}

/// A step whose dropout did not change from micro-batch to micro-batch, or whose loss had another factor, would be
/// another: what is compared above depends on both.
#[test]
fn what_is_compared_depends_on_what_changes() {
    let place = workplace();
    let run = |flags: &str, out: &str| {
        graphed(&place, flags, out);
        figures(&Metrics::read(&place, out))
    };
    let all = run("--dtype f32", "all");
    let other_keys = run("--dtype f32 --seed 1", "seed");
    assert_ne!(all, other_keys);
    let losses = |figures: &[f64]| figures.iter().step_by(2).copied().collect::<Vec<_>>();
    let without = run("--dtype f32 --set model.dropout=0", "without");
    assert_ne!(losses(&all)[0], losses(&without)[0]);
}

#[test]
fn there_are_graphs_from_three_micro_batches_on() {
    let place = workplace();
    for (accum, expected) in [(1, [0, 0]), (2, [0, 0]), (3, [1, 6])] {
        let out = format!("accum-{accum}");
        let (_, graphs) = graphed(&place, &format!("--accum {accum}"), &out);
        assert_eq!(graphs, expected, "{accum}");
        let record = run_record(&place, &out);
        assert_eq!(record["graphs"], accum == 3);
        assert_eq!(record["graphs_off"].is_null(), accum == 3);
    }
}

/// Documents of many lengths: targets change from step to step, and with them what gradients are multiplied by. Padded,
/// micro-batches have two shapes, with a graph each; packed, they have documents.
#[test]
fn batches_of_documents_are_graphs_too() {
    let place = workplace();
    let document = |index: usize| {
        let text = "one document ".repeat(1 + index * 7 % 9);
        format!("{{\"text\": \"{index} {text}\"}}\n")
    };
    let documents: String = (0..60).map(document).collect();
    place.file("documents.jsonl", documents);
    let prepare = "prepare documents.jsonl --out data --tokenizer bytes";
    place.trainer(prepare).succeeds();
    let shape = "--seq 128 --set model.max_positions=128 --set model.vocab=257";
    for (packing, captured) in [("pad", 2), ("first-fit", 1)] {
        let flags = format!("{shape} --dtype f32 --data data --packing {packing}");
        let [on, off] = ["on", "off"].map(|name| format!("{name}-{packing}"));
        let (_, graphs) = graphed(&place, &flags, &on);
        graphed(&place, &format!("{flags} --set train.graphs=off"), &off);
        assert_eq!(graphs, [captured, 9], "{packing}");
        let made = steps(&place, &on);
        assert_eq!(made, steps(&place, &off), "{packing}");
        let targets: Vec<_> = made.iter().map(|step| &step["tokens"]).collect();
        assert!(targets[0] != targets[1], "{packing}: {targets:?}");
    }
}

/// A driver that has no room for a graph, on the host or on the device: every call is carried out, once, and it is said once,
/// with the reason.
#[test]
fn a_driver_that_refuses_changes_nothing() {
    let place = workplace();
    let flags = "--dtype bf16 --offload-activations block_input";
    graphed(&place, flags, "with");
    for (short, captured) in [
        (("STAND_IN_GRAPH_NODES_MAX", "10"), 0),
        (("STAND_IN_GRAPH_NODE_BYTES", "1099511627776"), 1),
    ] {
        let out = short.0;
        let (outcome, graphs) = graphed_with(&place, flags, out, &[short]);
        assert_eq!(graphs, [captured, 0], "{out}");
        assert_eq!(steps(&place, out), steps(&place, "with"), "{out}");
        let told = "makes no graph of a micro-batch (CUDA_ERROR_OUT_OF_MEMORY";
        assert_eq!(outcome.stderr.matches(told).count(), 1, "{outcome:?}");
    }
}
