//! A job of several ranks, and what it leaves.

use crate::batches::batch_file;
use crate::metrics::Metrics;
use crate::ranks::mpi;
use crate::workplace::{Outcome, Workplace};
use std::process::Command;

/// Micro-batches in a step, over all ranks.
pub const MICRO_BATCHES: usize = 4;

/// Steps of a run.
pub const STEPS: usize = 3;

/// Rows of a micro-batch, and their tokens.
const ROWS: usize = 2;
const SEQ: usize = 24;

/// Matrices of more than 4096 elements, so that 8 bits are used; no width is a multiple of what pieces are.
const LLAMA: &str = r#"
[model]
hidden = 68
layers = 2
heads = 2
kv_heads = 1
ffn = 99
vocab = 131
"#;

const GPT2: &str = r#"
[model]
hidden = 68
layers = 2
heads = 2
ffn = 131
vocab = 131
tie_embeddings = true
norm = "layer"
activation = "gelu_tanh"
positions = "learned"
max_positions = 24
biases = true
dropout = 0.1
"#;

const RUN: &str = r#"
[data]
path = "data.safetensors"
shuffle = false
[batch]
micro = 2
[train]
steps = 3
device = "cpu"
threads = 1
[optim]
f32_states = []
[lr]
peak = 1e-2
[checkpoint]
every = 0
"#;

/// A folder with both models and the data of their runs.
pub fn place() -> Workplace {
    let place = Workplace::new();
    place.file("llama.toml", format!("{LLAMA}{RUN}"));
    place.file("gpt2.toml", format!("{GPT2}{RUN}"));
    place.file("data.safetensors", data(&[0, 1, 2, 3], None));
    place
}

/// The rows of a run, the micro-batches of each step in an order of their own. Some have more targets than others. With
/// `altered`, a token of that micro-batch is another.
pub fn data(order: &[usize; MICRO_BATCHES], altered: Option<usize>) -> Vec<u8> {
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        for micro in order {
            let mut random = (step * MICRO_BATCHES + micro) as u64;
            for place in 0..ROWS * SEQ {
                let token = next(&mut random) % 131;
                let is_altered = altered == Some(*micro) && place == 5;
                inputs.push((token + u64::from(is_altered)) as i32 % 131);
                // The last micro-batch of a step has almost none.
                let is_masked = next(&mut random) % 10 < 3 * *micro as u64;
                let target = (next(&mut random) % 131) as i32;
                targets.push(if is_masked { -100 } else { target });
            }
        }
    }
    batch_file(&inputs, &targets, SEQ)
}

/// Where the inputs of a micro-batch of a step begin among all.
pub fn first_token(step: usize, micro: usize) -> usize {
    (step * MICRO_BATCHES + micro) * ROWS * SEQ
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut value = *state;
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Open MPI's launcher of so many ranks.
pub fn open_mpi(ranks: usize) -> Command {
    of_so_many(mpi::open_mpi(), ranks)
}

/// MPICH's.
pub fn mpich(ranks: usize) -> Command {
    of_so_many(mpi::mpich(), ranks)
}

fn of_so_many(mut launcher: Command, ranks: usize) -> Command {
    launcher.args(["-n", &ranks.to_string()]);
    launcher
}

/// The binary on ranks, ready to be run in a folder.
pub fn command(place: &Workplace, mut launcher: Command, arguments: &str) -> Command {
    launcher.arg(env!("CARGO_BIN_EXE_trainer"));
    prepared(place, launcher, arguments)
}

/// As [`command`], where rank 1 alone has other arguments after those of all.
pub fn command_but_for_one(
    place: &Workplace,
    mut launcher: Command,
    arguments: &str,
    of_one: &str,
) -> Command {
    let script = format!(
        "if [ \"$OMPI_COMM_WORLD_RANK\" = 1 ]; then exec {0} \"$@\" {of_one}; else exec {0} \"$@\"; fi",
        env!("CARGO_BIN_EXE_trainer")
    );
    launcher.args(["sh", "-c", &script, "trainer"]);
    prepared(place, launcher, arguments)
}

fn prepared(place: &Workplace, mut launcher: Command, arguments: &str) -> Command {
    launcher
        .args(arguments.split_whitespace())
        .current_dir(place.path(""))
        .env_remove("RUST_LOG")
        .env("NO_COLOR", "1")
        .stdin(std::process::Stdio::null());
    launcher
}

/// Trains on so many ranks under Open MPI, into a folder.
pub fn train(place: &Workplace, ranks: usize, arguments: &str, out: &str) -> Run {
    train_by(place, open_mpi(ranks), ranks, arguments, out)
}

/// As [`train`], by any launcher.
pub fn train_by(
    place: &Workplace,
    launcher: Command,
    ranks: usize,
    arguments: &str,
    out: &str,
) -> Run {
    let arguments = of_ranks(ranks, arguments, out);
    crate::workplace::outcome(command(place, launcher, &arguments), &arguments).succeeds();
    Run::read(place, out, ranks)
}

/// Trains without a launcher, into a folder.
pub fn train_alone(place: &Workplace, arguments: &str, out: &str) -> Run {
    let arguments = of_ranks(1, arguments, out);
    let outcome: Outcome = place.trainer(&arguments);
    outcome.succeeds();
    Run::read(place, out, 1)
}

fn of_ranks(ranks: usize, arguments: &str, out: &str) -> String {
    let accum = MICRO_BATCHES / ranks;
    format!("{arguments} --accum {accum} --quiet --out {out} --save-final {out}/model")
}

/// What a run left.
pub struct Run {
    /// `metrics.jsonl` of the run.
    pub metrics: Metrics,
    /// That of each rank.
    pub ranks: Vec<Metrics>,
    /// The weights, as a file; empty if the run wrote none.
    pub weights: Vec<u8>,
    /// `plan.json` of each rank.
    pub plans: Vec<serde_json::Value>,
}

impl Run {
    pub fn read(place: &Workplace, out: &str, ranks: usize) -> Run {
        let of_rank = |rank| Metrics::read(place, &format!("{out}/ranks/{rank}"));
        let plan = |rank| {
            serde_json::from_str(&place.text(&format!("{out}/ranks/{rank}/plan.json"))).unwrap()
        };
        Run {
            metrics: Metrics::read(place, out),
            ranks: (0..ranks).map(of_rank).collect(),
            weights: std::fs::read(place.path(&format!("{out}/model/model.safetensors")))
                .unwrap_or_default(),
            plans: (0..ranks).map(plan).collect(),
        }
    }

    /// What the bits of a run are: losses and norms of all steps, and the weights after them.
    pub fn bits(&self) -> (Vec<String>, &[u8]) {
        assert!(!self.weights.is_empty(), "the run wrote its weights");
        let of_step = |step: &serde_json::Value| {
            ["step", "loss", "grad_norm", "tokens"]
                .map(|name| step[name].to_string())
                .join(" ")
        };
        let steps = self.metrics.steps();
        assert_eq!(steps.len(), STEPS);
        (steps.into_iter().map(of_step).collect(), &self.weights)
    }

    /// A field of every step of a rank.
    pub fn field(&self, rank: usize, name: &str) -> Vec<u64> {
        let steps = self.ranks[rank].steps();
        let read = |step: &serde_json::Value| {
            step[name]
                .as_u64()
                .unwrap_or_else(|| panic!("no {name}: {step}"))
        };
        steps.into_iter().map(read).collect()
    }
}
