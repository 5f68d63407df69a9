//! Queries, keys and values: projections, biases, norms of the heads, rotary embedding.

use super::Norm;
use crate::activation::Label;
use crate::stage::{Io, Stage};
use crate::{Activation, Extent, Linear, ModelError, ParameterId, Pass};
use kernels::Init;
use kernels::operation::Rotary;
use memory::{Buffer, In};

/// Makes `q [b s, heads d]`, `k` and `v [b s, kv_heads d]` of the normalised input.
pub struct Qkv {
    /// What is projected.
    pub input: Activation,
    /// The projections of queries, keys and values: of their own, or parts of one.
    pub linears: [Linear; 3],
    /// Norms of every query head and every key head before they are turned (Qwen3).
    pub norms: Option<HeadNorms>,
    /// Whether queries and keys are turned by the rotary embedding.
    pub is_rotary: bool,
}

/// Norms of queries and keys, a head at a time.
pub struct HeadNorms {
    /// Those of queries and of keys.
    pub norms: [Norm; 2],
    /// Width of a head.
    pub head_dim: usize,
}

impl Qkv {
    /// Queries after bias, norm and rotary embedding.
    pub const Q: Activation = Activation::new("q", "d_q", Label::Qkv);
    /// Keys after bias, norm and rotary embedding.
    pub const K: Activation = Activation::new("k", "d_k", Label::Qkv);
    /// Values.
    pub const V: Activation = Activation::new("v", "d_v", Label::Qkv);
    /// Queries before their norm, in models that have one.
    pub const Q_RAW: Activation = Activation::new("q_raw", "d_raw", Label::Qkv);
    /// Keys before their norm, in models that have one.
    pub const K_RAW: Activation = Activation::new("k_raw", "d_raw", Label::Qkv);

    const MADE: [Activation; 3] = [Qkv::Q, Qkv::K, Qkv::V];
    const RAW: [Activation; 2] = [Qkv::Q_RAW, Qkv::K_RAW];

    fn turn(&self, pass: &Pass, x: &mut Buffer, inverse: bool) -> Result<(), ModelError> {
        if self.is_rotary {
            pass.kernels().run(Rotary {
                x: x.view_mut(),
                table: pass.rotary_table(),
                positions: pass.positions(),
                inverse,
            })?;
        }
        Ok(())
    }

    /// Queries or keys where there is no norm; values, which are not turned.
    fn plain(&self, pass: &mut Pass, which: usize, x: In) -> Result<(), ModelError> {
        let mut out = pass.output(Qkv::MADE[which])?;
        if let Some(out) = &mut out {
            self.linears[which].forward(pass, out.view_mut(), x)?;
            if which < 2 {
                self.turn(pass, out, false)?;
            }
        }
        pass.put(Qkv::MADE[which], out);
        Ok(())
    }

    /// Queries or keys, normalised: what they were before is saved for the norm's backward pass.
    fn normalised(
        &self,
        pass: &mut Pass,
        heads: &HeadNorms,
        which: usize,
        x: In,
    ) -> Result<(), ModelError> {
        let (made, raw) = (Qkv::MADE[which], Qkv::RAW[which]);
        let mut out = pass.output(made)?;
        let mut fresh = pass.output(raw)?;
        if out.is_none() && fresh.is_none() {
            return Ok(());
        }
        let before = pass.made_before(raw)?;
        let is_kept = fresh.is_some();
        if fresh.is_none() && before.is_none() {
            fresh = Some(pass.temporary(raw.name(), pass.shape(raw).0)?);
        }
        if let Some(fresh) = &mut fresh {
            self.linears[which].forward(pass, fresh.view_mut(), x)?;
        }
        if let Some(out) = &mut out {
            let source = fresh.as_ref().or(before.as_deref());
            let source = source.expect("it was made before, or just now").view();
            let shape = heads.shape(source);
            let y = Some(out.view_mut().reshape(shape));
            heads.norms[which].forward(pass, y, None, source.reshape(shape))?;
            self.turn(pass, out, false)?;
        }
        pass.put(raw, fresh.filter(|_| is_kept));
        pass.put(made, out);
        Ok(())
    }
}

impl HeadNorms {
    /// A row for each head of each token.
    fn shape(&self, x: In) -> [usize; 2] {
        [x.elements() / self.head_dim, self.head_dim]
    }

    /// The gradient through the norm of each query or key head. Its statistics are made again: they are smaller than a
    /// lease.
    fn backward(&self, pass: &mut Pass, which: usize, dy: Buffer) -> Result<Buffer, ModelError> {
        let (raw, norm) = (Qkv::RAW[which], &self.norms[which]);
        let x = pass.pull(raw)?;
        let shape = self.shape(x.view());
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
        let width = |which: usize| Extent::tokens(self.linears[which].outputs());
        let raw_widths = raw.clone().zip((0..2).map(width));
        Io {
            reads: vec![self.input],
            writes: raw_widths
                .chain(Qkv::MADE.into_iter().zip((0..3).map(width)))
                .collect(),
            backward_reads: [self.input].into_iter().chain(raw).collect(),
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        let linears = self.linears.iter().flat_map(Linear::parameters);
        let norms = self.norms.iter().flat_map(|heads| &heads.norms);
        linears.chain(norms.flat_map(Norm::parameters)).collect()
    }

    fn flops_per_token(&self, _seq: usize) -> u64 {
        self.linears.iter().map(Linear::flops_per_token).sum()
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let x = pass.pull(self.input)?;
        for which in 0..3 {
            match &self.norms {
                Some(heads) if which < 2 => self.normalised(pass, heads, which, x.view())?,
                _ => self.plain(pass, which, x.view())?,
            }
        }
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let mut gradients = Qkv::MADE.map(|activation| pass.gradient(activation));
        for gradient in &mut gradients[..2] {
            self.turn(pass, gradient, true)?;
        }
        if let Some(heads) = &self.norms {
            let [dq, dk, dv] = gradients;
            gradients = [
                heads.backward(pass, 0, dq)?,
                heads.backward(pass, 1, dk)?,
                dv,
            ];
        }
        let x = pass.pull(self.input)?;
        let parts: [_; 3] = std::array::from_fn(|of| (&self.linears[of], gradients[of].view()));
        Linear::add_gradients(pass, &parts, x.view())?;
        pass.release(self.input, x);
        let (mut dx, mut init) = pass.gradient_to_add(self.input)?;
        for (linear, gradient) in self.linears.iter().zip(gradients) {
            linear.input_gradient(pass, dx.view_mut(), init, gradient.view())?;
            init = Init::Accumulate;
        }
        pass.file_gradient(self.input, dx);
        Ok(())
    }
}
