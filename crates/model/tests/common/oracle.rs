//! The oracle: the same model in candle, f64, from primitive operations that its autograd knows (its fused softmax,
//! norm and rotary embedding drop gradients in silence).

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{Embedding, Linear, Module};
use model::{Family, ModelConfig, RopeScaling};
use std::collections::BTreeMap;

/// Parameters by Hugging Face name.
pub type Vars = BTreeMap<String, Var>;

/// The oracle of one model.
pub struct Oracle<'a> {
    /// The shape of the model.
    pub config: &'a ModelConfig,
    /// Its parameters.
    pub vars: &'a Vars,
    /// Whether attention and feed-forward run in parallel from one norm.
    pub is_parallel: bool,
}

impl Oracle<'_> {
    /// The sum of the losses of all targets that are not negative; `ids` and `targets` are `[rows, seq]`.
    pub fn loss_sum(
        &self,
        ids: &[i32],
        targets: &[i32],
        (rows, seq): (usize, usize),
    ) -> Result<Tensor> {
        let to_u32 = |values: &[i32]| -> Vec<u32> { values.iter().map(|id| *id as u32).collect() };
        let ids = Tensor::from_vec(to_u32(ids), (rows, seq), &Device::Cpu)?;
        let is_gpt2 = self.config.family() == Family::Gpt2;
        let (x, head) = match is_gpt2 {
            true => (self.gpt2(&ids)?, "transformer.wte.weight"),
            false => (self.llama(&ids)?, self.llama_head()),
        };
        let x = x.flatten_to(1)?; // [b s, h]
        let counted: Vec<u32> = (0..targets.len() as u32)
            .filter(|at| targets[*at as usize] >= 0)
            .collect();
        let wanted: Vec<i32> = targets
            .iter()
            .copied()
            .filter(|target| *target >= 0)
            .collect();
        let count = counted.len();
        let counted = Tensor::from_vec(counted, count, &Device::Cpu)?;
        let logits = Linear::new(self.var(head), None).forward(&x.index_select(&counted, 0)?)?;
        let wanted = Tensor::from_vec(to_u32(&wanted), count, &Device::Cpu)?;
        candle_nn::loss::cross_entropy(&logits, &wanted)? * count as f64
    }

    /// The normalised output of Llama's blocks.
    fn llama(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.rows("model.embed_tokens.weight", ids)?; // [b, s, h]
        for layer in 0..self.config.layers {
            x = self.block(layer, &x)?;
        }
        self.norm(&x, "model.norm.weight")
    }

    fn llama_head(&self) -> &'static str {
        match self.config.tie_embeddings {
            true => "model.embed_tokens.weight",
            false => "lm_head.weight",
        }
    }

    /// The normalised output of GPT-2's blocks, without dropout.
    fn gpt2(&self, ids: &Tensor) -> Result<Tensor> {
        let (rows, seq) = ids.dims2()?;
        let positions = Tensor::arange(0u32, seq as u32, &Device::Cpu)?;
        let positions = positions
            .unsqueeze(0)?
            .broadcast_as((rows, seq))?
            .contiguous()?;
        let mut x = (self.rows("transformer.wte.weight", ids)?
            + self.rows("transformer.wpe.weight", &positions)?)?;
        for layer in 0..self.config.layers {
            let name = |part: &str| format!("transformer.h.{layer}.{part}");
            let h = self.layer_norm(&x, &name("ln_1"))?;
            let qkv = self.linear(&h, &name("attn.c_attn"))?;
            let width = self.config.hidden;
            let [q, k, v] =
                [0, 1, 2].map(|part| self.heads(&qkv.narrow(2, part * width, width)?));
            let attended = self.linear(&self.attend(q?, k?, v?, None)?, &name("attn.c_proj"))?;
            x = (x + attended)?;
            let h = self.layer_norm(&x, &name("ln_2"))?;
            let act = gelu(&self.linear(&h, &name("mlp.c_fc"))?)?;
            x = (x + self.linear(&act, &name("mlp.c_proj"))?)?;
        }
        self.layer_norm(&x, "transformer.ln_f")
    }

    fn rows(&self, table: &str, ids: &Tensor) -> Result<Tensor> {
        Embedding::new(self.var(table), self.config.hidden).forward(ids)
    }

    fn layer_norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        let scale = (variance + self.config.norm_eps)?.sqrt()?.recip()?;
        let scaled = centred.broadcast_mul(&scale)?;
        let weighted = scaled.broadcast_mul(&self.var(&format!("{name}.weight")))?;
        weighted.broadcast_add(&self.var(&format!("{name}.bias")))
    }

    fn var(&self, name: &str) -> Tensor {
        self.vars[name].as_tensor().clone()
    }

    fn block(&self, layer: usize, x: &Tensor) -> Result<Tensor> {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let mut h = self.norm(x, &name("input_layernorm.weight"))?;
        let window = self.config.window(layer);
        let x = (x + self.attention(&h, &name("self_attn"), window)?)?;
        if !self.is_parallel {
            h = self.norm(&x, &name("post_attention_layernorm.weight"))?;
        }
        let gate = self.linear(&h, &name("mlp.gate_proj"))?;
        let up = self.linear(&h, &name("mlp.up_proj"))?;
        // silu(x) = x / (1 + e^-x)
        let silu = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
        x + self.linear(&(silu * up)?, &name("mlp.down_proj"))?
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let bias = self.vars.get(&format!("{name}.bias"));
        let bias = bias.map(|bias| bias.as_tensor().clone());
        Linear::new(self.var(&format!("{name}.weight")), bias).forward(x)
    }

    fn norm(&self, x: &Tensor, weight: &str) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let scale = (mean_square + self.config.norm_eps)?.sqrt()?.recip()?;
        x.broadcast_mul(&scale)?.broadcast_mul(&self.var(weight))
    }

    /// Causal attention with grouped queries; `x [b, s, h]`.
    fn attention(&self, x: &Tensor, name: &str, window: Option<usize>) -> Result<Tensor> {
        let ModelConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self.config;
        let (rows, seq, _) = x.dims3()?;
        let project = |part: &str, heads: usize| -> Result<Tensor> {
            self.linear(x, &format!("{name}.{part}_proj"))?
                .reshape((rows, seq, heads, head_dim))
        };
        let [q, k] = [("q", heads), ("k", kv_heads)].map(|(part, heads)| -> Result<Tensor> {
            let mut x = project(part, heads)?;
            if self.config.qk_norm {
                x = self.norm(&x, &format!("{name}.{part}_norm.weight"))?;
            }
            self.rotate(&x)?.transpose(1, 2)?.contiguous() // [b, heads, s, d]
        });
        let v = project("v", kv_heads)?.transpose(1, 2)?.contiguous()?;
        let group = heads / kv_heads;
        let repeat = |x: Tensor| -> Result<Tensor> {
            x.unsqueeze(2)?
                .broadcast_as((rows, kv_heads, group, seq, head_dim))?
                .contiguous()?
                .reshape((rows, heads, seq, head_dim))
        };
        let out = self.attend(q?, repeat(k?)?, repeat(v)?, window)?;
        self.linear(&out, &format!("{name}.o_proj"))
    }

    /// `[b, s, heads d]` as `[b, heads, s, d]`.
    fn heads(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, seq, _) = x.dims3()?;
        let x = x.reshape((rows, seq, self.config.heads, self.config.head_dim))?;
        x.transpose(1, 2)?.contiguous()
    }

    /// Causal attention of as many key heads as query heads, `[b, heads, s, d]`; gives `[b, s, heads d]`. A key is hidden that
    /// is a whole window or more before its query.
    fn attend(&self, q: Tensor, k: Tensor, v: Tensor, window: Option<usize>) -> Result<Tensor> {
        let (rows, heads, seq, head_dim) = q.dims4()?;
        let scores = (q.matmul(&k.t()?.contiguous()?)? / (head_dim as f64).sqrt())?;
        let is_hidden = |query: usize, key: usize| {
            key > query || window.is_some_and(|window| key + window <= query)
        };
        let hidden: Vec<f64> = (0..seq * seq)
            .map(|at| {
                if is_hidden(at / seq, at % seq) {
                    -1e30
                } else {
                    0.0
                }
            })
            .collect();
        let hidden = Tensor::from_vec(hidden, (seq, seq), &Device::Cpu)?;
        let scores = scores.broadcast_add(&hidden)?;
        let exponentials = scores
            .broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?
            .exp()?;
        let probs = exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)?;
        let out = probs.matmul(&v)?.transpose(1, 2)?.contiguous()?;
        out.reshape((rows, seq, heads * head_dim))
    }

    /// Rotates the pairs (i, i + d / 2) of every head; `x [b, s, heads, d]`.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let (_, seq, _, dim) = x.dims4()?;
        let half = dim / 2;
        let angle = |at: usize| (at / half) as f64 * self.frequency(at % half);
        let amplitude = match &self.config.rope_scaling {
            Some(RopeScaling::Yarn { factor, .. }) => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        };
        let table = |of: fn(f64) -> f64| {
            let angles = (0..seq * half).map(angle);
            let values: Vec<f64> = angles.map(|angle| amplitude * of(angle)).collect();
            Tensor::from_vec(values, (1, seq, 1, half), &Device::Cpu)
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        let (a, b) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second], 3)
    }

    /// Radians a position of a pair, with the scaling as Hugging Face writes it: Llama 3's by wavelength, YaRN's by dimension.
    fn frequency(&self, pair: usize) -> f64 {
        let dim = self.config.head_dim as f64;
        let plain = self.config.rope_theta.powf(-2.0 * pair as f64 / dim);
        let wavelength = 2.0 * std::f64::consts::PI / plain;
        let Some(scaling) = &self.config.rope_scaling else {
            return plain;
        };
        match *scaling {
            RopeScaling::Linear { factor } => plain / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position,
            } => {
                let original = original_max_position as f64;
                if wavelength < original / high {
                    plain
                } else if wavelength > original / low {
                    plain / factor
                } else {
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * plain / factor + smooth * plain
                }
            }
            RopeScaling::Yarn {
                factor,
                original_max_position,
                beta_fast,
                beta_slow,
                ..
            } => {
                let dimension = |turns: f64| {
                    let waves = original_max_position as f64 / (turns * 2.0 * std::f64::consts::PI);
                    dim * waves.ln() / (2.0 * self.config.rope_theta.ln())
                };
                let (low, high) = (dimension(beta_fast).floor(), dimension(beta_slow).ceil());
                let (low, high) = (low.max(0.0), high.min(dim - 1.0));
                let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain / factor * ramp + plain * (1.0 - ramp)
            }
        }
    }
}

/// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
fn gelu(x: &Tensor) -> Result<Tensor> {
    let cubic = (x + (x.powf(3.0)? * 0.044715)?)?;
    let tanh = (cubic * (2.0 / std::f64::consts::PI).sqrt())?.tanh()?;
    (x * (tanh + 1.0)?)? * 0.5
}

/// The gradients of every parameter; each must have one.
pub fn gradients(loss: &Tensor, vars: &Vars) -> Result<BTreeMap<String, Vec<f64>>> {
    let store = loss.backward()?;
    let gradient = |(name, var): (&String, &Var)| {
        let gradient = store
            .get(var)
            .unwrap_or_else(|| panic!("the oracle has no gradient of {name}"));
        Ok((name.clone(), gradient.flatten_all()?.to_vec1::<f64>()?))
    };
    vars.iter().map(gradient).collect()
}

/// A parameter of the oracle with given values.
pub fn var(values: &[f32], shape: &[usize]) -> Result<Var> {
    let values = Tensor::from_slice(values, shape, &Device::Cpu)?;
    Var::from_tensor(&values.to_dtype(DType::F64)?)
}
