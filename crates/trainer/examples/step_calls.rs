//! Writes what a step on a GPU asks the device for, without one, as JSON: kernels with their blocks, threads and shared memory,
//! matrix products, cleared memory. Equal calls are counted. Copies are left out. `attention.kernels=sm90` and `experts.kernels=sm90` list
//! kernels for Hopper, and `auto` those for 8.0.
//!
//! ```console
//! $ cargo run --release --example step_calls -- --config llama-3-8b --set train.dtype=bf16 --set batch.micro=1
//! ```

use clap::Parser;
use kernels::cuda::{Call, Gemm, KernelKind, Listed};
use memory::{Home, Layer};
use planner::ChosenHeadChunk;
use serde_json::{Value, json};
use session::{StepCalls, calls_of_a_step};
use settings::{AutoOr, KernelFamily, PerFamily, Settings};
use std::error::Error;
use trainer::{Target, configuration};

#[derive(Parser)]
struct Arguments {
    /// A preset or a file.
    #[arg(long)]
    config: String,
    /// As the trainer takes it.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let set: Vec<&str> = arguments.set.iter().map(String::as_str).collect();
    let mut config = configuration(&arguments.config, &set)?;
    if config.memory.head_chunk == AutoOr::Auto {
        let chosen = ChosenHeadChunk::new(&config, Target::Cuda, None, None)?;
        config.memory.head_chunk = AutoOr::Number(chosen.tokens);
    }
    let settings = Settings::new(&config)?;
    let homes = &settings.homes;
    if homes.states != Home::Device || homes.gradients != Home::Device {
        // The last micro-batch is another than those before it then, and none of a graph.
        return Err("steps are listed with gradients and states on the device alone".into());
    }
    let kind = |family: KernelFamily| family.choice(&config).kind().unwrap_or(KernelKind::Sm80);
    let written = written(
        &settings,
        &calls_of_a_step(&settings, PerFamily::new(kind))?,
    );
    println!("{}", serde_json::to_string_pretty(&written)?);
    Ok(())
}

/// A step, with how often all of its micro-batches and its update make each call.
fn written(settings: &Settings, calls: &StepCalls) -> Value {
    let mut counted: Vec<(Value, usize)> = Vec::new();
    let mut count = |calls: &[Listed], is_later: bool, times: usize| {
        let in_graph = is_later && settings.graphs_off.is_none();
        for row in calls.iter().map(|listed| row(listed, in_graph)) {
            match counted.iter_mut().find(|(known, _)| *known == row) {
                Some((_, known)) => *known += times,
                None => counted.push((row, times)),
            }
        }
    };
    for (index, calls) in calls.micro_batches.iter().enumerate() {
        // The second stands for all that follow, except in a pipeline, which lists all.
        let times = match index == 0 || settings.pipeline.is_some() {
            true => 1,
            false => settings.accum - 1,
        };
        count(calls, index > 0, times);
    }
    count(&calls.update, false, 1);
    let with_times = |(mut row, times): (Value, usize)| {
        row["times"] = times.into();
        row
    };
    json!({
        "tokens": settings.micro_batch * settings.seq,
        "micro_batches": settings.accum,
        "head_chunk": settings.head_chunk,
        "calls": counted.into_iter().map(with_times).collect::<Vec<_>>(),
    })
}

fn row(listed: &Listed, in_graph: bool) -> Value {
    let mut row = json!({
        "in_graph": in_graph,
        "phase": listed.place.phase,
        "layer": match listed.place.layer {
            Layer::Block(_) => "block".to_string(),
            other => other.to_string(),
        },
        "operation": listed.operation,
        "flops": listed.cost.flops,
        "bytes": listed.cost.bytes,
    });
    match &listed.call {
        Call::Launch {
            kernel,
            grid,
            block,
            shared_bytes,
            numbers,
        } => {
            row["kernel"] = kernel.name.into();
            row["source"] = kernel.source.into();
            row["grid"] = json!(grid);
            row["block"] = json!(block);
            row["shared_bytes"] = json!(shared_bytes);
            row["numbers"] = json!(numbers);
        }
        Call::Product(gemm) => row["product"] = product(gemm),
        Call::Clear(bytes) => row["cleared"] = json!(bytes),
    }
    row
}

fn product(gemm: &Gemm) -> Value {
    let [m, k, n] = gemm.sizes;
    json!({
        "m": m,
        "k": k,
        "n": n,
        "batch": gemm.batch,
        "of": gemm.a.dtype.as_str(),
        "out": gemm.out.dtype.as_str(),
        "adds": gemm.init.is_some(),
        "bias": gemm.bias.is_some(),
    })
}
