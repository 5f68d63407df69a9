//! Training on a GPU from a loop of one's own, with tensors of candle that are on the GPU and stay there.
//!
//! It builds as every program does that has candle's feature `cuda`: nvcc and the libraries of CUDA 13 are there. And it
//! takes what the trainer's feature `cuda` takes: `eval "$(scripts/cuda-toolkit)"`. `scripts/check-candle-cuda` builds and
//! tests it without either.

use candle_core::{Device, Tensor};
use std::error::Error;
use trainer::{Trainer, configuration};

const SEQ: usize = 32;

/// Two micro-batches of four rows each.
const ROWS: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::new_cuda_with_stream(0)?;
    let set = [
        "train.device=cuda",
        "data.seq=32",
        "batch.micro=4",
        "batch.accum=2",
        "lr.peak=3e-3",
    ];
    let mut trainer = Trainer::new(configuration("tiny", &set)?)?;
    trainer.give_on(&device)?;
    let (ids, targets) = batch(&device)?;
    for _ in 0..3 {
        // The step reads both where they are.
        let outcome = trainer.step(&ids, &targets)?;
        println!("step {}: loss {}", outcome.step, outcome.loss);
    }
    // A copy on the GPU. What candle computes with it from here on is in the order of its own stream.
    let gradient = trainer.gradient("model.layers.0.self_attn.q_proj.weight")?;
    assert!(gradient.device().is_cuda());
    println!("gradient {:?} on {:?}", gradient.dims(), device.location());
    Ok(())
}

/// The bytes of this file, as tokens; every target is the byte that follows.
fn batch(device: &Device) -> candle_core::Result<(Tensor, Tensor)> {
    let text = &include_bytes!("main.rs")[..ROWS * SEQ + 1];
    let tokens: Vec<u32> = text.iter().map(|byte| u32::from(*byte)).collect();
    let rows = |tokens: &[u32]| Tensor::from_slice(tokens, (ROWS, SEQ), device);
    Ok((rows(&tokens[..ROWS * SEQ])?, rows(&tokens[1..])?))
}

#[cfg(test)]
mod tests;
