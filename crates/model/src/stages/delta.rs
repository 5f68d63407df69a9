//! Layers of the gated delta rule (Yang et al. 2025), as Qwen3-Next has them: what a joined projection wrote goes through a short
//! convolution and the rule, whose output is normalised and gated.

use super::sharing::{EACH, HeadsToTokens, gradient_of_heads};
use super::{AttentionGate, CoreAttention, written};
use crate::activation::Dimension;
use crate::linear::LinearPart;
use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::stage::{Io, Stage};
use crate::{
    Activation, DeltaConfig, Extent, HeadParts, Label, LayerCacheShape, Linear, Pass, Result,
    SharingRanks, StateShape,
};
use kernels::operation::{
    CachedConvolution, CachedDelta, Copy, DeltaShape, Fill, GatedDelta, GatedDeltaBackward,
    GatedNorm, GatedNormBackward, ShortConvolution, ShortConvolutionBackward, SumInOrder,
};
use kernels::{Init, Kernels};
use memory::{Buffer, DType, In, Out};
use std::ops::Range;

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
#[derive(Clone)]
pub struct Delta {
    /// The heads that it computes at a time: all, or those of one part of sequences.
    delta: DeltaConfig,
    /// Its columns of what the projections wrote. Those of one part have no z, which the norm reads by token.
    columns: DeltaColumns,
    /// The ranks that share sequences. It then computes one part's heads, of whole sequences.
    ranks: SharingRanks,
    /// Of the states in front of chunks it keeps every so many-th.
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

    /// What has queries, keys and values, b and a: by token, or by heads.
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
        let widths = self.delta.qkv_widths();
        let parts = self.ranks.parts();
        let starts = [0, widths[0], widths[0] + widths[1]];
        let part = self.part(pass);
        let rows = starts.into_iter().zip(widths).map(|(start, width)| {
            let whole = parts * start + part * width;
            (whole..whole + width, start..start + width)
        });
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

    /// A vector with a number for each value head of the part.
    fn of_heads<'p>(&self, vector: In<'p>, heads: &Option<Range<usize>>) -> In<'p> {
        match heads {
            Some(heads) => vector.rows(heads.clone()),
            None => vector,
        }
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
        let [a_log, dt_bias] = parameters.map(|vector| self.of_heads(vector, &heads));
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
        add_rows(kernels, gradient, of_part.view(), &rows)
    }
}

/// Adds a part's rows to those of a gradient, of which the others are 0 at first.
fn add_rows(
    kernels: &Kernels,
    (mut gradient, init): (Out, Init<'static>),
    of_part: In,
    rows: &[(Range<usize>, Range<usize>)],
) -> Result {
    if matches!(init, Init::Overwrite) {
        let out = gradient.reborrow();
        kernels.run(Fill { out, value: 0.0 })?;
    }
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
                a_log: self.of_heads(pass.parameter(self.a_log), &heads),
                dt_bias: self.of_heads(pass.parameter(self.dt_bias), &heads),
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

/// Carries what the projections wrote, but for z, from tokens to heads: `[b s, c + 2 value_heads]` becomes `[b n s, (c + 2 value_heads) / n]`
/// for each of `n` parts, which have `s` tokens of each sequence.
struct DeltaToHeads {
    ranks: SharingRanks,
    /// The rule of the whole block.
    delta: DeltaConfig,
}

impl DeltaToHeads {
    /// Queries, keys and values, b and a of one part's heads.
    const IN: Activation = Activation::new("gdn_in_heads", "d_gdn_in_heads", Label::QKV);

    /// The columns of queries, keys, values, b and a.
    fn tensors(&self) -> Vec<Range<usize>> {
        let columns = DeltaColumns::of(&self.delta);
        let [keys, _, values] = self.delta.qkv_widths();
        let (b, heads) = (columns.mixed + columns.values, columns.heads);
        let starts = [
            (0, keys),
            (keys, keys),
            (2 * keys, values),
            (b, heads),
            (b + heads, heads),
        ];
        let range = |(start, width)| start..start + width;
        starts.map(range).into()
    }

    fn own_columns(&self) -> usize {
        self.ranks.columns_beside(&self.tensors())
    }
}

impl Stage for DeltaToHeads {
    fn name(&self) -> &'static str {
        "delta_to_heads"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![DeltaColumns::IN],
            writes: vec![(Self::IN, self.ranks.tokens(self.own_columns()))],
            backward_reads: Vec::new(),
        }
    }

    fn joins_parts(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let tensors = self.tensors();
        let parts = pass.each_part(|pass| {
            let x = pass.pull(DeltaColumns::IN)?;
            let Some(out) = pass.output(Self::IN)? else {
                return Ok(None);
            };
            let room = self.ranks.pack_beside(pass, x.view(), &tensors)?;
            Ok(Some((vec![room], out)))
        })?;
        let (rooms, mut made): (Vec<_>, Vec<Buffer>) = parts.into_iter().flatten().unzip();
        if made.is_empty() {
            return Ok(());
        }
        let by_head = made.iter_mut().map(|out| vec![out.view_mut()]).collect();
        self.ranks.to_heads(pass, rooms, by_head)?;
        let mut made = made.into_iter();
        pass.each_part(|pass| {
            pass.put(Self::IN, Some(made.next().expect(EACH)));
            Ok(())
        })?;
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let tensors = self.tensors();
        let by_head = pass.each_part(|pass| Ok(pass.gradient(Self::IN)))?;
        let views = by_head.iter().map(|of| vec![of.view()]).collect();
        let mut rooms = self.ranks.to_tokens(pass, views)?.into_iter();
        drop(by_head);
        pass.each_part(|pass| {
            let rooms = rooms.next().expect(EACH);
            let (mut dx, _) = pass.gradient_to_add(DeltaColumns::IN)?;
            let of = (&rooms[0], &tensors[..]);
            self.ranks.unpack_beside(pass, dx.view_mut(), of)?;
            pass.file_gradient(DeltaColumns::IN, dx);
            Ok(())
        })?;
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
