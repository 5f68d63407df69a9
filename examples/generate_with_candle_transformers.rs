//! Trains a model, exports it in Hugging Face's layout, and generates from it with candle-transformers.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use std::error::Error;
use std::path::Path;
use trainer::{Trainer, configuration};

const TEXT: &str = "the quick brown fox jumps over the lazy dog and ";
const SEQ: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    train()?.save(folder.path())?;
    let text = generate(folder.path(), "the quick", 30)?;
    println!("{text}");
    assert_eq!(text, TEXT[..39]);
    Ok(())
}

/// A model that knows one sentence by heart.
fn train() -> Result<Trainer, Box<dyn Error>> {
    let set = ["data.seq=64", "batch.micro=4", "lr.peak=3e-3"];
    let mut trainer = Trainer::new(configuration("tiny", &set)?)?;
    let bytes = TEXT.bytes().cycle();
    // Each row begins elsewhere in the sentence.
    let row = |start| bytes.clone().skip(start).take(SEQ + 1).map(u32::from);
    let rows: Vec<u32> = [0, 13, 26, 39].into_iter().flat_map(row).collect();
    let tokens = Tensor::from_vec(rows, (4, SEQ + 1), &Device::Cpu)?;
    let (ids, targets) = (tokens.narrow(1, 0, SEQ)?, tokens.narrow(1, 1, SEQ)?);
    while trainer.step(&ids, &targets)?.loss > 0.05 {}
    Ok(trainer)
}

/// `prompt` and the most likely bytes after it.
fn generate(folder: &Path, prompt: &str, more: usize) -> Result<String, Box<dyn Error>> {
    let config = std::fs::read(folder.join("config.json"))?;
    let config: LlamaConfig = serde_json::from_slice(&config)?;
    let config = config.into_config(false);
    let weights = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
    let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let model = Llama::load(weights, &config)?;
    let mut cache = Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    let mut bytes = prompt.as_bytes().to_vec();
    let mut seen = 0;
    for _ in 0..more {
        let ids: Vec<u32> = bytes[seen..].iter().map(|byte| u32::from(*byte)).collect();
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        let logits = model.forward(&ids, seen, &mut cache)?;
        seen = bytes.len();
        bytes.push(logits.squeeze(0)?.argmax(0)?.to_scalar::<u32>()? as u8);
    }
    Ok(String::from_utf8(bytes)?)
}

#[test]
fn it_runs() {
    main().unwrap();
}
