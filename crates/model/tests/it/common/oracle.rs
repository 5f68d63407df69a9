//! The oracle: the same model in candle, f64, from primitive operations that its autograd knows (its fused softmax,
//! norm and rotary embedding drop gradients in silence).

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{Embedding, Linear, Module};
use model::{
    ActivationFunction, DeltaConfig, LatentConfig, ModelConfig, NormKind, NormPlacement,
    QkNormExtent, RopeScaling, RouterAuxKind, ScoreKind,
};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Alpha of all adapters.
pub const LORA_ALPHA: f64 = 6.0;

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
    /// What each router of the last forward pass computed.
    pub routers: RefCell<Vec<Routed>>,
}

/// What a router computed.
pub struct Routed {
    /// `[n, e]`: what losses of balance see.
    scores: Tensor,
    /// `[n, e]`.
    logits: Tensor,
    /// `[n, e]`: 1 where an expert was chosen.
    chosen: Tensor,
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
        let is_gpt2 = self.config.norm == NormKind::Layer;
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
        let logits = (logits / self.config.logits_scaling)?;
        let logits = capped(logits, self.config.final_logit_softcapping)?;
        let wanted = Tensor::from_vec(to_u32(&wanted), count, &Device::Cpu)?;
        candle_nn::loss::cross_entropy(&logits, &wanted)? * count as f64
    }

    /// The normalised output of Llama's blocks.
    fn llama(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.rows("model.embed_tokens.weight", ids)?; // [b, s, h]
        x = (x * self.config.embedding_multiplier)?;
        if self.config.scale_embedding {
            x = (x * (self.config.hidden as f64).sqrt())?;
        }
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
            let attended = self.linear(
                &self.attend([q?, k?, v?], None, None)?,
                &name("attn.c_proj"),
            )?;
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

    /// A parameter; the matrix of a layer with an adapter has the product of its factors added.
    fn var(&self, name: &str) -> Tensor {
        let weight = self.vars[name].as_tensor().clone();
        let factor = |which: &str| {
            let module = name.strip_suffix("weight")?;
            self.vars.get(&format!("{module}lora_{which}.weight"))
        };
        match (factor("A"), factor("B")) {
            (Some(a), Some(b)) => {
                let scale = LORA_ALPHA / a.dims()[0] as f64;
                (weight + b.matmul(a).unwrap() * scale).unwrap()
            }
            _ => weight,
        }
    }

    fn block(&self, layer: usize, x: &Tensor) -> Result<Tensor> {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        if self.config.norm_placement == NormPlacement::After {
            let attended = self.attention(x, layer)?;
            let x = (x + self.norm(&attended, &name("post_attention_layernorm.weight"))?)?;
            let made = self.gated(&x, &name("mlp"))?;
            return x + self.norm(&made, &name("post_feedforward_layernorm.weight"))?;
        }
        if self.config.norm_placement == NormPlacement::Both {
            let h = self.norm(x, &name("input_layernorm.weight"))?;
            let attended = self.attention(&h, layer)?;
            let x = (x + self.norm(&attended, &name("post_attention_layernorm.weight"))?)?;
            let h = self.norm(&x, &name("pre_feedforward_layernorm.weight"))?;
            let made = self.gated(&h, &name("mlp"))?;
            return x + self.norm(&made, &name("post_feedforward_layernorm.weight"))?;
        }
        let multiplier = self.config.residual_multiplier;
        let mut h = self.norm(x, &name("input_layernorm.weight"))?;
        let x = (x + (self.attention(&h, layer)? * multiplier)?)?;
        if !self.is_parallel {
            h = self.norm(&x, &name("post_attention_layernorm.weight"))?;
        }
        let made = match self.config.has_experts(layer) {
            true => self.experts(&h, &name("mlp"))?,
            false => self.gated(&h, &name("mlp"))?,
        };
        x + (made * multiplier)?
    }

    fn gated(&self, h: &Tensor, name: &str) -> Result<Tensor> {
        let gate = self.linear(h, &format!("{name}.gate_proj"))?;
        let up = self.linear(h, &format!("{name}.up_proj"))?;
        let act = self.act(&gate, &up)?;
        self.linear(&act, &format!("{name}.down_proj"))
    }

    /// The function of gate and up.
    fn act(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        match self.config.activation {
            ActivationFunction::GegluTanh => gelu(gate)? * up,
            ActivationFunction::ClampedSwiglu => {
                let (alpha, limit) = (self.config.swiglu_alpha, self.config.swiglu_limit);
                let gate = gate.minimum(limit)?;
                let up = up.clamp(-limit, limit)?;
                (&gate * sigmoid(&(&gate * alpha)?)?)? * (up + 1.0)?
            }
            _ => silu(gate)? * up,
        }
    }

    /// Every expert computes every token, and weights are 0 where it was not chosen.
    fn experts(&self, h: &Tensor, name: &str) -> Result<Tensor> {
        let experts = self.config.experts.as_ref().expect("the layer has experts");
        let tokens = h.flatten_to(1)?; // [n, h]
        let weights = self.weights(&tokens, name)?;
        let [up, down] =
            ["gate_up_proj", "down_proj"].map(|part| self.var(&format!("{name}.experts.{part}")));
        let mut out = tokens.zeros_like()?;
        let bias = |part: &str, expert: usize, width: usize| {
            let name = format!("{name}.experts.{part}_bias");
            self.var(&name).narrow(0, expert * width, width)
        };
        for expert in 0..experts.count {
            let mut gate_up = tokens.matmul(&up.get(expert)?.t()?)?;
            if experts.biases {
                let bias = bias("gate_up_proj", expert, 2 * experts.ffn)?;
                gate_up = gate_up.broadcast_add(&bias)?;
            }
            let gate = gate_up.narrow(1, 0, experts.ffn)?;
            let act = self.act(&gate, &gate_up.narrow(1, experts.ffn, experts.ffn)?)?;
            let mut made = act.matmul(&down.get(expert)?.t()?)?;
            if experts.biases {
                let bias = bias("down_proj", expert, self.config.hidden)?;
                made = made.broadcast_add(&bias)?;
            }
            out = (out + made.broadcast_mul(&weights.narrow(1, expert, 1)?)?)?;
        }
        if experts.shared_ffn > 0 {
            let shared = match experts.shared_gate {
                true => "shared_expert",
                false => "shared_experts",
            };
            let mut made = self.gated(&tokens, &format!("{name}.{shared}"))?;
            if experts.shared_gate {
                let gate = self.linear(&tokens, &format!("{name}.shared_expert_gate"))?;
                made = made.broadcast_mul(&sigmoid(&gate)?)?;
            }
            out = (out + made)?;
        }
        out.reshape(h.dims())
    }

    /// `[n, e]`: the weight of each expert for each token.
    fn weights(&self, tokens: &Tensor, name: &str) -> Result<Tensor> {
        let experts = self.config.experts.as_ref().expect("the layer has experts");
        // Files of Mixtral and of gpt-oss have other names.
        let of_mixtral = name.replace(".mlp", ".block_sparse_moe");
        let mut names = [
            format!("{name}.gate"),
            format!("{of_mixtral}.gate"),
            format!("{name}.router"),
        ]
        .into_iter();
        let gate = names.find(|gate| self.vars.contains_key(&format!("{gate}.weight")));
        let logits = self.linear(tokens, &gate.expect("the layer has a router"))?;
        let is_softmax = experts.score == ScoreKind::Softmax;
        let scores = match is_softmax {
            true => softmax(&logits)?,
            false => sigmoid(&logits)?,
        };
        let bias = self
            .vars
            .get(&format!("{name}.gate.e_score_correction_bias"));
        let choices = match bias {
            Some(bias) => scores.broadcast_add(bias.as_tensor())?,
            None => scores.clone(),
        };
        let rows = choices.to_vec2::<f64>()?.into_iter();
        let chosen: Vec<f64> = rows.flat_map(|row| self.chosen(&row)).collect();
        let chosen = Tensor::from_vec(chosen, scores.dims(), &Device::Cpu)?;
        let mut weights = (&scores * &chosen)?;
        if experts.normed {
            weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        }
        let seen = match is_softmax {
            true => scores,
            false => scores.broadcast_div(&scores.sum_keepdim(1)?)?,
        };
        self.routers.borrow_mut().push(Routed {
            scores: seen,
            logits,
            chosen,
        });
        weights * experts.factor
    }

    /// 1 for the experts that a token with these choice scores goes to, 0 for others.
    fn chosen(&self, scores: &[f64]) -> Vec<f64> {
        let experts = self.config.experts.as_ref().expect("the layer has experts");
        let descending = |a: &f64, b: &f64| b.total_cmp(a);
        let size = experts.count / experts.groups;
        let best = if experts.score == ScoreKind::Softmax {
            1
        } else {
            2
        };
        let mut groups: Vec<(f64, usize)> = scores
            .chunks(size)
            .map(|group| {
                let mut sorted = group.to_vec();
                sorted.sort_by(descending);
                sorted.iter().take(best).sum()
            })
            .zip(0..)
            .collect();
        groups.sort_by(|a, b| descending(&a.0, &b.0));
        let open = groups
            .iter()
            .take(experts.chosen_groups)
            .map(|(_, group)| *group);
        let mut left: Vec<(f64, usize)> = open
            .flat_map(|group| group * size..(group + 1) * size)
            .map(|expert| (scores[expert], expert))
            .collect();
        left.sort_by(|a, b| descending(&a.0, &b.0));
        let mut chosen = vec![0.0; experts.count];
        for (_, expert) in left.into_iter().take(experts.chosen) {
            chosen[expert] = 1.0;
        }
        chosen
    }

    /// What routers add to the loss of a micro-batch that was computed last, with their coefficients. All tokens of its
    /// sequences of `seq` are padding from `lengths` on.
    pub fn router_loss(&self, lengths: &[usize], seq: usize) -> Result<Tensor> {
        let starts = (0..).step_by(seq).zip(lengths);
        let kept = starts.flat_map(|(start, length)| start..start + *length as u32);
        let kept = Tensor::from_iter(kept, &Device::Cpu)?;
        let without_padding = |routed: Routed| -> Result<Routed> {
            Ok(Routed {
                scores: routed.scores.index_select(&kept, 0)?,
                logits: routed.logits.index_select(&kept, 0)?,
                chosen: routed.chosen.index_select(&kept, 0)?,
            })
        };
        let routers = self.routers.take().into_iter().map(without_padding);
        let routers: Vec<Routed> = routers.collect::<Result<_>>()?;
        let experts = self.config.experts.as_ref().expect("the model has experts");
        let (count, choices) = (experts.count as f64, experts.chosen as f64);
        let mut z = Tensor::zeros((), DType::F64, &Device::Cpu)?;
        let mut aux = z.clone();
        for routed in &routers {
            let largest = routed.logits.max_keepdim(1)?.detach();
            let sums = routed
                .logits
                .broadcast_sub(&largest)?
                .exp()?
                .sum_keepdim(1)?;
            z = (z + (sums.log()? + largest)?.sqr()?.mean_all()?)?;
        }
        // sum_e count_e sum_e of some rows, over their number squared
        let product = |chosen: &Tensor, scores: &Tensor| -> Result<Tensor> {
            let tokens = chosen.dims()[0] as f64;
            (chosen.sum(0)? * scores.sum(0)?)?.sum_all()? * (count / (tokens * tokens))
        };
        match self.config.router_aux_kind {
            RouterAuxKind::Pooled => {
                let [chosen, scores] = [
                    |routed: &Routed| routed.chosen.clone(),
                    |routed: &Routed| routed.scores.clone(),
                ]
                .map(|of| Tensor::cat(&routers.iter().map(of).collect::<Vec<_>>(), 0));
                aux = product(&chosen?, &scores?)?;
            }
            RouterAuxKind::Layer => {
                for routed in &routers {
                    aux = (aux + (product(&routed.chosen, &routed.scores)? / choices)?)?;
                }
            }
            RouterAuxKind::Sequence => {
                for routed in &routers {
                    let mut start = 0;
                    for length in lengths {
                        let chosen = routed.chosen.narrow(0, start, *length)?;
                        let scores = routed.scores.narrow(0, start, *length)?;
                        let mean_over = choices * lengths.len() as f64;
                        aux = (aux + (product(&chosen, &scores)? / mean_over)?)?;
                        start += length;
                    }
                }
            }
        }
        (aux * self.config.router_aux)? + (z * self.config.router_z_loss)?
    }

    /// Latent attention; `x [b, s, h]`.
    fn latent_attention(&self, x: &Tensor, name: &str, latent: &LatentConfig) -> Result<Tensor> {
        let ModelConfig {
            heads, head_dim, ..
        } = *self.config;
        let (rows, seq, _) = x.dims3()?;
        let part = |part: &str| format!("{name}.{part}");
        let normed = |x: &Tensor, weight: &str| self.norm_by(x, &self.var(&part(weight)), 1e-6);
        let q = match latent.q {
            Some(_) => {
                let latent = self.linear(x, &part("q_a_proj"))?;
                let latent = normed(&latent, "q_a_layernorm.weight")?;
                self.linear(&latent, &part("q_b_proj"))?
            }
            None => self.linear(x, &part("q_proj"))?,
        };
        let (turned, v_dim) = (latent.rotary_dim, latent.v_head_dim);
        let plain = head_dim - turned;
        let q = q.reshape((rows, seq, heads, head_dim))?;
        let q_turned = self.turn(&q.narrow(3, plain, turned)?, latent.neighbours)?;
        let q = Tensor::cat(&[q.narrow(3, 0, plain)?, q_turned], 3)?;
        let kv = self.linear(x, &part("kv_a_proj_with_mqa"))?;
        let k_turned = kv.narrow(2, latent.kv, turned)?.unsqueeze(2)?;
        let k_turned = self.turn(&k_turned, latent.neighbours)?;
        let k_turned = k_turned.broadcast_as((rows, seq, heads, turned))?;
        let c_kv = normed(&kv.narrow(2, 0, latent.kv)?, "kv_a_layernorm.weight")?;
        let kv = self.linear(&c_kv, &part("kv_b_proj"))?;
        let kv = kv.reshape((rows, seq, heads, plain + v_dim))?;
        let k = Tensor::cat(&[kv.narrow(3, 0, plain)?, k_turned.contiguous()?], 3)?;
        let by_head = |x: Tensor| x.transpose(1, 2)?.contiguous();
        let factor = match &self.config.rope_scaling {
            Some(RopeScaling::Yarn {
                factor,
                mscale_all_dim: Some(weight),
                ..
            }) => (0.1 * weight * factor.ln() + 1.0).powi(2),
            _ => 1.0,
        };
        let v = by_head(kv.narrow(3, plain, v_dim)?)?;
        let out = self.attend([(by_head(q)? * factor)?, by_head(k)?, v], None, None)?;
        self.linear(&out, &part("o_proj"))
    }

    /// Turns heads; neighbouring columns together, or the two halves.
    fn turn(&self, x: &Tensor, are_neighbours: bool) -> Result<Tensor> {
        if !are_neighbours {
            return self.rotate(x);
        }
        let (rows, seq, heads, dim) = x.dims4()?;
        let pairs = x.reshape((rows, seq, heads, dim / 2, 2))?;
        let halves = pairs.transpose(3, 4)?.contiguous()?;
        let turned = self.rotate(&halves.reshape((rows, seq, heads, dim))?)?;
        let pairs = turned.reshape((rows, seq, heads, 2, dim / 2))?;
        let pairs = pairs.transpose(3, 4)?.contiguous()?;
        pairs.reshape((rows, seq, heads, dim))
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let bias = self.vars.get(&format!("{name}.bias"));
        let bias = bias.map(|bias| bias.as_tensor().clone());
        Linear::new(self.var(&format!("{name}.weight")), bias).forward(x)
    }

    fn norm(&self, x: &Tensor, weight: &str) -> Result<Tensor> {
        let weight = match self.config.zero_centered_norm {
            true => (self.var(weight) + 1.0)?,
            false => self.var(weight),
        };
        self.norm_by(x, &weight, self.config.norm_eps)
    }

    fn norm_by(&self, x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let scale = (mean_square + eps)?.sqrt()?.recip()?;
        x.broadcast_mul(&scale)?.broadcast_mul(weight)
    }

    /// Causal attention with grouped queries; `x [b, s, h]`.
    fn attention(&self, x: &Tensor, layer: usize) -> Result<Tensor> {
        let name = format!("model.layers.{layer}.self_attn");
        if let Some(latent) = &self.config.latent {
            return self.latent_attention(x, &name, latent);
        }
        if let Some(delta) = self
            .config
            .delta
            .as_ref()
            .filter(|_| self.config.has_delta(layer))
        {
            return self.gated_delta(x, &format!("model.layers.{layer}.linear_attn"), delta);
        }
        let ModelConfig {
            heads,
            kv_heads,
            head_dim,
            attention_gate,
            ..
        } = *self.config;
        let (rows, seq, _) = x.dims3()?;
        let project = |part: &str, heads: usize| -> Result<Tensor> {
            self.linear(x, &format!("{name}.{part}_proj"))?
                .reshape((rows, seq, heads, ()))
        };
        // Each head of queries has its gate behind it.
        let of_head = |part: &str, heads: usize| project(part, heads)?.narrow(3, 0, head_dim);
        let [q, k] = [("q", heads), ("k", kv_heads)].map(|(part, heads)| -> Result<Tensor> {
            let mut x = of_head(part, heads)?;
            if self.config.qk_norm {
                let together = match self.config.qk_norm_over {
                    QkNormExtent::Head => x,
                    QkNormExtent::All => x.reshape((rows, seq, 1, heads * head_dim))?,
                };
                let weight = format!("{name}.{part}_norm.weight");
                x = self
                    .norm(&together, &weight)?
                    .reshape((rows, seq, heads, head_dim))?;
            }
            x = self.rotate_share(&x, layer)?;
            if part == "q" {
                x = self.tempered(&x)?;
            }
            x.transpose(1, 2)?.contiguous() // [b, heads, s, d]
        });
        let v = project("v", kv_heads)?.transpose(1, 2)?.contiguous()?;
        let group = heads / kv_heads;
        let repeat = |x: Tensor| -> Result<Tensor> {
            x.unsqueeze(2)?
                .broadcast_as((rows, kv_heads, group, seq, head_dim))?
                .contiguous()?
                .reshape((rows, heads, seq, head_dim))
        };
        let window = self.config.window(layer);
        let sinks = format!("{name}.sinks");
        let sinks = self.config.attention_sinks.then(|| self.var(&sinks));
        let mut out = self.attend([q?, repeat(k?)?, repeat(v)?], window, sinks)?;
        if attention_gate {
            let gate = project("q", heads)?.narrow(3, head_dim, head_dim)?;
            out = (out * sigmoid(&gate.flatten_from(2)?)?)?;
        }
        self.linear(&out, &format!("{name}.o_proj"))
    }

    /// The gated delta rule, token by token; `x [b, s, h]`.
    fn gated_delta(&self, x: &Tensor, name: &str, delta: &DeltaConfig) -> Result<Tensor> {
        let (rows, seq, _) = x.dims3()?;
        let heads = delta.value_heads;
        let project = |part: &str| self.linear(x, &format!("{name}.in_proj_{part}"));
        let parts = match delta.by_key_head {
            true => [project("qkvz")?, project("ba")?].to_vec(),
            false => [project("qkv")?, project("z")?, project("b")?, project("a")?].to_vec(),
        };
        let joined = Tensor::cat(&parts, 2)?; // [b, s, q k v z b a]
        let (mixed, values) = (delta.mixed_width(), delta.value_width());
        let of_head = |at: usize| joined.narrow(2, mixed + values + at * heads, heads);
        let z = joined.narrow(2, mixed, values)?;
        let mixed = silu(&self.convolution(&joined.narrow(2, 0, mixed)?, name)?)?;

        let of_heads = |x: &Tensor, own: usize| {
            let x = x.reshape((rows, seq, own, 1, ()))?;
            let width = x.dim(4)?;
            let x = x.broadcast_as((rows, seq, own, heads / own, width))?;
            x.reshape((rows, seq, heads, width))?.transpose(1, 2) // [b, heads, s, d]
        };
        let [keys, _, _] = delta.qkv_widths();
        let normed = |first: usize| -> Result<Tensor> {
            let x = of_heads(&mixed.narrow(2, first, keys)?, delta.key_heads)?;
            x.broadcast_div(&(x.sqr()?.sum_keepdim(3)? + 1e-6)?.sqrt()?)
        };
        let (q, k) = (normed(0)?, normed(keys)?);
        let q = (q / (delta.key_head_dim as f64).sqrt())?;
        let v = of_heads(&mixed.narrow(2, 2 * keys, values)?, heads)?;
        let beta = of_heads(&sigmoid(&of_head(0)?)?, heads)?;
        let a = of_head(1)?.broadcast_add(&self.var(&format!("{name}.dt_bias")))?;
        let rate = self.var(&format!("{name}.A_log")).exp()?.neg()?;
        let softplus = (a.exp()? + 1.0)?.log()?;
        let decay = of_heads(&softplus.broadcast_mul(&rate)?.exp()?, heads)?;

        let sizes = (rows, heads, delta.key_head_dim, delta.value_head_dim);
        let mut state = Tensor::zeros(sizes, DType::F64, &Device::Cpu)?;
        let mut out = Vec::new();
        for token in 0..seq {
            let at = |x: &Tensor| x.narrow(2, token, 1)?.contiguous();
            let (q, k, v) = (at(&q)?, at(&k)?, at(&v)?); // [b, heads, 1, d]
            state = state.broadcast_mul(&at(&decay)?)?;
            let change = (v - k.matmul(&state)?)?.broadcast_mul(&at(&beta)?)?;
            state = (state + k.t()?.contiguous()?.matmul(&change)?)?;
            out.push(q.matmul(&state)?);
        }
        let out = Tensor::cat(&out, 2)?.transpose(1, 2)?.contiguous()?; // [b, s, heads, d]
        let weight = self.var(&format!("{name}.norm.weight"));
        let out = self.norm_by(&out, &weight, self.config.norm_eps)?;
        self.linear(
            &(out.flatten_from(2)? * silu(&z)?)?,
            &format!("{name}.out_proj"),
        )
    }

    /// The causal convolution of each column of `x [b, s, c]` in front of the gated delta rule.
    fn convolution(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let weight = self.var(&format!("{name}.conv1d.weight")); // [c, taps]
        let (channels, taps) = weight.dims2()?;
        let (seq, padded) = (x.dim(1)?, x.pad_with_zeros(1, taps - 1, 0)?);
        let term = |tap: usize| {
            let weight = weight.narrow(1, tap, 1)?.reshape((1, 1, channels))?;
            padded.narrow(1, tap, seq)?.broadcast_mul(&weight)
        };
        (1..taps).try_fold(term(0)?, |sum, tap| sum + term(tap)?)
    }

    /// `[b, s, heads d]` as `[b, heads, s, d]`.
    fn heads(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, seq, _) = x.dims3()?;
        let x = x.reshape((rows, seq, self.config.heads, self.config.head_dim))?;
        x.transpose(1, 2)?.contiguous()
    }

    /// Causal attention of as many key heads as query heads, `[b, heads, s, d]`; gives `[b, s, heads d]`. A key is hidden that
    /// is a whole window or more before its query. The score of a head's sink joins the softmax, and has no value.
    fn attend(
        &self,
        [q, k, v]: [Tensor; 3],
        window: Option<usize>,
        sinks: Option<Tensor>,
    ) -> Result<Tensor> {
        let (rows, heads, seq, head_dim) = q.dims4()?;
        let scale = self.config.attention_multiplier;
        let scale = scale.unwrap_or((head_dim as f64).sqrt().recip());
        let scores = (q.matmul(&k.t()?.contiguous()?)? * scale)?;
        let scores = capped(scores, self.config.attn_logit_softcapping)?;
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
        let probs = match sinks {
            None => softmax(&scores)?,
            Some(sinks) => {
                let sinks = sinks.reshape((1, heads, 1, 1))?;
                let sinks = sinks.broadcast_as((rows, heads, seq, 1))?;
                let with_sinks = Tensor::cat(&[scores, sinks.contiguous()?], 3)?;
                softmax(&with_sinks)?.narrow(3, 0, seq)?.contiguous()?
            }
        };
        let out = probs.matmul(&v)?.transpose(1, 2)?.contiguous()?;
        out.reshape((rows, seq, heads * v.dims()[3]))
    }

    /// Queries times a factor that grows with their position; `x [b, s, heads, d]`.
    fn tempered(&self, x: &Tensor) -> Result<Tensor> {
        let (Some(beta), Some(scaling)) =
            (self.config.query_temperature, &self.config.rope_scaling)
        else {
            return Ok(x.clone());
        };
        let seq = x.dims4()?.1;
        let original = scaling.original_max_position().expect("it has one");
        let at = |position: usize| 1.0 + beta * ((position / original) as f64 + 1.0).ln();
        let factors: Vec<f64> = (0..seq).map(at).collect();
        x.broadcast_mul(&Tensor::from_vec(factors, (1, seq, 1, 1), &Device::Cpu)?)
    }

    /// Rotates the first columns of every head, unless the layer turns nothing; `x [b, s, heads, d]`.
    fn rotate_share(&self, x: &Tensor, layer: usize) -> Result<Tensor> {
        if self.config.no_rope_layers.contains(&layer) {
            return Ok(x.clone());
        }
        let (dim, turned) = (x.dims4()?.3, self.config.rotary_dim());
        let rotated = self.rotate_in(&x.narrow(3, 0, turned)?, self.config.window(layer))?;
        match dim - turned {
            0 => Ok(rotated),
            rest => Tensor::cat(&[rotated, x.narrow(3, turned, rest)?], 3),
        }
    }

    /// Rotates the pairs (i, i + d / 2) of every head; `x [b, s, heads, d]`.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        self.rotate_in(x, None)
    }

    /// The same in a layer with this window.
    fn rotate_in(&self, x: &Tensor, window: Option<usize>) -> Result<Tensor> {
        let (_, seq, _, dim) = x.dims4()?;
        let half = dim / 2;
        let of_window = self.config.window_rope_theta.filter(|_| window.is_some());
        let scaling = self.config.rope_scaling.as_ref();
        let scaling = scaling.filter(|_| of_window.is_none());
        let theta = of_window.unwrap_or(self.config.rope_theta);
        let frequency = |pair| self.frequency(pair, (theta, scaling), seq);
        let angle = |at: usize| (at / half) as f64 * frequency(at % half);
        let amplitude = match scaling {
            Some(RopeScaling::Yarn {
                factor,
                attention_factor,
                ..
            }) => attention_factor.unwrap_or(0.1 * factor.ln() + 1.0),
            Some(RopeScaling::LongRope {
                factor,
                original_max_position,
                ..
            }) => (1.0 + factor.ln() / (*original_max_position as f64).ln()).sqrt(),
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

    /// Radians a position of a pair in a sequence of `seq`, with the scaling as Hugging Face writes it: Llama 3's by wavelength,
    /// YaRN's by dimension.
    fn frequency(
        &self,
        pair: usize,
        (theta, scaling): (f64, Option<&RopeScaling>),
        seq: usize,
    ) -> f64 {
        let dim = self.config.rotary_dim() as f64;
        let plain = theta.powf(-2.0 * pair as f64 / dim);
        let wavelength = 2.0 * std::f64::consts::PI / plain;
        let Some(scaling) = scaling else {
            return plain;
        };
        match *scaling {
            RopeScaling::LongRope {
                original_max_position,
                ref short_factor,
                ref long_factor,
                ..
            } => match seq > original_max_position {
                true => plain / long_factor[pair],
                false => plain / short_factor[pair],
            },
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
                    dim * waves.ln() / (2.0 * theta.ln())
                };
                let (low, high) = (dimension(beta_fast).floor(), dimension(beta_slow).ceil());
                let (low, high) = (low.max(0.0), high.min(dim - 1.0));
                let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain / factor * ramp + plain * (1.0 - ramp)
            }
        }
    }
}

/// x / (1 + e^-x)
fn silu(x: &Tensor) -> Result<Tensor> {
    x / (x.neg()?.exp()? + 1.0)?
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

fn softmax(x: &Tensor) -> Result<Tensor> {
    let exponentials = x
        .broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?
        .exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

/// c tanh(x / c), if there is a c.
fn capped(x: Tensor, cap: Option<f64>) -> Result<Tensor> {
    match cap {
        Some(cap) => (x / cap)?.tanh()? * cap,
        None => Ok(x),
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
