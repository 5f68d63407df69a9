//! Layers of the gated delta rule (Yang et al. 2025), as Qwen3-Next has them: what a joined projection wrote goes through a short
//! convolution and the rule. A norm with a gate is behind it (`delta_norm.rs`).

use super::delta_to_heads::DeltaToHeads;
use super::sharing::{HeadsToTokens, gradient_of_heads, gradient_of_parts};
use super::{CoreAttention, DeltaColumns, written};
use crate::activation::Dimension;
use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::stage::{Io, Stage};
use crate::{
    Activation, DeltaConfig, Extent, Label, LayerCacheShape, Pass, Result, SharingRanks, StateShape,
};
use kernels::operation::{
    CachedConvolution, CachedDelta, Copy, DeltaShape, GatedDelta, GatedDeltaBackward,
    ShortConvolution, ShortConvolutionBackward, SumInOrder,
};
use kernels::{Init, Kernels};
use memory::{Buffer, DType, In, Out};
use std::ops::Range;

/// o `[b s, value_heads V]`: the convolution of what the projections wrote, and the gated delta rule.
#[derive(Clone)]
pub struct Delta {
    /// The heads that it computes at a time: all, or those of one part of sequences.
    delta: DeltaConfig,
    /// Its columns of what the projections wrote. Those of one part have no z, which the norm reads by token.
    columns: DeltaColumns,
    /// The ranks that share sequences. It then computes one part's heads, of whole sequences.
    ranks: SharingRanks,
    /// Chunks from one kept state to the next; 1 keeps all.
    state_interval: usize,
    /// `[c, taps]`.
    convolution: ParameterId,
    a_log: ParameterId,
    dt_bias: ParameterId,
}

impl Delta {
    /// The states in front of chunks that are kept, `[b chunks / interval, value_heads, K, V]` f32.
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
            ranks: SharingRanks::ALONE,
            state_interval: 1,
            convolution,
            a_log: in_f32.vector("linear_attn.A_log", heads, decays),
            dt_bias: in_f32.vector("linear_attn.dt_bias", heads, Initial::One),
        }
    }

    fn shape(&self, pass: &Pass) -> DeltaShape {
        let (batch, parts) = (pass.batch().shape, self.ranks.parts());
        self.delta
            .shape(batch.rows, parts * batch.seq, self.state_interval)
    }

    fn is_shared(&self) -> bool {
        self.ranks.parts() > 1
    }

    /// The activation with queries, keys and values, b and a: by token, or by heads.
    fn input(&self) -> Activation {
        match self.is_shared() {
            false => DeltaColumns::IN,
            true => DeltaToHeads::IN,
        }
    }

    /// Its output: of all heads, or of one part's.
    fn o(&self) -> Activation {
        match self.is_shared() {
            false => CoreAttention::O,
            true => HeadsToTokens::O,
        }
    }

    /// The number of the part whose heads are computed.
    fn part(&self, pass: &Pass) -> usize {
        self.ranks.own_parts().first + pass.part()
    }

    /// The value heads of the part, among the block's; none if it computes all.
    fn own_heads(&self, pass: &Pass) -> Option<Range<usize>> {
        let (part, heads) = (self.part(pass), self.delta.value_heads);
        self.is_shared().then(|| part * heads..(part + 1) * heads)
    }

    /// The rows of the convolution that are the part's queries, keys and values: among the block's, and among its own.
    fn own_rows(&self, pass: &Pass) -> Vec<(Range<usize>, Range<usize>)> {
        let parts = self.ranks.parts();
        let [keys, _, values] = self.delta.qkv_widths().map(|width| parts * width);
        let tensors = [0..keys, keys..2 * keys, 2 * keys..2 * keys + values];
        let rows = self.ranks.places_beside(self.part(pass), &tensors);
        rows.collect()
    }

    /// A copy of the convolution's weights for the part's heads; none if it computes all.
    fn own_taps(&self, pass: &Pass) -> Result<Option<Buffer>> {
        if !self.is_shared() {
            return Ok(None);
        }
        let weight = pass.parameter(self.convolution);
        let mut own = pass.temporary("own_taps", [self.columns.mixed, self.delta.conv_width])?;
        for (whole, rows) in self.own_rows(pass) {
            let (out, x) = (own.view_mut().rows(rows), weight.rows(whole));
            pass.kernels().run(Copy { out, x })?;
        }
        Ok(Some(own))
    }

    /// Queries, keys and values behind the convolution. Both passes make them, which is cheaper than to keep them.
    fn convolved(&self, pass: &Pass, x: In) -> Result<Buffer> {
        let shape = self.shape(pass);
        let mut mixed = pass.temporary("convolved", shape.mixed())?;
        let own = self.own_taps(pass)?;
        let weight = own.as_ref().map(Buffer::view);
        pass.kernels().run(ShortConvolution {
            out: mixed.view_mut(),
            x: self.columns.mixed(x),
            weight: weight.unwrap_or_else(|| pass.parameter(self.convolution)),
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
        let ([b, a], heads) = (self.columns.b_and_a(x), self.own_heads(pass));
        let (parameters, gradients) = pass.parameters_and_gradients(vectors, &mut unused);
        let [a_log, dt_bias] = parameters.map(|vector| of_heads(vector, &heads));
        let [da_log, ddt_bias] = gradients;
        let (da_log, da_log_init) = gradient_of_heads(kernels, da_log, heads.clone())?;
        let (ddt_bias, ddt_bias_init) = gradient_of_heads(kernels, ddt_bias, heads)?;
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
        let x = self.columns.mixed(x);
        let Some(own) = self.own_taps(pass)? else {
            let (weight, (dweight, init)) = pass.matrix_and_gradient(self.convolution, &mut unused);
            return Ok(kernels.run(ShortConvolutionBackward {
                dx,
                dweight,
                init,
                dout,
                x,
                weight,
                seq,
                documents,
            })?);
        };
        let mut of_part = pass.gradient_of("d_own_taps", own.dims())?;
        kernels.run(ShortConvolutionBackward {
            dx,
            dweight: of_part.view_mut(),
            init: Init::Overwrite,
            dout,
            x,
            weight: own.view(),
            seq,
            documents,
        })?;
        let rows = self.own_rows(pass);
        let (_, gradient) = pass.matrix_and_gradient(self.convolution, &mut unused);
        let gradient = gradient_of_parts(kernels, gradient)?;
        add_rows(kernels, gradient, of_part.view(), &rows)
    }
}

/// A number for each of some value heads, or of all.
fn of_heads<'p>(vector: In<'p>, heads: &Option<Range<usize>>) -> In<'p> {
    match heads {
        Some(heads) => vector.rows(heads.clone()),
        None => vector,
    }
}

/// Adds a part's rows to those of a gradient.
fn add_rows(
    kernels: &Kernels,
    mut gradient: Out,
    of_part: In,
    rows: &[(Range<usize>, Range<usize>)],
) -> Result {
    for (whole, own) in rows {
        let (out, x) = (
            gradient.reborrow().rows(whole.clone()),
            of_part.rows(own.clone()),
        );
        let elements = x.elements();
        kernels.run(SumInOrder {
            out: out.reshape([elements]),
            x: x.reshape([1, elements]),
            init: Init::Accumulate,
        })?;
    }
    Ok(())
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
            Dimension::States {
                parts: self.ranks.parts(),
                interval: self.state_interval,
            },
            Dimension::Fixed(value_heads),
            Dimension::Fixed(key_head_dim),
            Dimension::Fixed(value_head_dim),
        ]);
        let o = self.ranks.tokens(self.delta.value_width());
        Io {
            reads: vec![self.input()],
            writes: vec![(self.o(), o), (Self::STATES, states)],
            backward_reads: vec![self.input(), Self::STATES],
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
        // A part's heads see all tokens, of which it has a part.
        6 * (self.ranks.parts() * (3 * state + taps)) as u64
    }

    fn of_sharing(&self, ranks: SharingRanks) -> Option<Vec<Box<dyn Stage>>> {
        let parts = ranks.parts();
        let own = DeltaConfig {
            key_heads: self.delta.key_heads / parts,
            value_heads: self.delta.value_heads / parts,
            ..self.delta.clone()
        };
        let columns = DeltaColumns {
            values: 0,
            ..DeltaColumns::of(&own)
        };
        let before = DeltaToHeads {
            ranks,
            delta: self.delta.clone(),
        };
        let after = HeadsToTokens {
            ranks,
            width: self.delta.value_width(),
            output: CoreAttention::O,
        };
        let own = Delta {
            delta: own,
            columns,
            ranks,
            ..self.clone()
        };
        Some(vec![Box::new(before), Box::new(own), Box::new(after)])
    }

    fn keeping_states(&self, interval: usize) -> Option<Box<dyn Stage>> {
        Some(Box::new(Delta {
            state_interval: interval,
            ..self.clone()
        }))
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let x = pass.pull(self.input())?;
        let (mut o, mut states) = (pass.output(self.o())?, pass.output(Self::STATES)?);
        if pass.has_cache() {
            let out = written(&mut o).expect("the norm behind reads it");
            self.cached(pass, out, x.view())?;
        } else if o.is_some() || states.is_some() {
            let shape = self.shape(pass);
            let mixed = self.convolved(pass, x.view())?;
            let elements = GatedDelta::scratch_elements(pass.kernels().target(), shape);
            let mut scratch = pass.temporary_f32("delta_scratch", [elements])?;
            let [b, a] = self.columns.b_and_a(x.view());
            let heads = self.own_heads(pass);
            pass.kernels().run(GatedDelta {
                out: written(&mut o),
                states: written(&mut states),
                scratch: scratch.view_mut(),
                mixed: mixed.view(),
                b,
                a,
                a_log: of_heads(pass.parameter(self.a_log), &heads),
                dt_bias: of_heads(pass.parameter(self.dt_bias), &heads),
                shape,
                documents: documents(pass),
            })?;
        }
        pass.put(self.o(), o);
        pass.put(Self::STATES, states);
        Ok(())
    }

    /// The columns of z in the gradient of what the projections wrote are those of the norm behind.
    fn backward(&self, pass: &mut Pass) -> Result {
        let dout = pass.gradient(self.o());
        let states = pass.pull(Self::STATES)?;
        let x = pass.pull(self.input())?;
        let (mut dx, _) = pass.gradient_to_add(self.input())?;
        let [dx_mixed, _, db, da] = self.columns.split(dx.view_mut());
        let of = (x.view(), states.view(), dout.view());
        let dmixed = self.rule_backward(pass, of, [db, da])?;
        drop(dout);
        pass.release(Self::STATES, states);
        self.convolution_backward(pass, dx_mixed, (dmixed.view(), x.view()))?;
        pass.file_gradient(self.input(), dx);
        Ok(())
    }
}
