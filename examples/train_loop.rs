//! Training from your own loop: the loop has the data, logs, and decides when to stop; the trainer manages memory.

use candle_core::{Device, Tensor};
use std::error::Error;
use trainer::{Trainer, configuration};

const SEQ: usize = 32;

/// Two micro-batches of four rows each.
const ROWS: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let set = [
        "data.seq=32",
        "batch.micro=4",
        "batch.accum=2",
        "lr.peak=3e-3",
        "recompute.spec=core_attn",
    ];
    let mut trainer = Trainer::new(configuration("tiny", &set)?)?;
    println!("a step will need {} bytes", trainer.plan().peak_bytes);
    let mut first = None;
    let loss = loop {
        let (ids, targets) = batch()?;
        let outcome = trainer.step(&ids, &targets)?;
        assert_eq!(outcome.memory.peak.bytes, trainer.plan().peak_bytes);
        let first = *first.get_or_insert(outcome.loss);
        if outcome.step.is_multiple_of(10) {
            println!("step {}: loss {}", outcome.step, outcome.loss);
        }
        if outcome.loss < first / 2.0 || outcome.step == 200 {
            break outcome.loss;
        }
    };
    let name = "model.layers.0.self_attn.q_proj.weight";
    let gradient = trainer
        .gradient(name)?
        .sqr()?
        .sum_all()?
        .to_scalar::<f32>()?;
    println!(
        "loss {loss}; the gradient of {name} has a norm of {}",
        gradient.sqrt()
    );
    println!("its states: {:?}", trainer.states(name)?.keys());
    assert!(Some(loss) < first.map(|first| first / 2.0));
    Ok(())
}

/// The bytes of this file, as tokens; every target is the byte that follows.
fn batch() -> candle_core::Result<(Tensor, Tensor)> {
    let text = &include_bytes!("train_loop.rs")[..ROWS * (SEQ + 1)];
    let tokens: Vec<u32> = text.iter().map(|byte| u32::from(*byte)).collect();
    let tokens = Tensor::from_vec(tokens, (ROWS, SEQ + 1), &Device::Cpu)?;
    Ok((tokens.narrow(1, 0, SEQ)?, tokens.narrow(1, 1, SEQ)?))
}

#[test]
fn it_runs() {
    main().unwrap();
}
