//! Queries, keys and values: projections, biases, norms of the heads, rotary embedding.

use super::{Norm, Rotary, written};
use crate::stage::{Io, Stage};
use crate::{Activation, Extent, Label, Linear, ParameterId, Pass, Result};
use kernels::Init;
use kernels::operation::{self, Copy, JoinQkv, SplitQkv, Turn};
use memory::{Buffer, In, Out};
use std::ops::Range;

/// Computes `q [b s, heads d]`, `k [b s, kv_heads d]` and `v [b s, kv_heads e]` from the normalised input. One product
/// makes all three, which are then split.
pub struct Qkv {
    /// What is projected.
    pub input: Activation,
    /// The projections of queries, keys and values, side by side.
    pub linear: Linear,
    /// Width of keys, and of values.
    pub kv_widths: [usize; 2],
    /// Width of a head of queries or keys.
    pub head_dim: usize,
    /// Norms of queries and keys, before the rotary embedding.
    pub norms: Option<HeadNorms>,
    /// The rotary embedding that turns queries and keys; none: they have no positions.
    pub rotary: Option<Rotary>,
    /// The projection of queries makes a gate beside each head of them, as wide. Queries then have norms.
    pub has_gate: bool,
}

/// Norms of queries and keys.
pub struct HeadNorms {
    /// Those of queries and of keys.
    pub norms: [Norm; 2],
    /// Columns that a norm of queries takes together, and one of keys: a head's, or all.
    pub widths: [usize; 2],
}

impl Qkv {
    /// Queries after bias, norm and rotary embedding.
    pub const Q: Activation = Activation::new("q", "d_q", Label::QKV);
    /// Keys after bias, norm and rotary embedding.
    pub const K: Activation = Activation::new("k", "d_k", Label::QKV);
    /// Values.
    pub const V: Activation = Activation::new("v", "d_v", Label::QKV);
    /// Queries before their norm, in models that have one.
    pub const Q_RAW: Activation = Activation::new("q_raw", "d_raw", Label::QKV);
    /// Keys before their norm, in models that have one.
    pub const K_RAW: Activation = Activation::new("k_raw", "d_raw", Label::QKV);
    /// The gate of attention's output, in models that have one.
    pub const GATE: Activation = Activation::new("gate", "d_gate", Label::QKV);

    pub(super) const MADE: [Activation; 3] = [Qkv::Q, Qkv::K, Qkv::V];
    const RAW: [Activation; 2] = [Qkv::Q_RAW, Qkv::K_RAW];

    /// Widths of queries, keys and values.
    fn widths(&self) -> [usize; 3] {
        let [k_width, v_width] = self.kv_widths;
        let parts = 1 + usize::from(self.has_gate);
        [self.q_outputs() / parts, k_width, v_width]
    }

    /// Outputs of the projection of queries: these, and their gates.
    fn q_outputs(&self) -> usize {
        self.linear.outputs() - self.kv_widths.iter().sum::<usize>()
    }

    /// The rotary embedding to apply where the product is split; none with norms, which come first.
    fn turn<'p>(&self, pass: &Pass<'p>) -> Option<Turn<'p>> {
        let rotary = self.rotary.as_ref().filter(|_| self.norms.is_none())?;
        let (table, q_table) = pass.rotary_tables(rotary);
        Some(Turn {
            head_dim: self.head_dim,
            table,
            q_table,
            positions: pass.positions(),
        })
    }

    /// Applies the rotary embedding to queries or keys, or its inverse to their gradient.
    fn turn_in_place(&self, pass: &Pass, which: usize, x: Out, inverse: bool) -> Result {
        if let Some(rotary) = &self.rotary {
            let (of_keys, of_queries) = pass.rotary_tables(rotary);
            let own = of_queries.filter(|_| Qkv::MADE[which] == Qkv::Q);
            pass.kernels().run(operation::Rotary {
                x,
                head_dim: self.head_dim,
                table: own.unwrap_or(of_keys),
                positions: pass.positions(),
                inverse,
            })?;
        }
        Ok(())
    }

    /// The product, split into the wanted ones of queries, keys, values and gates. A replay of one of them computes the whole
    /// product, because a part of it might have other bits.
    fn project(&self, pass: &mut Pass, x: In, parts: &mut [Option<Buffer>; 4]) -> Result {
        if parts.iter().all(Option::is_none) {
            return self.linear.forward(pass, None, x);
        }
        let tokens = x.dims()[0];
        let mut qkv = pass.temporary("qkv", [tokens, self.linear.outputs()])?;
        self.linear.forward(pass, qkv.view_mut(), x)?;
        let [q, k, v, gate] = parts.each_mut().map(written);
        let is_apart = self.has_gate && (q.is_some() || gate.is_some());
        let mut q_and_gate = match is_apart {
            true => Some(pass.temporary("q_and_gate", [tokens, self.q_outputs()])?),
            false => None,
        };
        let (q, apart) = match written(&mut q_and_gate) {
            Some(joined) => (Some(joined), [q, gate]),
            None => (q, [None, None]),
        };
        pass.kernels().run(SplitQkv {
            q,
            k,
            v,
            qkv: qkv.view(),
            kv_widths: self.kv_widths,
            turn: self.turn(pass),
        })?;
        drop(qkv);
        match &q_and_gate {
            Some(joined) => self.parted(pass, joined, apart),
            None => Ok(()),
        }
    }

    /// Copies the queries and gates of each head to tensors of their own.
    fn parted(&self, pass: &Pass, joined: &Buffer, parts: [Option<Out>; 2]) -> Result {
        let tokens = joined.dims()[0];
        for (out, columns) in parts.into_iter().zip(self.parts_of_head()) {
            if let Some(out) = out {
                pass.kernels().run(Copy {
                    out: out.reshape(self.by_head(tokens, 1)),
                    x: joined
                        .view()
                        .reshape(self.by_head(tokens, 2))
                        .columns(columns),
                })?;
            }
        }
        Ok(())
    }

    /// A row for each head of each token, with so many parts of it.
    fn by_head(&self, tokens: usize, parts: usize) -> [usize; 2] {
        let heads = self.widths()[0] / self.head_dim;
        [tokens * heads, parts * self.head_dim]
    }

    /// The columns of a head's queries, and of its gate, among what the projection of queries makes for it.
    fn parts_of_head(&self) -> [Range<usize>; 2] {
        [0..self.head_dim, self.head_dim..2 * self.head_dim]
    }

    /// Queries, keys and values where there are no norms.
    fn plain(&self, pass: &mut Pass, x: In) -> Result {
        let mut parts = [None, None, None, None];
        for (part, made) in parts.iter_mut().zip(Qkv::MADE) {
            *part = pass.output(made)?;
        }
        self.project(pass, x, &mut parts)?;
        for (made, part) in Qkv::MADE.into_iter().zip(parts) {
            pass.put(made, part);
        }
        Ok(())
    }

    /// Values, and normalised queries and keys. Queries and keys are also saved as they were before their norms, which
    /// the norms' backward passes read.
    fn normalised(&self, pass: &mut Pass, heads: &HeadNorms, x: In) -> Result {
        let mut before = [None, None];
        let mut is_kept = [false, false];
        let gate = match self.has_gate {
            true => pass.output(Qkv::GATE)?,
            false => None,
        };
        let mut parts = [None, None, pass.output(Qkv::V)?, gate];
        for (which, raw) in Qkv::RAW.into_iter().enumerate() {
            let fresh = pass.output(raw)?;
            is_kept[which] = fresh.is_some();
            before[which] = pass.made_before(raw)?;
            let is_missing = fresh.is_none() && before[which].is_none();
            parts[which] = match is_missing && pass.wants(Qkv::MADE[which]) {
                true => Some(pass.temporary(raw.name(), pass.shape(raw).0)?),
                false => fresh,
            };
        }
        self.project(pass, x, &mut parts)?;
        let [q_raw, k_raw, v, gate] = parts;
        pass.put(Qkv::V, v);
        if self.has_gate {
            pass.put(Qkv::GATE, gate);
        }
        for (which, fresh) in [q_raw, k_raw].into_iter().enumerate() {
            let (made, raw) = (Qkv::MADE[which], Qkv::RAW[which]);
            let mut out = pass.output(made)?;
            if let Some(out) = &mut out {
                let source = fresh.as_ref().or(before[which].as_deref());
                let source = source.expect("it was made before, or just now").view();
                let shape = heads.shape(which, source);
                let y = Some(out.view_mut().reshape(shape));
                heads.norms[which].forward(pass, y, None, source.reshape(shape))?;
                self.turn_in_place(pass, which, out.view_mut(), false)?;
            }
            pass.put(raw, fresh.filter(|_| is_kept[which]));
            pass.put(made, out);
        }
        Ok(())
    }

    /// The gradients of queries, keys and values side by side, as they were before norms and rotary embedding.
    fn joined_gradient(&self, pass: &mut Pass) -> Result<Buffer> {
        let [mut dq, mut dk, dv] = Qkv::MADE.map(|activation| pass.gradient(activation));
        if let Some(heads) = &self.norms {
            for (which, gradient) in [&mut dq, &mut dk].into_iter().enumerate() {
                self.turn_in_place(pass, which, gradient.view_mut(), true)?;
            }
            (dq, dk) = (heads.backward(pass, 0, dq)?, heads.backward(pass, 1, dk)?);
        }
        if self.has_gate {
            let dgate = pass.gradient(Qkv::GATE);
            dq = self.joined_with_gate(pass, [dq, dgate])?;
        }
        let mut joined = pass.temporary("d_qkv", [dq.dims()[0], self.linear.outputs()])?;
        let (kernels, turn) = (pass.kernels(), self.turn(pass));
        let largest = pass.largest_gradient_to_find(self.linear.fp8_layer());
        kernels.run(JoinQkv {
            qkv: joined.view_mut(),
            q: dq.view(),
            k: dk.view(),
            v: dv.view(),
            turn,
            largest,
        })?;
        Ok(joined)
    }
}

impl Qkv {
    /// The gradients of queries and of gates, those of each head side by side.
    fn joined_with_gate(&self, pass: &Pass, parts: [Buffer; 2]) -> Result<Buffer> {
        let tokens = parts[0].dims()[0];
        let mut joined = pass.temporary("d_q_and_gate", [tokens, self.q_outputs()])?;
        for (part, columns) in parts.iter().zip(self.parts_of_head()) {
            let out = joined.view_mut().reshape(self.by_head(tokens, 2));
            pass.kernels().run(Copy {
                out: out.columns(columns),
                x: part.view().reshape(self.by_head(tokens, 1)),
            })?;
        }
        Ok(joined)
    }
}

impl HeadNorms {
    /// One row for all that a norm takes together.
    fn shape(&self, which: usize, x: In) -> [usize; 2] {
        let width = self.widths[which];
        [x.elements() / width, width]
    }

    /// The gradient through the norms of queries or keys. The norm's statistics are computed again: they are too
    /// small to be worth an activation.
    fn backward(&self, pass: &mut Pass, which: usize, dy: Buffer) -> Result<Buffer> {
        let (raw, norm) = (Qkv::RAW[which], &self.norms[which]);
        let x = pass.pull(raw)?;
        let shape = self.shape(which, x.view());
        let mut rstd = pass.temporary_f32("head_rstd", [shape[0]])?;
        let x_heads = x.view().reshape(shape);
        norm.forward(pass, None, [Some(rstd.view_mut())], x_heads)?;
        let mut dx = pass.temporary(raw.gradient_name(), x.dims())?;
        let dx_heads = (dx.view_mut().reshape(shape), Init::Overwrite);
        let dy_heads = dy.view().reshape(shape);
        norm.backward(pass, dx_heads, dy_heads, x_heads, &[rstd.view()])?;
        pass.release(raw, x);
        Ok(dx)
    }
}

impl Stage for Qkv {
    fn name(&self) -> &'static str {
        "qkv"
    }

    fn io(&self) -> Io {
        let raw = self.norms.iter().flat_map(|_| Qkv::RAW);
        let extents = || self.widths().map(Extent::tokens);
        let made = Qkv::MADE.into_iter().zip(extents());
        let gate = self.has_gate.then(|| (Qkv::GATE, extents()[0]));
        let read = self.linear.backward_reads(self.input);
        Io {
            reads: vec![self.input],
            writes: raw.clone().zip(extents()).chain(made).chain(gate).collect(),
            backward_reads: read.into_iter().chain(raw).collect(),
        }
    }

    fn linears(&self) -> Vec<&Linear> {
        vec![&self.linear]
    }

    fn parameters(&self) -> Vec<ParameterId> {
        let norms = self.norms.iter().flat_map(|heads| &heads.norms);
        let own = self.linear.parameters().into_iter();
        own.chain(norms.flat_map(Norm::parameters)).collect()
    }

    fn can_defer_gradients(&self) -> bool {
        self.linear.can_defer_gradients()
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let x = pass.pull(self.input)?;
        match &self.norms {
            None => self.plain(pass, x.view()),
            Some(heads) => self.normalised(pass, heads, x.view()),
        }
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dqkv = self.joined_gradient(pass)?;
        self.linear.backward_of(pass, self.input, dqkv)
    }
}
