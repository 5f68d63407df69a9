//! Layers of the gated delta rule (Yang et al. 2025), as Qwen3-Next has them: what a joined projection wrote goes through a short
//! convolution and the rule, whose output is normalised and gated.

use super::{AttentionGate, CoreAttention, written};
use crate::activation::Dimension;
use crate::linear::LinearPart;
use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::stage::{Io, Stage};
use crate::{
    Activation, DeltaConfig, Extent, HeadParts, Label, LayerCacheShape, Linear, Pass, Result,
    StateShape,
};
use kernels::operation::{
    CachedConvolution, CachedDelta, DeltaShape, GatedDelta, GatedDeltaBackward, GatedNorm,
    GatedNormBackward, ShortConvolution, ShortConvolutionBackward,
};
use memory::{Buffer, DType, In, Out};

/// Widths of what the joined projections write, in the order of its columns.
#[derive(Clone, Copy, Debug)]
pub struct DeltaColumns {
    /// Queries, keys and values, which the convolution mixes.
    mixed: usize,
    /// Gates z of the norm.
    values: usize,
    /// Logits b, and decays a: one each for every value head.
    heads: usize,
}

impl DeltaColumns {
    /// The output of the joined projections: queries, keys and values, z, b and a.
    pub const IN: Activation = Activation::new("gdn_in", "d_gdn_in", Label::QKV);

    fn of(delta: &DeltaConfig) -> DeltaColumns {
        DeltaColumns {
            mixed: delta.mixed_width(),
            values: delta.value_width(),
            heads: delta.value_heads,
        }
    }

    /// Declares the projections. They are one product.
    pub(crate) fn declare(own: &mut PartParameters, delta: &DeltaConfig, hidden: usize) -> Linear {
        let DeltaColumns {
            mixed,
            values,
            heads,
        } = DeltaColumns::of(delta);
        let group = heads / delta.key_heads;
        let (keys, group_values) = (delta.key_head_dim, group * delta.value_head_dim);
        let packed = |name, outputs, widths| LinearPart {
            name,
            outputs,
            by_head: Some(HeadParts {
                heads: delta.key_heads,
                widths,
            }),
        };
        let parts: Vec<LinearPart> = match delta.by_key_head {
            true => vec![
                packed(
                    "linear_attn.in_proj_qkvz",
                    mixed + values,
                    [keys, keys, group_values, group_values],
                ),
                packed("linear_attn.in_proj_ba", 2 * heads, [group, group, 0, 0]),
            ],
            false => vec![
                ("linear_attn.in_proj_qkv", mixed).into(),
                ("linear_attn.in_proj_z", values).into(),
                ("linear_attn.in_proj_b", heads).into(),
                ("linear_attn.in_proj_a", heads).into(),
            ],
        };
        Linear::declare_together(own, parts, hidden, false)
    }

    fn mixed(self, x: In) -> In {
        x.columns(0..self.mixed)
    }

    fn z(self, x: In) -> In {
        x.columns(self.mixed..self.mixed + self.values)
    }

    fn b_and_a(self, x: In) -> [In; 2] {
        let first = self.mixed + self.values;
        let of = |number: usize| {
            x.columns(first + number * self.heads..first + (number + 1) * self.heads)
        };
        [of(0), of(1)]
    }

    /// Queries, keys and values, z, b and a, to be written.
    fn split(self, x: Out) -> [Out; 4] {
        let (mixed, rest) = x.split_at_column(self.mixed);
        let (z, rest) = rest.split_at_column(self.values);
        let (b, a) = rest.split_at_column(self.heads);
        [mixed, z, b, a]
    }
}

/// o `[b s, value_heads V]`: the convolution of what the projections wrote, and the gated delta rule.
pub struct Delta {
    delta: DeltaConfig,
    columns: DeltaColumns,
    /// `[c, taps]`.
    convolution: ParameterId,
    a_log: ParameterId,
    dt_bias: ParameterId,
}

impl Delta {
    /// The states in front of chunks, `[b chunks, value_heads, K, V]` f32.
    pub const STATES: Activation = Activation::new("states", "no_gradient", Label::CORE_ATTN);

    /// Declares `conv1d`, `A_log` and `dt_bias`. The latter two are f32 whatever the model computes in.
    pub(crate) fn declare(own: &mut PartParameters, delta: &DeltaConfig) -> Delta {
        let columns = DeltaColumns::of(delta);
        let (taps, heads) = (delta.conv_width, delta.value_heads);
        let name = "linear_attn.conv1d.weight";
        let convolution = own.convolution(name, [columns.mixed, taps]);
        let mut in_f32 = own.in_type(DType::F32);
        let decays = Initial::LogUniform([0.01, 16.0]);
        Delta {
            delta: delta.clone(),
            columns,
            convolution,
            a_log: in_f32.vector("linear_attn.A_log", heads, decays),
            dt_bias: in_f32.vector("linear_attn.dt_bias", heads, Initial::One),
        }
    }

    fn shape(&self, pass: &Pass) -> DeltaShape {
        let batch = pass.batch().shape;
        self.delta.shape(batch.rows, batch.seq)
    }

    /// Queries, keys and values behind the convolution. Both passes make them, which is cheaper than to keep them.
    fn convolved(&self, pass: &Pass, x: In) -> Result<Buffer> {
        let shape = self.shape(pass);
        let mut mixed = pass.temporary("convolved", shape.mixed())?;
        pass.kernels().run(ShortConvolution {
            out: mixed.view_mut(),
            x: self.columns.mixed(x),
            weight: pass.parameter(self.convolution),
            seq: shape.seq,
            documents: documents(pass),
        })?;
        Ok(mixed)
    }

    /// Convolution and rule of the tokens that follow what the cache has.
    fn cached(&self, pass: &mut Pass, out: Out, x: In) -> Result {
        const HAS_CACHE: &str = "whoever calls this has a cache";
        let shape = self.shape(pass);
        let mut mixed = pass.temporary("convolved", shape.mixed())?;
        let kernels = pass.kernels();
        let cached = pass.state_and_parameters([self.convolution]);
        let (cache, [weight]) = cached.expect(HAS_CACHE);
        kernels.run(CachedConvolution {
            out: mixed.view_mut(),
            before: cache.rows,
            x: self.columns.mixed(x),
            weight,
            lengths: cache.lengths,
        })?;
        let cached = pass.state_and_parameters([self.a_log, self.dt_bias]);
        let (cache, [a_log, dt_bias]) = cached.expect(HAS_CACHE);
        let [b, a] = self.columns.b_and_a(x);
        Ok(kernels.run(CachedDelta {
            out,
            states: cache.states,
            mixed: mixed.view(),
            b,
            a,
            a_log,
            dt_bias,
            lengths: cache.lengths,
            shape,
        })?)
    }

    /// The gradients of queries, keys and values behind the convolution, and those of b, a, `A_log` and `dt_bias`.
    fn rule_backward(
        &self,
        pass: &mut Pass,
        (x, states, dout): (In, In, In),
        [db, da]: [Out; 2],
    ) -> Result<Buffer> {
        let shape = self.shape(pass);
        let mixed = self.convolved(pass, x)?;
        let mut dmixed = pass.temporary("d_convolved", shape.mixed())?;
        let target = pass.kernels().target();
        let elements = GatedDeltaBackward::scratch_elements(target, shape);
        let mut scratch = pass.temporary_f32("delta_scratch", [elements])?;
        let vectors = [self.a_log, self.dt_bias];
        let mut unused = pass.unused_gradients(vectors)?;
        let (kernels, documents) = (pass.kernels(), documents(pass));
        let [b, a] = self.columns.b_and_a(x);
        let ([a_log, dt_bias], gradients) = pass.parameters_and_gradients(vectors, &mut unused);
        let [(da_log, da_log_init), (ddt_bias, ddt_bias_init)] = gradients;
        kernels.run(GatedDeltaBackward {
            dmixed: dmixed.view_mut(),
            db,
            da,
            da_log,
            da_log_init,
            ddt_bias,
            ddt_bias_init,
            scratch: scratch.view_mut(),
            dout,
            states,
            mixed: mixed.view(),
            b,
            a,
            a_log,
            dt_bias,
            shape,
            documents,
        })?;
        Ok(dmixed)
    }

    /// The gradients of the convolution's input and weight.
    fn convolution_backward(&self, pass: &mut Pass, dx: Out, (dout, x): (In, In)) -> Result {
        let seq = self.shape(pass).seq;
        let (kernels, documents) = (pass.kernels(), documents(pass));
        let [mut unused] = pass.unused_gradients([self.convolution])?;
        let (weight, (dweight, init)) = pass.matrix_and_gradient(self.convolution, &mut unused);
        kernels.run(ShortConvolutionBackward {
            dx,
            dweight,
            init,
            dout,
            x: self.columns.mixed(x),
            weight,
            seq,
            documents,
        })?;
        Ok(())
    }
}

/// The document of each token, where several are in a sequence.
fn documents<'a>(pass: &Pass<'a>) -> Option<In<'a>> {
    pass.batch().documents.as_ref().map(Buffer::view)
}

impl Stage for Delta {
    fn name(&self) -> &'static str {
        "gated_delta"
    }

    fn io(&self) -> Io {
        let DeltaConfig {
            value_heads,
            key_head_dim,
            value_head_dim,
            ..
        } = self.delta;
        let states = Extent::of_f32(&[
            Dimension::Chunks,
            Dimension::Fixed(value_heads),
            Dimension::Fixed(key_head_dim),
            Dimension::Fixed(value_head_dim),
        ]);
        Io {
            reads: vec![DeltaColumns::IN],
            writes: vec![
                (CoreAttention::O, Extent::tokens(self.columns.values)),
                (Self::STATES, states),
            ],
            backward_reads: vec![DeltaColumns::IN, Self::STATES],
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        vec![self.convolution, self.a_log, self.dt_bias]
    }

    fn cache_shape(&self) -> Option<LayerCacheShape> {
        let delta = &self.delta;
        Some(LayerCacheShape::State(StateShape {
            state: [delta.value_heads, delta.key_head_dim, delta.value_head_dim],
            rows: [delta.conv_width - 1, self.columns.mixed],
        }))
    }

    /// The products of the recurrence: k S, its correction, and q S.
    fn flops_per_token(&self, _seq: usize) -> u64 {
        let state = self.delta.value_heads * self.delta.key_head_dim * self.delta.value_head_dim;
        let taps = self.columns.mixed * self.delta.conv_width;
        6 * (3 * state + taps) as u64
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let x = pass.pull(DeltaColumns::IN)?;
        let (mut o, mut states) = (pass.output(CoreAttention::O)?, pass.output(Self::STATES)?);
        if pass.has_cache() {
            let out = written(&mut o).expect("the norm behind reads it");
            self.cached(pass, out, x.view())?;
        } else if o.is_some() || states.is_some() {
            let shape = self.shape(pass);
            let mixed = self.convolved(pass, x.view())?;
            let elements = GatedDelta::scratch_elements(pass.kernels().target(), shape);
            let mut scratch = pass.temporary_f32("delta_scratch", [elements])?;
            let [b, a] = self.columns.b_and_a(x.view());
            pass.kernels().run(GatedDelta {
                out: written(&mut o),
                states: written(&mut states),
                scratch: scratch.view_mut(),
                mixed: mixed.view(),
                b,
                a,
                a_log: pass.parameter(self.a_log),
                dt_bias: pass.parameter(self.dt_bias),
                shape,
                documents: documents(pass),
            })?;
        }
        pass.put(CoreAttention::O, o);
        pass.put(Self::STATES, states);
        Ok(())
    }

    /// The columns of z in the gradient of what the projections wrote are those of the norm behind.
    fn backward(&self, pass: &mut Pass) -> Result {
        let dout = pass.gradient(CoreAttention::O);
        let states = pass.pull(Self::STATES)?;
        let x = pass.pull(DeltaColumns::IN)?;
        let (mut dx, _) = pass.gradient_to_add(DeltaColumns::IN)?;
        let [dx_mixed, _, db, da] = self.columns.split(dx.view_mut());
        let of = (x.view(), states.view(), dout.view());
        let dmixed = self.rule_backward(pass, of, [db, da])?;
        drop(dout);
        pass.release(Self::STATES, states);
        self.convolution_backward(pass, dx_mixed, (dmixed.view(), x.view()))?;
        pass.file_gradient(DeltaColumns::IN, dx);
        Ok(())
    }
}

/// The norm of each head of o, times the SiLU of z.
pub struct DeltaNorm {
    columns: DeltaColumns,
    weight: ParameterId,
    eps: f32,
}

impl DeltaNorm {
    /// Reciprocal root mean square of each head of o, `[b s, value_heads]` f32.
    pub const RSTD: Activation = Activation::new("rstd_o", "no_gradient", Label::GDN_NORM_OUT);

    /// Declares `norm.weight [V]`, which multiplies as it is also in models whose other norms are zero-centred.
    pub(crate) fn declare(own: &mut PartParameters, delta: &DeltaConfig, eps: f64) -> DeltaNorm {
        DeltaNorm {
            columns: DeltaColumns::of(delta),
            weight: own.vector(
                "linear_attn.norm.weight",
                delta.value_head_dim,
                Initial::One,
            ),
            eps: eps as f32,
        }
    }
}

impl Stage for DeltaNorm {
    fn name(&self) -> &'static str {
        "gdn_norm"
    }

    fn io(&self) -> Io {
        let rstd = [Dimension::Tokens, Dimension::Fixed(self.columns.heads)];
        Io {
            reads: vec![CoreAttention::O, DeltaColumns::IN],
            writes: vec![
                (AttentionGate::OUT, Extent::tokens(self.columns.values)),
                (Self::RSTD, Extent::of_f32(&rstd)),
            ],
            backward_reads: vec![CoreAttention::O, DeltaColumns::IN, Self::RSTD],
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        vec![self.weight]
    }

    /// It has a vector alone.
    fn can_defer_gradients(&self) -> bool {
        true
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let (o, x) = (pass.pull(CoreAttention::O)?, pass.pull(DeltaColumns::IN)?);
        let (mut y, mut rstd) = (pass.output(AttentionGate::OUT)?, pass.output(Self::RSTD)?);
        if y.is_some() || rstd.is_some() {
            pass.kernels().run(GatedNorm {
                y: written(&mut y),
                rstd: written(&mut rstd),
                x: o.view(),
                z: self.columns.z(x.view()),
                weight: pass.parameter(self.weight),
                eps: self.eps,
            })?;
        }
        pass.put(AttentionGate::OUT, y);
        pass.put(Self::RSTD, rstd);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dy = pass.gradient(AttentionGate::OUT);
        let (o, x) = (pass.pull(CoreAttention::O)?, pass.pull(DeltaColumns::IN)?);
        let rstd = pass.pull(Self::RSTD)?;
        let (mut d_o, _) = pass.gradient_to_add(CoreAttention::O)?;
        let (mut dx, _) = pass.gradient_to_add(DeltaColumns::IN)?;
        let [_, dz, _, _] = self.columns.split(dx.view_mut());
        let mut unused = pass.unused_gradients([self.weight])?;
        let kernels = pass.kernels();
        let ([weight], [(dweight, init)]) =
            pass.parameters_and_gradients([self.weight], &mut unused);
        kernels.run(GatedNormBackward {
            dx: d_o.view_mut(),
            dz,
            dweight,
            init,
            dy: dy.view(),
            x: o.view(),
            z: self.columns.z(x.view()),
            weight,
            rstd: rstd.view(),
        })?;
        pass.file_gradient(CoreAttention::O, d_o);
        pass.file_gradient(DeltaColumns::IN, dx);
        Ok(())
    }
}
