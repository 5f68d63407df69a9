//! Latent attention (DeepSeek-V2, 2024): queries, keys and values from narrow latents. `t` tokens, `a` heads; a head of
//! queries and keys has `n` columns without a position, and `p` that the rotary embedding turns.

use super::Qkv;
use crate::parameters::{ParameterId, PartParameters};
use crate::stage::{Io, Stage};
use crate::{Activation, AttentionSpec, Extent, Label, LatentConfig, Linear, ModelError, Pass};
use kernels::Init;
use kernels::operation::{Copy, ExpandKeys, ExpandKeysBackward, Matmul, RotaryTail};
use memory::{Buffer, In, Out};

/// The rotary embedding of the last columns of heads.
#[derive(Clone, Copy)]
struct Tail {
    head_dim: usize,
    are_neighbours: bool,
}

impl Tail {
    fn turn(self, pass: &Pass, x: &mut Buffer, inverse: bool) -> Result<(), ModelError> {
        Ok(pass.kernels().run(RotaryTail {
            x: x.view_mut(),
            head_dim: self.head_dim,
            table: pass.rotary_table(),
            positions: pass.positions(),
            are_neighbours: self.are_neighbours,
            inverse,
        })?)
    }
}

/// The latents of queries, and of keys and values, before their norms, and the columns of keys that all heads share.
pub struct LatentDown {
    /// What is projected.
    pub input: Activation,
    /// The latent of queries; none: queries are made from the input.
    pub q: Option<Linear>,
    /// `[kv + p, h]`: the latent of keys and values, then the shared columns.
    kv: ParameterId,
    kv_width: usize,
    hidden: usize,
    rotary: Tail,
}

impl LatentDown {
    /// The latent of queries before its norm.
    pub const Q_A: Activation = Activation::new("q_a", "d_q_a", Label::MLA_LATENT);
    /// The latent of keys and values before its norm.
    pub const KV_A: Activation = Activation::new("kv_a", "d_kv_a", Label::MLA_LATENT);
    /// `[t, p]`: the columns of keys that all heads share, turned.
    pub const K_ROTARY: Activation = Activation::new("k_rotary", "d_k_rotary", Label::MLA_LATENT);
    /// The latent of queries.
    pub const C_Q: Activation = Activation::new("c_q", "d_c_q", Label::MLA_LATENT);
    /// The latent of keys and values.
    pub const C_KV: Activation = Activation::new("c_kv", "d_c_kv", Label::MLA_LATENT);
    /// Reciprocal root mean square of [`LatentDown::Q_A`].
    pub const RSTD_Q: Activation = Activation::new("rstd_q", "d_rstd_q", Label::MLA_LATENT);
    /// Reciprocal root mean square of [`LatentDown::KV_A`].
    pub const RSTD_KV: Activation = Activation::new("rstd_kv", "d_rstd_kv", Label::MLA_LATENT);

    /// Declares `q_a_proj` and `kv_a_proj_with_mqa`.
    pub fn declare(
        own: &mut PartParameters,
        input: Activation,
        hidden: usize,
        latent: &LatentConfig,
    ) -> LatentDown {
        let outputs = latent.kv + latent.rotary_dim;
        let q = latent
            .q
            .map(|width| Linear::declare(own, "self_attn.q_a_proj", [width, hidden], false));
        LatentDown {
            input,
            q,
            kv: own.matrix("self_attn.kv_a_proj_with_mqa.weight", [outputs, hidden]),
            kv_width: latent.kv,
            hidden,
            rotary: Tail {
                head_dim: latent.rotary_dim,
                are_neighbours: latent.neighbours,
            },
        }
    }

    fn trains(&self) -> bool {
        let q = self.q.iter().flat_map(Linear::parameters);
        q.chain([self.kv]).any(ParameterId::is_trained)
    }

    /// The two parts of the weight of keys and values, each with the activation that it makes.
    fn kv_parts<'p>(&self, pass: &'p Pass) -> [(Activation, In<'p>); 2] {
        let weight = pass.parameter(self.kv);
        let rows = weight.dims()[0];
        [
            (LatentDown::KV_A, weight.rows(0..self.kv_width)),
            (LatentDown::K_ROTARY, weight.rows(self.kv_width..rows)),
        ]
    }
}

impl Stage for LatentDown {
    fn name(&self) -> &'static str {
        "mla_down"
    }

    fn io(&self) -> Io {
        let q = self.q.as_ref().map(|q| (LatentDown::Q_A, q.outputs()));
        let kv = [
            (LatentDown::KV_A, self.kv_width),
            (LatentDown::K_ROTARY, self.rotary.head_dim),
        ];
        let written = q.into_iter().chain(kv);
        Io {
            reads: vec![self.input],
            writes: written
                .map(|(of, width)| (of, Extent::tokens(width)))
                .collect(),
            backward_reads: match self.trains() {
                true => vec![self.input],
                false => Vec::new(),
            },
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        let q = self.q.iter().flat_map(Linear::parameters);
        q.chain([self.kv]).collect()
    }

    fn flops_per_token(&self, _seq: usize) -> u64 {
        let q = self.q.as_ref().map_or(0, Linear::flops_per_token);
        q + 6 * self.hidden as u64 * (self.kv_width + self.rotary.head_dim) as u64
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let x = pass.pull(self.input)?;
        if let Some(linear) = &self.q {
            let mut q = pass.output(LatentDown::Q_A)?;
            if let Some(q) = &mut q {
                linear.forward(pass, q.view_mut(), x.view())?;
            }
            pass.put(LatentDown::Q_A, q);
        }
        for part in 0..2 {
            let (of, _) = self.kv_parts(pass)[part];
            let mut out = pass.output(of)?;
            if let Some(out) = &mut out {
                let (_, weight) = self.kv_parts(pass)[part];
                pass.kernels().run(Matmul {
                    out: out.view_mut(),
                    a: x.view(),
                    b: weight.t(),
                    bias: None,
                    init: Init::Overwrite,
                })?;
                if of == LatentDown::K_ROTARY {
                    self.rotary.turn(pass, out, false)?;
                }
            }
            pass.put(of, out);
        }
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let dkv = pass.gradient(LatentDown::KV_A);
        let mut dk = pass.gradient(LatentDown::K_ROTARY);
        self.rotary.turn(pass, &mut dk, true)?;
        let dq = self.q.as_ref().map(|q| (q, pass.gradient(LatentDown::Q_A)));
        if self.trains() {
            let x = pass.pull(self.input)?;
            if let Some((q, dq)) = &dq {
                q.add_gradient(pass, dq.view(), x.view())?;
            }
            self.add_gradient(pass, [dkv.view(), dk.view()], x.view())?;
            pass.release(self.input, x);
        }
        let (mut dx, mut init) = pass.gradient_to_add(self.input)?;
        if let Some((q, dq)) = &dq {
            q.input_gradient(pass, dx.view_mut(), init, (dq.view(), None))?;
            init = Init::Accumulate;
        }
        for ((_, weight), dy) in self.kv_parts(pass).into_iter().zip([&dkv, &dk]) {
            pass.kernels().run(Matmul {
                out: dx.view_mut(),
                a: dy.view(),
                b: weight,
                bias: None,
                init,
            })?;
            init = Init::Accumulate;
        }
        pass.file_gradient(self.input, dx);
        Ok(())
    }
}

impl LatentDown {
    /// The gradient of the weight of keys and values, a part at a time.
    fn add_gradient(&self, pass: &mut Pass, dy: [In; 2], x: In) -> Result<(), ModelError> {
        let kernels = pass.kernels();
        let Some((dweight, init)) = pass.accumulate(self.kv) else {
            return Ok(());
        };
        let (first, second) = dweight.split_at(self.kv_width);
        for (out, dy) in [first, second].into_iter().zip(dy) {
            kernels.run(Matmul {
                out,
                a: dy.t(),
                b: x,
                bias: None,
                init,
            })?;
        }
        Ok(())
    }
}

/// The matrix `[a (n + v), kv]` of keys and values as passes with a cache use it, which keep latents alone: queries are
/// multiplied by a head's rows of keys, and the sums of weighed latents by its rows of values (the absorbed form). There
/// are two products for each head.
#[derive(Clone, Copy)]
pub struct LatentHeads {
    weight: ParameterId,
    heads: usize,
    /// kv, n, p and v.
    latent: usize,
    own: usize,
    turned: usize,
    value: usize,
}

impl LatentHeads {
    /// The matrix.
    pub fn parameter(&self) -> ParameterId {
        self.weight
    }

    /// Queries of latents `[t, a (kv + p)]` from queries `[t, a (n + p)]`.
    fn queries(&self, pass: &Pass, mut out: Out, q: In) -> Result<(), ModelError> {
        let (of_out, of_q) = (self.latent + self.turned, self.own + self.turned);
        let rows = q.dims()[0] * self.heads;
        let by_head = out.reborrow().reshape([rows, of_out]);
        pass.kernels().run(Copy {
            out: by_head.columns(self.latent..of_out),
            x: q.reshape([rows, of_q]).columns(self.own..of_q),
        })?;
        let weight = pass.parameter(self.weight);
        for head in 0..self.heads {
            let [to, from] = [head * of_out, head * of_q];
            let first = head * (self.own + self.value);
            pass.kernels().run(Matmul {
                out: out.reborrow().columns(to..to + self.latent),
                a: q.columns(from..from + self.own),
                b: weight.rows(first..first + self.own),
                bias: None,
                init: Init::Overwrite,
            })?;
        }
        Ok(())
    }

    /// Outputs `[t, a v]` from sums of weighed latents `[t, a kv]`.
    pub(super) fn values(&self, pass: &Pass, mut out: Out, sums: In) -> Result<(), ModelError> {
        let weight = pass.parameter(self.weight);
        for head in 0..self.heads {
            let [to, from] = [head * self.value, head * self.latent];
            let end = (head + 1) * (self.own + self.value);
            pass.kernels().run(Matmul {
                out: out.reborrow().columns(to..to + self.value),
                a: sums.columns(from..from + self.latent),
                b: weight.rows(end - self.value..end).t(),
                bias: None,
                init: Init::Overwrite,
            })?;
        }
        Ok(())
    }
}

/// Queries, keys and values of all heads from their latents. In a pass with a cache, what attention over latents takes
/// stands in their places: queries of latents `[t, a (kv + p)]`, latents `[t, kv]`, and the shared columns `[t, p]`.
pub struct LatentUp {
    /// What queries are made from: their latent, or the block's normalised input.
    pub q_input: Activation,
    /// The queries.
    q: Linear,
    /// Keys without their shared columns, and values, head by head.
    kv: Linear,
    /// Its matrix, head by head.
    pub heads: LatentHeads,
    kv_widths: [usize; 2],
    rotary: Tail,
}

impl LatentUp {
    /// Queries, turned.
    pub const Q: Activation = Activation::new("q", "d_q", Label::MLA_UP_PROJ);
    /// Keys.
    pub const K: Activation = Activation::new("k", "d_k", Label::MLA_UP_PROJ);
    /// Values.
    pub const V: Activation = Activation::new("v", "d_v", Label::MLA_UP_PROJ);

    /// Declares `q_b_proj`, or without a latent of queries `q_proj`, and `kv_b_proj`.
    pub fn declare(
        own: &mut PartParameters,
        (hidden, input): (usize, Activation),
        attention: &AttentionSpec,
        latent: &LatentConfig,
    ) -> LatentUp {
        let (name, q_input, inputs) = match latent.q {
            Some(width) => ("self_attn.q_b_proj", LatentDown::C_Q, width),
            None => ("self_attn.q_proj", input, hidden),
        };
        let own_columns = attention.qk_head_dim - latent.rotary_dim;
        let of_head = own_columns + attention.v_head_dim;
        let kv_outputs = attention.heads * of_head;
        let q = Linear::declare(own, name, [attention.q_width(), inputs], false);
        let kv = Linear::declare(own, "self_attn.kv_b_proj", [kv_outputs, latent.kv], false);
        LatentUp {
            q_input,
            q,
            heads: LatentHeads {
                weight: kv.parameters()[0],
                heads: attention.heads,
                latent: latent.kv,
                own: own_columns,
                turned: latent.rotary_dim,
                value: attention.v_head_dim,
            },
            kv,
            kv_widths: attention.kv_widths(),
            rotary: Tail {
                head_dim: attention.qk_head_dim,
                are_neighbours: latent.neighbours,
            },
        }
    }
}

impl Stage for LatentUp {
    fn name(&self) -> &'static str {
        "mla_up"
    }

    fn io(&self) -> Io {
        let [k_width, v_width] = self.kv_widths;
        let made = [
            (LatentUp::Q, self.q.outputs()),
            (LatentUp::K, k_width),
            (LatentUp::V, v_width),
        ];
        let q_read = self.q.backward_reads(self.q_input);
        Io {
            reads: vec![self.q_input, LatentDown::C_KV, LatentDown::K_ROTARY],
            writes: made.map(|(of, width)| (of, Extent::tokens(width))).into(),
            backward_reads: [q_read, self.kv.backward_reads(LatentDown::C_KV)].concat(),
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        [self.q.parameters(), self.kv.parameters()].concat()
    }

    fn flops_per_token(&self, _seq: usize) -> u64 {
        self.q.flops_per_token() + self.kv.flops_per_token()
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let x = pass.pull(self.q_input)?;
        let latent = pass.pull(LatentDown::C_KV)?;
        let k_rotary = pass.pull(LatentDown::K_ROTARY)?;
        if pass.cache().is_some() {
            return self.for_cache(pass, x.view(), latent.view(), k_rotary.view());
        }
        let mut q = pass.output(LatentUp::Q)?;
        if let Some(q) = &mut q {
            self.queries(pass, q, x.view())?;
        }
        pass.put(LatentUp::Q, q);
        let (mut k, mut v) = (pass.output(LatentUp::K)?, pass.output(LatentUp::V)?);
        if k.is_some() || v.is_some() {
            let mut kv = pass.temporary("kv", [latent.dims()[0], self.kv.outputs()])?;
            self.kv.forward(pass, kv.view_mut(), latent.view())?;
            pass.kernels().run(ExpandKeys {
                k: super::written(&mut k),
                v: super::written(&mut v),
                kv: kv.view(),
                k_rotary: k_rotary.view(),
                heads: self.heads.heads,
            })?;
        }
        pass.put(LatentUp::K, k);
        pass.put(LatentUp::V, v);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let [mut dq, dk, dv] = [Qkv::Q, Qkv::K, Qkv::V].map(|of| pass.gradient(of));
        self.rotary.turn(pass, &mut dq, true)?;
        self.q.backward(pass, self.q_input, dq.view())?;
        drop(dq);
        let mut dkv = pass.temporary("d_kv", [dk.dims()[0], self.kv.outputs()])?;
        let (mut dk_rotary, _) = pass.gradient_to_add(LatentDown::K_ROTARY)?;
        pass.kernels().run(ExpandKeysBackward {
            dkv: dkv.view_mut(),
            dk_rotary: dk_rotary.view_mut(),
            dk: dk.view(),
            dv: dv.view(),
            heads: self.heads.heads,
        })?;
        pass.file_gradient(LatentDown::K_ROTARY, dk_rotary);
        drop((dk, dv));
        self.kv.backward(pass, LatentDown::C_KV, dkv.view())
    }
}

impl LatentUp {
    fn queries(&self, pass: &mut Pass, q: &mut Buffer, x: In) -> Result<(), ModelError> {
        self.q.forward(pass, q.view_mut(), x)?;
        self.rotary.turn(pass, q, false)
    }

    /// What attention over latents takes.
    fn for_cache(
        &self,
        pass: &mut Pass,
        x: In,
        latent: In,
        k_rotary: In,
    ) -> Result<(), ModelError> {
        let [tokens, width] = [latent.dims()[0], latent.dims()[1]];
        let of_head = width + self.heads.turned;
        let mut out = pass.output_as_wide(LatentUp::Q, self.heads.heads * of_head)?;
        if let Some(out) = &mut out {
            let mut q = pass.temporary("q_of_keys", [tokens, self.q.outputs()])?;
            self.queries(pass, &mut q, x)?;
            self.heads.queries(pass, out.view_mut(), q.view())?;
        }
        pass.put(LatentUp::Q, out);
        for (of, x) in [(LatentUp::K, latent), (LatentUp::V, k_rotary)] {
            let mut out = pass.output_as_wide(of, x.dims()[1])?;
            if let Some(out) = super::written(&mut out) {
                pass.kernels().run(Copy { out, x })?;
            }
            pass.put(of, out);
        }
        Ok(())
    }
}
