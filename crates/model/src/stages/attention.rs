//! Causal attention over whole sequences, with or without stored scores.

use super::qkv_tensors::{QkvTensors, views, views_mut};
use super::sharing::{HeadsToTokens, TokensToHeads, gradient_of_heads};
use super::{LatentHeads, Qkv, written};
use crate::activation::Dimension;
use crate::stage::{Io, Stage};
use crate::{
    Activation, AttentionSpec, BatchShape, DropoutSite, Extent, Label, LayerCacheShape,
    ParameterId, Pass, Result, SharingRanks,
};
use kernels::operation::{
    self, AttentionBackward, CachedAttention, FlashAttention, FlashAttentionBackward, StoreInCache,
};
use kernels::{AttentionShape, FlashOptions, Init, Target};
use memory::{Buffer, DType, In, Out};
use std::ops::Range;

/// How attention is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Probabilities are stored, `[b, a, s, s]`.
    #[default]
    Eager,
    /// Scores are never stored. The backward pass computes them again from the output and the log-sum-exp `[b, a, s]`.
    Flash,
}

impl Attention {
    /// Whether scores are stored.
    pub fn stores_scores(self) -> bool {
        self == Attention::Eager
    }

    /// The name in settings and files.
    pub fn name(self) -> &'static str {
        match self {
            Attention::Eager => "eager",
            Attention::Flash => "flash",
        }
    }
}

/// o `[b s, heads e]` = softmax(scale q k^T) v, with grouped queries and with values `e` wide. Scores may be capped, and a sink may join
/// each head's softmax.
pub struct CoreAttention {
    /// How it is computed.
    pub kind: Attention,
    /// Its heads, their widths and their window.
    pub attention: AttentionSpec,
    /// The scores `[heads]` that join the softmax of each head, of the whole block, and have no value.
    pub sinks: Option<ParameterId>,
    /// Where probabilities are dropped.
    pub dropout: DropoutSite,
    /// Latent attention's matrix, for passes with a cache: they weigh latents, of which heads make their values.
    pub latents: Option<LatentHeads>,
    /// The ranks that share sequences. It then computes one part's heads, of whole sequences.
    pub ranks: SharingRanks,
}

impl CoreAttention {
    /// Attention's output, the input of its projection.
    pub const O: Activation = Activation::new("o", "d_o", Label::ATTN_VALUE);
    /// Probabilities `[b, a, s, s]`, under eager attention.
    pub const PROBS: Activation = Activation::new("probs", "d_probs", Label::CORE_ATTN);
    /// The log-sum-exp of each query's scores and sink, `[b, a, s]` f32, where scores are not stored, or there are sinks.
    pub const LSE: Activation = Activation::new("lse", "d_lse", Label::CORE_ATTN);

    /// What has queries, keys and values.
    fn inputs(&self) -> &'static [Activation; 3] {
        if self.is_shared() {
            return TokensToHeads::made(&self.attention);
        }
        &Qkv::MADE
    }

    /// Its output: of all heads, or of one part's.
    fn o(&self) -> Activation {
        match self.is_shared() {
            false => Self::O,
            true => HeadsToTokens::O,
        }
    }

    fn is_shared(&self) -> bool {
        self.ranks.parts() > 1
    }

    /// Tokens of whole sequences.
    fn tokens(&self, pass: &Pass) -> usize {
        self.ranks.parts() * pass.tokens()
    }

    /// Queries, keys and values.
    fn qkv(&self) -> QkvTensors {
        QkvTensors(self.inputs(), self.attention.qkv_widths())
    }

    fn shape(&self, pass: &Pass) -> AttentionShape {
        self.shape_of(pass.batch().shape)
    }

    fn shape_of(&self, batch: BatchShape) -> AttentionShape {
        let seq = self.ranks.parts() * batch.seq;
        self.attention.shape(batch.rows, seq)
    }

    fn options<'a>(&self, pass: &Pass<'a>) -> FlashOptions<'a> {
        FlashOptions {
            documents: pass.batch().documents.as_ref().map(Buffer::view),
            dropout: pass.dropout(self.dropout),
        }
    }

    fn scratch(
        &self,
        pass: &Pass,
        elements: impl Fn(Target, AttentionShape, DType) -> usize,
    ) -> Result<Buffer> {
        let elements = elements(pass.kernels().target(), self.shape(pass), pass.dtype());
        pass.temporary_f32("attention_scratch", [elements])
    }

    /// The heads that it computes, among the block's.
    fn own_heads(&self, pass: &Pass) -> Range<usize> {
        let heads = self.attention.heads;
        let part = self.ranks.own_parts().first + pass.part();
        part * heads..(part + 1) * heads
    }

    /// The sinks of its heads, if there are some.
    fn sinks<'p>(&self, pass: &'p Pass) -> Option<In<'p>> {
        let heads = self.own_heads(pass);
        Some(pass.parameter(self.sinks?).rows(heads))
    }

    /// Calls a function with the sinks of its heads, if there are some, and with the place of their gradient, if they are trained.
    fn with_sinks(
        &self,
        pass: &mut Pass,
        run: impl FnOnce(Option<In>, Option<Out>, Init) -> Result,
    ) -> Result {
        let Some(sinks) = self.sinks.filter(|sinks| sinks.is_trained()) else {
            return run(self.sinks(pass), None, Init::Overwrite);
        };
        let (kernels, heads) = (pass.kernels(), self.own_heads(pass));
        let mut unused = [None];
        let ([all], [gradients]) = pass.parameters_and_gradients([sinks], &mut unused);
        let own = self.is_shared().then(|| heads.clone());
        let (gradients, init) = gradient_of_heads(kernels, gradients, own)?;
        run(Some(all.rows(heads)), Some(gradients), init)
    }

    fn eager(&self, pass: &mut Pass) -> Result {
        assert!(
            pass.batch().documents.is_none(),
            "settings take flash attention where documents are packed"
        );
        let inputs = self.qkv().pull(pass)?;
        let (mut o, mut probs) = (pass.output(self.o())?, pass.output(Self::PROBS)?);
        let mut lse = match self.sinks {
            Some(_) => pass.output(Self::LSE)?,
            None => None,
        };
        let keeps = probs.is_some();
        let mut scratch = self.scratch(pass, |target, shape, dtype| {
            operation::Attention::scratch_elements(target, shape, dtype, keeps)
        })?;
        let [q, k, v] = views(&inputs);
        pass.kernels().run(operation::Attention {
            out: written(&mut o),
            probs: written(&mut probs),
            lse: written(&mut lse),
            scratch: scratch.view_mut(),
            q,
            k,
            v,
            sinks: self.sinks(pass),
            shape: self.shape(pass),
            dropout: pass.dropout(self.dropout),
        })?;
        pass.put(self.o(), o);
        pass.put(Self::PROBS, probs);
        if self.sinks.is_some() {
            pass.put(Self::LSE, lse);
        }
        Ok(())
    }

    fn flash(&self, pass: &mut Pass) -> Result {
        let inputs = self.qkv().pull(pass)?;
        let (mut o, mut lse) = (pass.output(self.o())?, pass.output(Self::LSE)?);
        let mut scratch = self.scratch(pass, FlashAttention::scratch_elements)?;
        let [q, k, v] = views(&inputs);
        pass.kernels().run(FlashAttention {
            out: written(&mut o),
            lse: written(&mut lse),
            scratch: scratch.view_mut(),
            q,
            k,
            v,
            sinks: self.sinks(pass),
            shape: self.shape(pass),
            options: self.options(pass),
        })?;
        pass.put(self.o(), o);
        pass.put(Self::LSE, lse);
        Ok(())
    }

    /// Attention over the keys and values of earlier tokens in a cache, too. Under latent attention, q has queries of
    /// latents, k has latents, and v the columns of keys that all heads share ([`super::LatentUp`]).
    fn cached(&self, pass: &mut Pass) -> Result {
        let inputs = self.qkv().pull(pass)?;
        let mut o = pass.output(Self::O)?;
        let [q, k, v] = views(&inputs);
        let attention = self.attention.cached();
        let mut sums = match &self.latents {
            Some(_) => Some(pass.temporary("latent_sums", [pass.tokens(), attention.o_width()])?),
            None => None,
        };
        let (kernels, batch) = (pass.kernels(), pass.batch().shape);
        let cached = pass.cache_and_parameter(self.sinks);
        let (mut cache, sinks) = cached.expect("whoever calls this has a cache");
        let (table, lengths) = (cache.table, cache.lengths);
        kernels.run(StoreInCache {
            k_cache: cache.k_cache.reborrow(),
            v_cache: cache.v_cache.as_mut().map(Out::reborrow),
            k,
            v,
            table,
            lengths,
        })?;
        if let Some(out) = written(&mut sums).or(written(&mut o)) {
            kernels.run(CachedAttention {
                out,
                q,
                k_cache: cache.k_cache.as_in(),
                v_cache: cache.v_cache.as_ref().map(Out::as_in),
                table,
                lengths,
                sinks,
                shape: attention.shape(batch.rows, batch.seq),
            })?;
        }
        if let (Some(latents), Some(sums), Some(o)) = (&self.latents, &sums, &mut o) {
            latents.values(pass, o.view_mut(), sums.view())?;
        }
        pass.put(Self::O, o);
        Ok(())
    }

    fn eager_backward(&self, pass: &mut Pass) -> Result<[Buffer; 3]> {
        let dout = pass.gradient(self.o());
        // Pull replayable inputs first: a replay leases memory.
        let probs = pass.pull(Self::PROBS)?;
        let lse = self.sinks.map(|_| pass.pull(Self::LSE)).transpose()?;
        let inputs = self.qkv().pull(pass)?;
        let mut gradients = self.qkv().gradients(pass, self.tokens(pass))?;
        let is_trained = self.sinks.is_some_and(ParameterId::is_trained);
        let mut scratch = self.scratch(pass, |target, shape, dtype| {
            AttentionBackward::scratch_elements(target, shape, dtype, is_trained)
        })?;
        let ([dq, dk, dv], [q, k, v]) = (views_mut(&mut gradients), views(&inputs));
        let (kernels, shape) = (pass.kernels(), self.shape(pass));
        let dropout = pass.dropout(self.dropout);
        self.with_sinks(pass, |sinks, dsinks, dsinks_init| {
            Ok(kernels.run(AttentionBackward {
                dq,
                dk,
                dv,
                dsinks,
                dsinks_init,
                scratch: scratch.view_mut(),
                dout: dout.view(),
                probs: probs.view(),
                lse: lse.as_deref().map(Buffer::view),
                q,
                k,
                v,
                sinks,
                shape,
                dropout,
            })?)
        })?;
        Ok(gradients)
    }

    fn flash_backward(&self, pass: &mut Pass) -> Result<[Buffer; 3]> {
        let dout = pass.gradient(self.o());
        // Pull replayable inputs first: a replay leases memory.
        let (lse, o) = (pass.pull(Self::LSE)?, pass.pull(self.o())?);
        let inputs = self.qkv().pull(pass)?;
        let mut gradients = self.qkv().gradients(pass, self.tokens(pass))?;
        let mut scratch = self.scratch(pass, FlashAttentionBackward::scratch_elements)?;
        let ([dq, dk, dv], [q, k, v]) = (views_mut(&mut gradients), views(&inputs));
        let (kernels, shape, options) = (pass.kernels(), self.shape(pass), self.options(pass));
        self.with_sinks(pass, |sinks, dsinks, dsinks_init| {
            Ok(kernels.run(FlashAttentionBackward {
                dq,
                dk,
                dv,
                dsinks,
                dsinks_init,
                scratch: scratch.view_mut(),
                dout: dout.view(),
                out: o.view(),
                lse: lse.view(),
                q,
                k,
                v,
                sinks,
                shape,
                options,
            })?)
        })?;
        Ok(gradients)
    }
}

impl Stage for CoreAttention {
    fn name(&self) -> &'static str {
        "core_attn"
    }

    fn io(&self) -> Io {
        let by_head = [
            Dimension::Rows,
            Dimension::Fixed(self.attention.heads),
            self.ranks.seq(),
        ];
        let o = (self.o(), self.ranks.tokens(self.attention.o_width()));
        let inputs = self.inputs();
        let lse = (Self::LSE, Extent::of_f32(&by_head));
        let (writes, kept) = match self.kind {
            Attention::Eager => {
                let sizes = [&by_head[..], &[self.ranks.seq()]].concat();
                let probs = (Self::PROBS, Extent::of(&sizes));
                match self.sinks {
                    None => (vec![probs, o], vec![Self::PROBS]),
                    Some(_) => (vec![probs, o, lse], vec![Self::PROBS, Self::LSE]),
                }
            }
            Attention::Flash => (vec![o, lse], vec![self.o(), Self::LSE]),
        };
        Io {
            reads: inputs.to_vec(),
            writes,
            backward_reads: [&inputs[..], &kept].concat(),
        }
    }

    fn dropout(&self) -> Vec<DropoutSite> {
        vec![self.dropout]
    }

    fn parameters(&self) -> Vec<ParameterId> {
        self.sinks.into_iter().collect()
    }

    /// It has a vector alone.
    fn can_defer_gradients(&self) -> bool {
        true
    }

    fn parameters_with_cache(&self) -> Vec<ParameterId> {
        let latents = self.latents.iter();
        latents.flat_map(LatentHeads::parameters).collect()
    }

    fn cache_shape(&self) -> Option<LayerCacheShape> {
        Some(LayerCacheShape::Tokens(self.attention.cache_widths()))
    }

    fn flops_per_token(&self, seq: usize) -> u64 {
        // A window of `w` keys leaves `w (2 s - w)` of the `s s` scores; that is all of them where `w` is `s`.
        let reach = self.attention.window.unwrap_or(seq).min(seq);
        let keys = reach as u64 * (2 * seq - reach) as u64 / seq.max(1) as u64;
        // A part's heads see all tokens, of which it has a part.
        let heads = self.ranks.parts() * (self.attention.q_width() + self.attention.o_width());
        6 * heads as u64 * keys
    }

    fn of_sharing(&self, ranks: SharingRanks) -> Option<Vec<Box<dyn Stage>>> {
        let attention = self.attention.clone();
        let before = TokensToHeads {
            ranks,
            attention: attention.clone(),
            inputs: self.inputs(),
        };
        let own = CoreAttention {
            kind: self.kind,
            attention: ranks.attention(&attention),
            sinks: self.sinks,
            dropout: self.dropout,
            latents: self.latents.clone(),
            ranks,
        };
        let after = HeadsToTokens {
            ranks,
            width: attention.o_width(),
            output: Self::O,
        };
        Some(vec![Box::new(before), Box::new(own), Box::new(after)])
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        match self.kind {
            _ if pass.has_cache() => self.cached(pass),
            Attention::Eager => self.eager(pass),
            _ => self.flash(pass),
        }
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let gradients = match self.kind {
            Attention::Eager => self.eager_backward(pass)?,
            _ => self.flash_backward(pass)?,
        };
        self.qkv().file_gradients(pass, gradients);
        Ok(())
    }
}
