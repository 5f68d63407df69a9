//! Latent attention (DeepSeek-V2, 2024): queries, keys and values from narrow latents. `t` tokens, `a` heads; a head of
//! queries and keys has `n` columns without a position, and `p` that the rotary embedding turns.

use super::{Qkv, Rotary};
use crate::adapter::OutputColumns;
use crate::parameters::{ParameterId, PartParameters};
use crate::stage::{Io, Stage};
use crate::{Activation, AttentionSpec, Extent, Label, LatentConfig, Linear, Pass, Result};
use kernels::Init;
use kernels::operation::{Copy, ExpandKeys, ExpandKeysBackward, RotaryTail};
use memory::{Buffer, In, Out};
use std::collections::HashSet;

/// The rotary embedding of the last columns of heads.
struct Tail {
    head_dim: usize,
    are_neighbours: bool,
    rotary: Rotary,
}

impl Tail {
    /// Of heads `head_dim` wide.
    fn of(attention: &AttentionSpec, latent: &LatentConfig, head_dim: usize) -> Tail {
        let rotary = attention.rotary.clone();
        Tail {
            head_dim,
            are_neighbours: latent.neighbours,
            rotary: rotary.expect("latent attention turns some columns"),
        }
    }

    fn turn(&self, pass: &Pass, x: &mut Buffer, inverse: bool) -> Result {
        Ok(pass.kernels().run(RotaryTail {
            x: x.view_mut(),
            head_dim: self.head_dim,
            table: pass.rotary_tables(&self.rotary).0,
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
    kv: Linear,
    kv_width: usize,
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
        (hidden, input): (usize, Activation),
        attention: &AttentionSpec,
        latent: &LatentConfig,
    ) -> LatentDown {
        let outputs = latent.kv + latent.rotary_dim;
        let q = latent
            .q
            .map(|width| Linear::declare(own, "self_attn.q_a_proj", [width, hidden], false));
        LatentDown {
            input,
            q,
            kv: Linear::declare(
                own,
                "self_attn.kv_a_proj_with_mqa",
                [outputs, hidden],
                false,
            ),
            kv_width: latent.kv,
            rotary: Tail::of(attention, latent, latent.rotary_dim),
        }
    }

    /// The outputs of keys and values, with the first column of each.
    fn kv_parts(&self) -> [(Activation, usize); 2] {
        [(LatentDown::KV_A, 0), (LatentDown::K_ROTARY, self.kv_width)]
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
        let made = q.into_iter().chain(kv);
        let made = made.map(|(of, width)| (of, Extent::tokens(width)));
        let linears = self.linears().into_iter();
        let read = linears.flat_map(|linear| linear.backward_reads(self.input));
        let mut read: Vec<Activation> = read.collect();
        // Both layers may read the input.
        let mut known = HashSet::new();
        read.retain(|activation| known.insert(*activation));
        Io {
            reads: vec![self.input],
            writes: made.collect(),
            backward_reads: read,
        }
    }

    fn linears(&self) -> Vec<&Linear> {
        self.q.iter().chain([&self.kv]).collect()
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let x = pass.pull(self.input)?;
        if let Some(linear) = &self.q {
            let mut q = pass.output(LatentDown::Q_A)?;
            linear.forward(pass, super::written(&mut q), x.view())?;
            pass.put(LatentDown::Q_A, q);
        }
        let mut made = Vec::new();
        for (of, first) in self.kv_parts() {
            made.extend(pass.output(of)?.map(|out| (of, first, out)));
        }
        let pieces = made.iter_mut().map(|(_, first, out)| OutputColumns {
            first: *first,
            of: out.view_mut(),
        });
        let pieces = pieces.collect();
        self.kv.forward_apart(pass, pieces, x.view())?;
        for (of, _, mut out) in made {
            if of == LatentDown::K_ROTARY {
                self.rotary.turn(pass, &mut out, false)?;
            }
            pass.put(of, Some(out));
        }
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let [dkv, mut dk] = self.kv_parts().map(|(of, _)| pass.gradient(of));
        self.rotary.turn(pass, &mut dk, true)?;
        let dq = self.q.as_ref().map(|q| (q, pass.gradient(LatentDown::Q_A)));
        let [of_kv, of_k] = self.kv_parts().map(|(_, first)| first);
        let dkv = [(of_kv, &dkv), (of_k, &dk)].map(|(first, gradient)| OutputColumns {
            first,
            of: gradient.view(),
        });
        let mut through = [None, None];
        let mut linears = self.linears().into_iter();
        if linears.any(Linear::reads_input_backward) {
            let x = pass.pull(self.input)?;
            if let Some((q, dq)) = &dq {
                through[0] = q.gradients_of(pass, &[OutputColumns::whole(dq.view())], x.view())?;
            }
            through[1] = self.kv.gradients_of(pass, &dkv, x.view())?;
            pass.release(self.input, x);
        }
        let [of_q, of_kv] = through;
        let (mut dx, mut init) = pass.gradient_to_add(self.input)?;
        if let Some((q, dq)) = &dq {
            q.input_gradient(pass, dx.view_mut(), init, (dq.view(), of_q))?;
            init = Init::Accumulate;
        }
        let kv = (&dkv[..], of_kv);
        self.kv
            .input_gradient_apart(pass, dx.view_mut(), init, kv)?;
        pass.file_gradient(self.input, dx);
        Ok(())
    }
}

/// The matrix `[a (n + v), kv]` of keys and values as passes with a cache use it, which keep latents alone: queries are
/// multiplied by a head's rows of keys, and the sums of weighed latents by its rows of values (the absorbed form). There
/// are two products for each head.
#[derive(Clone)]
pub struct LatentHeads {
    linear: Linear,
    heads: usize,
    /// kv, n, p and v.
    latent: usize,
    own: usize,
    turned: usize,
    value: usize,
}

impl LatentHeads {
    /// The matrix, and the factors of its adapter.
    pub fn parameters(&self) -> Vec<ParameterId> {
        self.linear.parameters()
    }

    /// Queries of latents `[t, a (kv + p)]` from queries `[t, a (n + p)]`.
    fn queries(&self, pass: &Pass, mut out: Out, q: In) -> Result {
        let (of_out, of_q) = (self.latent + self.turned, self.own + self.turned);
        let rows = q.dims()[0] * self.heads;
        let by_head = out.reborrow().reshape([rows, of_out]);
        pass.kernels().run(Copy {
            out: by_head.columns(self.latent..of_out),
            x: q.reshape([rows, of_q]).columns(self.own..of_q),
        })?;
        let weight = self.linear.rows(pass)?;
        for head in 0..self.heads {
            let [to, from] = [head * of_out, head * of_q];
            let first = head * (self.own + self.value);
            let out = out.reborrow().columns(to..to + self.latent);
            let q = q.columns(from..from + self.own);
            weight.by_columns(pass, out, q, first..first + self.own)?;
        }
        Ok(())
    }

    /// Outputs `[t, a v]` from sums of weighed latents `[t, a kv]`.
    pub(super) fn values(&self, pass: &Pass, mut out: Out, sums: In) -> Result {
        let weight = self.linear.rows(pass)?;
        for head in 0..self.heads {
            let [to, from] = [head * self.value, head * self.latent];
            let end = (head + 1) * (self.own + self.value);
            let out = out.reborrow().columns(to..to + self.value);
            let sums = sums.columns(from..from + self.latent);
            weight.forward(pass, out, sums, end - self.value..end)?;
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
        LatentUp {
            q_input,
            q,
            heads: LatentHeads {
                linear: Linear::declare(own, "self_attn.kv_b_proj", [kv_outputs, latent.kv], false),
                heads: attention.heads,
                latent: latent.kv,
                own: own_columns,
                turned: latent.rotary_dim,
                value: attention.v_head_dim,
            },
            kv_widths: attention.kv_widths(),
            rotary: Tail::of(attention, latent, attention.qk_head_dim),
        }
    }

    fn kv(&self) -> &Linear {
        &self.heads.linear
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
        let made = made.map(|(of, width)| (of, Extent::tokens(width)));
        let q_read = self.q.backward_reads(self.q_input);
        Io {
            reads: vec![self.q_input, LatentDown::C_KV, LatentDown::K_ROTARY],
            writes: made.to_vec(),
            backward_reads: [q_read, self.kv().backward_reads(LatentDown::C_KV)].concat(),
        }
    }

    fn linears(&self) -> Vec<&Linear> {
        vec![&self.q, self.kv()]
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let x = pass.pull(self.q_input)?;
        let latent = pass.pull(LatentDown::C_KV)?;
        let k_rotary = pass.pull(LatentDown::K_ROTARY)?;
        if pass.has_cache() {
            return self.for_cache(pass, x.view(), latent.view(), k_rotary.view());
        }
        let mut q = pass.output(LatentUp::Q)?;
        self.queries(pass, q.as_mut(), x.view())?;
        pass.put(LatentUp::Q, q);
        let (mut k, mut v) = (pass.output(LatentUp::K)?, pass.output(LatentUp::V)?);
        let is_wanted = k.is_some() || v.is_some();
        let width = [latent.dims()[0], self.kv().outputs()];
        let mut kv = match is_wanted {
            true => Some(pass.temporary("kv", width)?),
            false => None,
        };
        self.kv()
            .forward(pass, super::written(&mut kv), latent.view())?;
        if let Some(kv) = &kv {
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

    fn backward(&self, pass: &mut Pass) -> Result {
        let [mut dq, dk, dv] = [Qkv::Q, Qkv::K, Qkv::V].map(|of| pass.gradient(of));
        self.rotary.turn(pass, &mut dq, true)?;
        self.q.backward(pass, self.q_input, dq.view())?;
        drop(dq);
        let mut dkv = pass.temporary("d_kv", [dk.dims()[0], self.kv().outputs()])?;
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
        self.kv().backward(pass, LatentDown::C_KV, dkv.view())
    }
}

impl LatentUp {
    /// Queries, turned. Without `q`, only what their adapter keeps.
    fn queries(&self, pass: &mut Pass, mut q: Option<&mut Buffer>, x: In) -> Result {
        let out = q.as_mut().map(|q| q.view_mut());
        self.q.forward(pass, out, x)?;
        q.map_or(Ok(()), |q| self.rotary.turn(pass, q, false))
    }

    /// What attention over latents takes.
    fn for_cache(&self, pass: &mut Pass, x: In, latent: In, k_rotary: In) -> Result {
        let [tokens, width] = [latent.dims()[0], latent.dims()[1]];
        let of_head = width + self.heads.turned;
        let mut out = pass.output_as_wide(LatentUp::Q, self.heads.heads * of_head)?;
        if let Some(out) = &mut out {
            let mut q = pass.temporary("q_of_keys", [tokens, self.q.outputs()])?;
            self.queries(pass, Some(&mut q), x)?;
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
