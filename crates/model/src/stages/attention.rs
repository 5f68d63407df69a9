//! Causal attention over whole sequences, with or without stored scores.

use super::qkv_tensors::QkvTensors;
use super::sharing::{HeadsToTokens, TokensToHeads};
use super::{LatentHeads, Qkv, written};
use crate::activation::Dimension;
use crate::stage::{Io, Stage};
use crate::{
    Activation, AttentionSpec, BatchShape, CacheWidths, DropoutSite, Extent, Label, ModelError,
    ParameterId, Pass, SharingRanks,
};
use kernels::operation::{
    self, AttentionBackward, CachedAttention, FlashAttention, FlashAttentionBackward, SplitQkv,
    StoreInCache,
};
use kernels::{AttentionShape, Flash, FlashOptions, Target};
use memory::{Buffer, DType, Out};
use std::rc::Rc;

/// How attention is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Probabilities are stored, `[b, a, s, s]`.
    #[default]
    Eager,
    /// Scores are never stored. The backward pass computes them again from the output and the log-sum-exp `[b, a, s]`.
    Flash,
    /// Flash attention by cuDNN: the same activations, with other bits.
    Cudnn,
    /// cuDNN's of packed documents. Queries, keys and values are made apart, as its ragged layout and our own kernels take them,
    /// which compute micro-batches of more documents than cuDNN's plans have room for.
    #[serde(rename = "cudnn")]
    CudnnDocuments,
}

impl Attention {
    /// Whether scores are stored.
    pub fn stores_scores(self) -> bool {
        self == Attention::Eager
    }

    /// Whether queries, keys and values stay side by side in the product that makes them. cuDNN reads them there. Norms of heads
    /// and latents make them anew.
    pub fn reads_packed(self, spec: &AttentionSpec) -> bool {
        self == Attention::Cudnn && !spec.qk_norm && spec.latent.is_none()
    }

    /// The name in settings and files.
    pub fn name(self) -> &'static str {
        match self {
            Attention::Eager => "eager",
            Attention::Flash => "flash",
            Attention::Cudnn | Attention::CudnnDocuments => "cudnn",
        }
    }

    /// Whether cuDNN computes it.
    pub fn is_cudnn(self) -> bool {
        matches!(self, Attention::Cudnn | Attention::CudnnDocuments)
    }
}

/// o `[b s, heads e]` = softmax(scale q k^T) v, with grouped queries and with values `e` wide.
pub struct CoreAttention {
    /// How it is computed.
    pub kind: Attention,
    /// Its heads, their widths and their window.
    pub attention: AttentionSpec,
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
    /// The log-sum-exp of each query's scores, `[b, a, s]` f32, where scores are not stored.
    pub const LSE: Activation = Activation::new("lse", "d_lse", Label::CORE_ATTN);

    /// What has queries, keys and values.
    fn inputs(&self) -> &'static [Activation] {
        if self.is_shared() {
            return TokensToHeads::made(&self.attention);
        }
        match self.kind.reads_packed(&self.attention) {
            true => &[Qkv::PACKED],
            false => &Qkv::MADE,
        }
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
        let batch = pass.batch();
        let by = match &batch.ragged {
            Some(ragged) if !ragged.fits => Flash::Own,
            _ if self.kind.is_cudnn() => Flash::Cudnn,
            _ => Flash::Own,
        };
        let documents = match (&batch.ragged, by) {
            (Some(ragged), Flash::Cudnn) => Some(&ragged.numbers),
            _ => batch.documents.as_ref(),
        };
        FlashOptions {
            documents: documents.map(Buffer::view),
            dropout: pass.dropout(self.dropout),
            by,
        }
    }

    /// Scratch for flash attention, and how much of it is used, of what our own kernels take and of what cuDNN takes with documents or
    /// without. Where the data decides who computes a micro-batch, the larger is leased.
    fn flash_scratch(
        &self,
        pass: &Pass,
        own: impl Fn(Target, AttentionShape, DType) -> usize,
        cudnn: impl Fn(AttentionShape, bool) -> usize,
    ) -> Result<(Buffer, usize), ModelError> {
        let is_ragged = pass.batch().ragged.is_some();
        let used = |by, (target, shape, dtype)| match by {
            Flash::Own => own(target, shape, dtype),
            Flash::Cudnn => cudnn(shape, is_ragged),
        };
        let arguments = (pass.kernels().target(), self.shape(pass), pass.dtype());
        let by = self.options(pass).by;
        let leased = match is_ragged {
            true => used(Flash::Own, arguments).max(used(Flash::Cudnn, arguments)),
            false => used(by, arguments),
        };
        let scratch = pass.temporary_f32("attention_scratch", [leased])?;
        Ok((scratch, used(by, arguments)))
    }

    fn scratch(
        &self,
        pass: &Pass,
        elements: impl Fn(Target, AttentionShape, DType) -> usize,
    ) -> Result<Buffer, ModelError> {
        let elements = elements(pass.kernels().target(), self.shape(pass), pass.dtype());
        pass.temporary_f32("attention_scratch", [elements])
    }

    fn eager(&self, pass: &mut Pass) -> Result<(), ModelError> {
        assert!(
            pass.batch().documents.is_none(),
            "settings take flash attention where documents are packed"
        );
        let inputs = self.qkv().pull(pass)?;
        let (mut o, mut probs) = (pass.output(self.o())?, pass.output(Self::PROBS)?);
        let keeps = probs.is_some();
        let mut scratch = self.scratch(pass, |target, shape, dtype| {
            operation::Attention::scratch_elements(target, shape, dtype, keeps)
        })?;
        let [q, k, v] = self.qkv().views(&inputs);
        pass.kernels().run(operation::Attention {
            out: written(&mut o),
            probs: written(&mut probs),
            scratch: scratch.view_mut(),
            q,
            k,
            v,
            shape: self.shape(pass),
            dropout: pass.dropout(self.dropout),
        })?;
        pass.put(self.o(), o);
        pass.put(Self::PROBS, probs);
        Ok(())
    }

    fn flash(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let inputs = self.qkv().pull(pass)?;
        let (mut o, mut lse) = (pass.output(self.o())?, pass.output(Self::LSE)?);
        let (has_out, has_lse) = (o.is_some(), lse.is_some());
        let (mut scratch, elements) = self.flash_scratch(
            pass,
            FlashAttention::scratch_elements,
            |shape, documents| {
                FlashAttention::cudnn_scratch_elements(shape, documents, [has_out, has_lse])
            },
        )?;
        let [q, k, v] = self.qkv().views(&inputs);
        pass.kernels().run(FlashAttention {
            out: written(&mut o),
            lse: written(&mut lse),
            scratch: scratch.view_mut().rows(0..elements),
            q,
            k,
            v,
            shape: self.shape(pass),
            options: self.options(pass),
        })?;
        pass.put(self.o(), o);
        pass.put(Self::LSE, lse);
        Ok(())
    }

    /// Attention over the keys and values of earlier tokens in a cache, too. Under latent attention, q has queries of
    /// latents, k has latents, and v the columns of keys that all heads share ([`super::LatentUp`]).
    fn cached(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let inputs = self.qkv().pull(pass)?;
        let mut o = pass.output(Self::O)?;
        let apart = self.apart(pass, &inputs)?;
        let [q, k, v] = self.qkv().views(apart.as_deref().unwrap_or(&inputs));
        let attention = self.attention.cached();
        let mut sums = match &self.latents {
            Some(_) => Some(pass.temporary("latent_sums", [pass.tokens(), attention.o_width()])?),
            None => None,
        };
        let (kernels, batch) = (pass.kernels(), pass.batch().shape);
        let mut cache = pass.cache().expect("whoever calls this has one");
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
                shape: attention.shape(batch.rows, batch.seq),
            })?;
        }
        if let (Some(latents), Some(sums), Some(o)) = (&self.latents, &sums, &mut o) {
            latents.values(pass, o.view_mut(), sums.view())?;
        }
        pass.put(Self::O, o);
        Ok(())
    }

    /// Copies of packed queries, keys and values, for a cache, which takes each of them whole.
    fn apart(
        &self,
        pass: &Pass,
        inputs: &[Rc<Buffer>],
    ) -> Result<Option<Vec<Rc<Buffer>>>, ModelError> {
        let [packed] = inputs else { return Ok(None) };
        let widths = self.attention.qkv_widths();
        let lease =
            |(of, width): (Activation, usize)| pass.temporary(of.name(), [packed.dims()[0], width]);
        let parts = Qkv::MADE.into_iter().zip(widths).map(lease);
        let mut parts = parts.collect::<Result<Vec<_>, ModelError>>()?;
        let [q, k, v] = self.qkv().views_mut(&mut parts);
        pass.kernels().run(SplitQkv {
            q: Some(q),
            k: Some(k),
            v: Some(v),
            qkv: packed.view(),
            kv_widths: self.attention.kv_widths(),
            turn: None,
        })?;
        Ok(Some(parts.into_iter().map(Rc::new).collect()))
    }

    fn eager_backward(&self, pass: &mut Pass) -> Result<Vec<Buffer>, ModelError> {
        let dout = pass.gradient(self.o());
        // Pull replayable inputs first: a replay leases memory.
        let probs = pass.pull(Self::PROBS)?;
        let inputs = self.qkv().pull(pass)?;
        let mut gradients = self.qkv().gradients(pass, self.tokens(pass))?;
        let mut scratch = self.scratch(pass, AttentionBackward::scratch_elements)?;
        let ([dq, dk, dv], [q, k, v]) = (
            self.qkv().views_mut(&mut gradients),
            self.qkv().views(&inputs),
        );
        pass.kernels().run(AttentionBackward {
            dq,
            dk,
            dv,
            scratch: scratch.view_mut(),
            dout: dout.view(),
            probs: probs.view(),
            q,
            k,
            v,
            shape: self.shape(pass),
            dropout: pass.dropout(self.dropout),
        })?;
        Ok(gradients)
    }

    fn flash_backward(&self, pass: &mut Pass) -> Result<Vec<Buffer>, ModelError> {
        let dout = pass.gradient(self.o());
        // Pull replayable inputs first: a replay leases memory.
        let (lse, o) = (pass.pull(Self::LSE)?, pass.pull(self.o())?);
        let inputs = self.qkv().pull(pass)?;
        let mut gradients = self.qkv().gradients(pass, self.tokens(pass))?;
        let (mut scratch, elements) = self.flash_scratch(
            pass,
            FlashAttentionBackward::scratch_elements,
            FlashAttentionBackward::cudnn_scratch_elements,
        )?;
        let ([dq, dk, dv], [q, k, v]) = (
            self.qkv().views_mut(&mut gradients),
            self.qkv().views(&inputs),
        );
        pass.kernels().run(FlashAttentionBackward {
            dq,
            dk,
            dv,
            scratch: scratch.view_mut().rows(0..elements),
            dout: dout.view(),
            out: o.view(),
            lse: lse.view(),
            q,
            k,
            v,
            shape: self.shape(pass),
            options: self.options(pass),
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
        let (writes, kept) = match self.kind {
            Attention::Eager => {
                let sizes = [&by_head[..], &[self.ranks.seq()]].concat();
                let probs = (Self::PROBS, Extent::of(&sizes));
                (vec![probs, o], vec![Self::PROBS])
            }
            Attention::Flash | Attention::Cudnn | Attention::CudnnDocuments => {
                let lse = (Self::LSE, Extent::of_f32(&by_head));
                (vec![o, lse], vec![self.o(), Self::LSE])
            }
        };
        Io {
            reads: inputs.to_vec(),
            writes,
            backward_reads: [inputs, &kept].concat(),
        }
    }

    fn dropout(&self) -> Vec<DropoutSite> {
        vec![self.dropout]
    }

    fn parameters_with_cache(&self) -> Vec<ParameterId> {
        let latents = self.latents.iter();
        latents.flat_map(LatentHeads::parameters).collect()
    }

    fn cache_widths(&self) -> Option<CacheWidths> {
        Some(self.attention.cache_widths())
    }

    fn ragged_shape(&self, batch: BatchShape) -> Option<AttentionShape> {
        let shape = || self.shape_of(batch);
        (self.kind == Attention::CudnnDocuments).then(shape)
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
            dropout: self.dropout,
            latents: self.latents.clone(),
            ranks,
        };
        let after = HeadsToTokens {
            ranks,
            attention,
            output: Self::O,
        };
        Some(vec![Box::new(before), Box::new(own), Box::new(after)])
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        match self.kind {
            _ if pass.cache().is_some() => self.cached(pass),
            Attention::Eager => self.eager(pass),
            _ => self.flash(pass),
        }
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let gradients = match self.kind {
            Attention::Eager => self.eager_backward(pass)?,
            _ => self.flash_backward(pass)?,
        };
        self.qkv().file_gradients(pass, gradients);
        Ok(())
    }
}
