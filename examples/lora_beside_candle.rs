//! Adapters (LoRA) trained on candle's tensors, beside the same step by candle's own autograd: equal losses and gradients,
//! and how much memory each needs. Candle's matrix products compute gradients of frozen weights too.
//!
//! `cargo run --release --example lora_beside_candle -- qwen2.5-0.5b 64` takes another preset and sequence length.

use candle_core::backprop::GradStore;
use candle_core::{D, Device, Tensor, Var};
use candle_nn::{loss, ops, rotary_emb};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::HashMap;
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use trainer::{Config, Plan, Settings, Target, Trainer, configuration};

/// What candle's pull request 3773 measured on a GPU for Qwen2.5-Coder in bf16: as candle is, and with its change. It does
/// not say how long the sequences were.
const MEASURED: [(&str, &str); 3] = [
    ("qwen2.5-0.5b", "4.36 GB, 1.54 GB"),
    ("qwen2.5-1.5b", "12.4 GB, 3.56 GB"),
    ("qwen2.5-7b", "out of memory"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let preset = arguments.next().unwrap_or_else(|| "tiny".into());
    let seq = arguments.next().unwrap_or_else(|| "64".into());
    compare(&preset, seq.parse()?)?;
    println!(
        "on a GPU in bf16, 128 tokens (planned), and what candle's pull request 3773 measured:"
    );
    for (preset, measured) in MEASURED {
        let set = [
            "train.dtype=bf16",
            "data.seq=128",
            "batch.micro=1",
            "lora.rank=16",
        ];
        let settings = Settings::new(&configuration(preset, &set)?)?;
        let peak = Plan::new(&settings, Target::Cuda)?.peak_bytes;
        println!("  {preset:13} {:6.2} GB   {measured}", peak as f64 / 1e9);
    }
    Ok(())
}

/// One step here, and one by candle with the same weights.
fn compare(preset: &str, seq: usize) -> Result<(), Box<dyn Error>> {
    let seq_key = format!("data.seq={seq}");
    let set = [
        "train.device=cpu",
        "train.dtype=f32",
        "batch.micro=1",
        "batch.accum=1",
        "lora.rank=8",
        &seq_key,
    ];
    let mut trainer = Trainer::new(configuration(preset, &set)?)?;
    fill_factors_b(&mut trainer)?;
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let model = CandleModel::new(&trainer)?;
    let tokens: Vec<u32> = (0..=seq as u32).map(|place| place * 31 % 97).collect();
    let tokens = Tensor::from_vec(tokens, (1, seq + 1), &Device::Cpu)?;
    let (ids, targets) = (tokens.narrow(1, 0, seq)?, tokens.narrow(1, 1, seq)?);
    let (loss, gradients) = model.step(&ids, &targets)?;
    let candle_peak = PEAK.load(Ordering::Relaxed) - before;
    let outcome = trainer.step(&ids, &targets)?;
    assert_eq!(outcome.memory.peak.bytes, trainer.plan().peak_bytes);
    assert!(
        (outcome.loss - loss).abs() < 1e-5 * loss,
        "{} {loss}",
        outcome.loss
    );
    let mut furthest = 0f32;
    for (name, factor) in &model.factors {
        let theirs = gradients
            .get(factor)
            .ok_or("candle gives every factor a gradient")?;
        let ours = trainer.gradient(name)?;
        furthest = furthest.max(largest(&(&ours - theirs)?)? / largest(theirs)?);
    }
    assert!(furthest < 1e-3, "{furthest}");
    println!(
        "{preset} in f32, {seq} tokens on the CPU: loss {loss}, gradients of factors within {furthest:.0e}"
    );
    println!(
        "  candle   {candle_peak:>12} bytes; it keeps {} gradients, {} of them of factors",
        gradients.get_ids().count(),
        model.factors.len()
    );
    println!(
        "  trainer  {:>12} bytes, as planned",
        outcome.memory.peak.bytes
    );
    Ok(())
}

/// Sets factors B, which begin at zero, so that factors A have gradients.
fn fill_factors_b(trainer: &mut Trainer) -> Result<(), Box<dyn Error>> {
    let names: Vec<String> = trainer.parameter_names().map(String::from).collect();
    for name in names.iter().filter(|name| name.contains(".lora_B.")) {
        let zeros = trainer.parameter(name)?;
        let values = (0..zeros.elem_count()).map(|place| ((place * 37 % 101) as f32 - 50.0) * 1e-3);
        let values = Tensor::from_iter(values, &Device::Cpu)?.reshape(zeros.dims())?;
        trainer.set_parameter(name, &values)?;
    }
    Ok(())
}

fn largest(x: &Tensor) -> candle_core::Result<f32> {
    x.abs()?.max_all()?.to_scalar()
}

/// A model of Llama's kind in candle's operations, with its weights under the names of Hugging Face's files.
struct CandleModel {
    config: Config,
    frozen: HashMap<String, Tensor>,
    factors: HashMap<String, Var>,
}

impl CandleModel {
    fn new(trainer: &Trainer) -> Result<CandleModel, Box<dyn Error>> {
        let (mut frozen, mut factors) = (HashMap::new(), HashMap::new());
        for name in trainer.parameter_names() {
            let values = trainer.parameter(name)?;
            if name.contains(".lora_") {
                factors.insert(name.to_string(), Var::from_tensor(&values)?);
            } else {
                frozen.insert(name.to_string(), values);
            }
        }
        let config = trainer.config().clone();
        Ok(CandleModel {
            config,
            frozen,
            factors,
        })
    }

    /// The loss, and the gradients of the backward pass.
    fn step(&self, ids: &Tensor, targets: &Tensor) -> candle_core::Result<(f32, GradStore)> {
        let loss =
            loss::cross_entropy(&self.logits(&ids.flatten_all()?)?, &targets.flatten_all()?)?;
        Ok((loss.to_scalar()?, loss.backward()?))
    }

    fn logits(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let embedding = &self.frozen["model.embed_tokens.weight"];
        let mut x = embedding.index_select(ids, 0)?; // [s, h]
        for layer in 0..self.config.model.layers {
            let block = format!("model.layers.{layer}");
            let normed = self.norm(&x, &format!("{block}.input_layernorm"))?;
            x = (x + self.attention(&normed, &format!("{block}.self_attn"))?)?;
            let normed = self.norm(&x, &format!("{block}.post_attention_layernorm"))?;
            let gate = self.linear(&normed, &format!("{block}.mlp.gate_proj"))?;
            let up = self.linear(&normed, &format!("{block}.mlp.up_proj"))?;
            x = (x + self.linear(&(gate.silu()? * up)?, &format!("{block}.mlp.down_proj"))?)?;
        }
        let head = self.frozen.get("lm_head.weight").unwrap_or(embedding);
        self.norm(&x, "model.norm")?.matmul(&head.t()?) // [s, v]
    }

    fn attention(&self, x: &Tensor, name: &str) -> candle_core::Result<Tensor> {
        let (model, seq) = (&self.config.model, x.dim(0)?);
        let split = |module: &str, heads: usize| {
            let x = self.linear(x, &format!("{name}.{module}"))?;
            x.reshape((1, seq, heads, model.head_dim))?
                .transpose(1, 2)?
                .contiguous()
        };
        let half = model.head_dim / 2;
        let frequency = |at: usize| model.rope_theta.powf(-(at as f64) / half as f64) as f32;
        let frequencies: Vec<f32> = (0..half).map(frequency).collect();
        let places: Vec<f32> = (0..seq).map(|place| place as f32).collect();
        let angles = Tensor::from_vec(places, (seq, 1), &Device::Cpu)?
            .matmul(&Tensor::from_vec(frequencies, (1, half), &Device::Cpu)?)?;
        let turned = |x: Tensor| rotary_emb::rope_slow(&x, &angles.cos()?, &angles.sin()?);
        let repeated = |x: Tensor| {
            let group = model.heads / model.kv_heads;
            let all = (1, model.kv_heads, group, seq, model.head_dim);
            x.unsqueeze(2)?
                .expand(all)?
                .reshape((1, model.heads, seq, model.head_dim))
        };
        let q = turned(split("q_proj", model.heads)?)?;
        let k = repeated(turned(split("k_proj", model.kv_heads)?)?)?;
        let v = repeated(split("v_proj", model.kv_heads)?)?;
        let later = |at: usize| {
            if at % seq > at / seq {
                f32::NEG_INFINITY
            } else {
                0.0
            }
        };
        let mask =
            Tensor::from_iter((0..seq * seq).map(later), &Device::Cpu)?.reshape((seq, seq))?;
        let scores = (q.matmul(&k.t()?)? / (model.head_dim as f64).sqrt())?;
        let shares = ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
        let o = shares
            .matmul(&v)?
            .transpose(1, 2)?
            .reshape((seq, model.heads * model.head_dim))?;
        self.linear(&o, &format!("{name}.o_proj"))
    }

    fn linear(&self, x: &Tensor, module: &str) -> candle_core::Result<Tensor> {
        let mut y = x.matmul(&self.frozen[&format!("{module}.weight")].t()?)?;
        if let Some(bias) = self.frozen.get(&format!("{module}.bias")) {
            y = y.broadcast_add(bias)?;
        }
        let factor = |part: &str| self.factors.get(&format!("{module}.{part}.weight"));
        match (factor("lora_A"), factor("lora_B")) {
            // Alpha is the rank, so the scale is 1.
            (Some(a), Some(b)) => y + x.matmul(&a.t()?)?.matmul(&b.t()?)?,
            _ => Ok(y),
        }
    }

    fn norm(&self, x: &Tensor, module: &str) -> candle_core::Result<Tensor> {
        let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
        let deviation = (mean + self.config.model.norm_eps)?.sqrt()?;
        x.broadcast_div(&deviation)?
            .broadcast_mul(&self.frozen[&format!("{module}.weight")])
    }
}

/// Bytes that the program holds, and the most that it ever held: candle allocates each tensor of the CPU.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counted;

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTED: Counted = Counted;

#[test]
fn it_runs() {
    main().unwrap();
}
