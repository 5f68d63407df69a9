//! Causal attention over whole sequences, with or without stored scores.

use super::{LatentHeads, Qkv, written};
use crate::activation::Dimension;
use crate::stage::{Io, Stage};
use crate::{
    Activation, AttentionSpec, CacheWidths, DropoutSite, Extent, Label, ModelError, ParameterId,
    Pass,
};
use kernels::operation::{
    self, AttentionBackward, CachedAttention, FlashAttention, FlashAttentionBackward, StoreInCache,
};
use kernels::{AttentionShape, Flash, FlashOptions, Target};
use memory::{Buffer, DType, Out};

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
            Attention::Cudnn => "cudnn",
        }
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
}

impl CoreAttention {
    /// Attention's output, the input of its projection.
    pub const O: Activation = Activation::new("o", "d_o", Label::ATTN_VALUE);
    /// Probabilities `[b, a, s, s]`, under eager attention.
    pub const PROBS: Activation = Activation::new("probs", "d_probs", Label::CORE_ATTN);
    /// The log-sum-exp of each query's scores, `[b, a, s]` f32, where scores are not stored.
    pub const LSE: Activation = Activation::new("lse", "d_lse", Label::CORE_ATTN);

    fn shape(&self, pass: &Pass) -> AttentionShape {
        let batch = pass.batch().shape;
        self.attention.shape(batch.rows, batch.seq)
    }

    fn options<'a>(&self, pass: &Pass<'a>) -> FlashOptions<'a> {
        let documents = pass.batch().documents.as_ref();
        FlashOptions {
            documents: documents.map(Buffer::view),
            dropout: pass.dropout(self.dropout),
            by: match self.kind {
                Attention::Cudnn => Flash::Cudnn,
                Attention::Eager | Attention::Flash => Flash::Own,
            },
        }
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
        let [q, k, v] = [pass.pull(Qkv::Q)?, pass.pull(Qkv::K)?, pass.pull(Qkv::V)?];
        let (mut o, mut probs) = (pass.output(Self::O)?, pass.output(Self::PROBS)?);
        let keeps = probs.is_some();
        let mut scratch = self.scratch(pass, |target, shape, dtype| {
            operation::Attention::scratch_elements(target, shape, dtype, keeps)
        })?;
        pass.kernels().run(operation::Attention {
            out: written(&mut o),
            probs: written(&mut probs),
            scratch: scratch.view_mut(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            shape: self.shape(pass),
            dropout: pass.dropout(self.dropout),
        })?;
        pass.put(Self::O, o);
        pass.put(Self::PROBS, probs);
        Ok(())
    }

    fn flash(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let [q, k, v] = [pass.pull(Qkv::Q)?, pass.pull(Qkv::K)?, pass.pull(Qkv::V)?];
        let (mut o, mut lse) = (pass.output(Self::O)?, pass.output(Self::LSE)?);
        let (has_out, has_lse) = (o.is_some(), lse.is_some());
        let mut scratch = self.scratch(pass, |target, shape, dtype| match self.kind {
            Attention::Cudnn => FlashAttention::cudnn_scratch_elements(shape, has_out, has_lse),
            _ => FlashAttention::scratch_elements(target, shape, dtype),
        })?;
        pass.kernels().run(FlashAttention {
            out: written(&mut o),
            lse: written(&mut lse),
            scratch: scratch.view_mut(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            shape: self.shape(pass),
            options: self.options(pass),
        })?;
        pass.put(Self::O, o);
        pass.put(Self::LSE, lse);
        Ok(())
    }

    /// Attention over the keys and values of earlier tokens in a cache, too. Under latent attention, q has queries of
    /// latents, k has latents, and v the columns of keys that all heads share ([`super::LatentUp`]).
    fn cached(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let [q, k, v] = [pass.pull(Qkv::Q)?, pass.pull(Qkv::K)?, pass.pull(Qkv::V)?];
        let mut o = pass.output(Self::O)?;
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
            k: k.view(),
            v: v.view(),
            table,
            lengths,
        })?;
        if let Some(out) = written(&mut sums).or(written(&mut o)) {
            kernels.run(CachedAttention {
                out,
                q: q.view(),
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

    /// Leases the gradients of q, k and v.
    fn gradients(&self, pass: &Pass) -> Result<[Buffer; 3], ModelError> {
        let lease = |of: Activation, width| {
            let shape = [pass.tokens(), width];
            pass.temporary(of.gradient_name(), shape)
        };
        let [k_width, v_width] = self.attention.kv_widths();
        Ok([
            lease(Qkv::Q, self.attention.q_width())?,
            lease(Qkv::K, k_width)?,
            lease(Qkv::V, v_width)?,
        ])
    }

    fn eager_backward(&self, pass: &mut Pass) -> Result<[Buffer; 3], ModelError> {
        let dout = pass.gradient(Self::O);
        // Pull replayable inputs first: a replay leases memory.
        let probs = pass.pull(Self::PROBS)?;
        let [q, k, v] = [pass.pull(Qkv::Q)?, pass.pull(Qkv::K)?, pass.pull(Qkv::V)?];
        let [mut dq, mut dk, mut dv] = self.gradients(pass)?;
        let mut scratch = self.scratch(pass, AttentionBackward::scratch_elements)?;
        pass.kernels().run(AttentionBackward {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            scratch: scratch.view_mut(),
            dout: dout.view(),
            probs: probs.view(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            shape: self.shape(pass),
            dropout: pass.dropout(self.dropout),
        })?;
        Ok([dq, dk, dv])
    }

    fn flash_backward(&self, pass: &mut Pass) -> Result<[Buffer; 3], ModelError> {
        let dout = pass.gradient(Self::O);
        // Pull replayable inputs first: a replay leases memory.
        let (lse, o) = (pass.pull(Self::LSE)?, pass.pull(Self::O)?);
        let [q, k, v] = [pass.pull(Qkv::Q)?, pass.pull(Qkv::K)?, pass.pull(Qkv::V)?];
        let [mut dq, mut dk, mut dv] = self.gradients(pass)?;
        let mut scratch = self.scratch(pass, |target, shape, dtype| match self.kind {
            Attention::Cudnn => FlashAttentionBackward::cudnn_scratch_elements(shape),
            _ => FlashAttentionBackward::scratch_elements(target, shape, dtype),
        })?;
        pass.kernels().run(FlashAttentionBackward {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            scratch: scratch.view_mut(),
            dout: dout.view(),
            out: o.view(),
            lse: lse.view(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            shape: self.shape(pass),
            options: self.options(pass),
        })?;
        Ok([dq, dk, dv])
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
            Dimension::Seq,
        ];
        let o = (Self::O, Extent::tokens(self.attention.o_width()));
        let inputs = [Qkv::Q, Qkv::K, Qkv::V];
        let (writes, kept) = match self.kind {
            Attention::Eager => {
                let sizes = [&by_head[..], &[Dimension::Seq]].concat();
                let probs = (Self::PROBS, Extent::of(&sizes));
                (vec![probs, o], &[Self::PROBS][..])
            }
            Attention::Flash | Attention::Cudnn => {
                let lse = (Self::LSE, Extent::of_f32(&by_head));
                (vec![o, lse], &[Self::O, Self::LSE][..])
            }
        };
        Io {
            reads: inputs.to_vec(),
            writes,
            backward_reads: [&inputs, kept].concat(),
        }
    }

    fn dropout(&self) -> Vec<DropoutSite> {
        vec![self.dropout]
    }

    fn parameters_with_cache(&self) -> Vec<ParameterId> {
        self.latents.iter().map(LatentHeads::parameter).collect()
    }

    fn cache_widths(&self) -> Option<CacheWidths> {
        Some(self.attention.cache_widths())
    }

    fn flops_per_token(&self, seq: usize) -> u64 {
        // A window of `w` keys leaves `w (2 s - w)` of the `s s` scores; that is all of them where `w` is `s`.
        let reach = self.attention.window.unwrap_or(seq).min(seq);
        let keys = reach as u64 * (2 * seq - reach) as u64 / seq.max(1) as u64;
        6 * (self.attention.q_width() + self.attention.o_width()) as u64 * keys
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        match self.kind {
            _ if pass.cache().is_some() => self.cached(pass),
            Attention::Eager => self.eager(pass),
            Attention::Flash | Attention::Cudnn => self.flash(pass),
        }
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let gradients = match self.kind {
            Attention::Eager => self.eager_backward(pass)?,
            Attention::Flash | Attention::Cudnn => self.flash_backward(pass)?,
        };
        for (of, gradient) in [Qkv::Q, Qkv::K, Qkv::V].into_iter().zip(gradients) {
            pass.file_gradient(of, gradient);
        }
        Ok(())
    }
}
