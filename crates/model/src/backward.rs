//! The backward pass, a stage a function. Within a stage: weight gradient, let go of the input, then lease the data
//! gradient.

use crate::model::ModelError;
use crate::pass::{Pass, Position};
use crate::stage::{Activation, Stage};
use crate::table::Attention;
use kernels::attention::Pass as AttentionPass;
use kernels::{FlashOptions, Init};
use memory::{Buffer, In, Layer, Phase};

use Activation::{Act, Gate, H1, H2, K, KRaw, Lse, O, Probs, Q, QRaw, Rstd1, Rstd2, Up, V, X, X2};

impl Pass<'_> {
    /// From the gradient of the head's input to the embedding's.
    pub(crate) fn backward(&mut self, mut dx: Buffer) -> Result<(), ModelError> {
        for layer in (0..self.model.config.layers).rev() {
            let _place = self.memory.enter(Phase::Backward, Layer::Block(layer));
            if let Some(next) = layer.checked_sub(1) {
                self.fetch_block(next)?;
            }
            self.block_backward(layer, &mut dx)?;
        }
        let _place = self.memory.enter(Phase::Backward, Layer::Embedding);
        let (dtable, init) = self.gradients.accumulate(self.model.ids.embed_tokens);
        self.kernels
            .embedding_backward(dtable, dx.view(), self.batch.input_ids.view(), init)?;
        Ok(())
    }

    /// `dx [b s, h]` holds the gradient of the block's output and then that of its input.
    fn block_backward(&mut self, layer: usize, dx: &mut Buffer) -> Result<(), ModelError> {
        let at = |stage| Position { layer, stage };
        let dact =
            self.backward_stage(at(Stage::MlpDown), |pass| pass.mlp_down_backward(layer, dx))?; // [b s, f]
        let (dgate, dup) =
            self.backward_stage(at(Stage::MlpAct), |pass| pass.mlp_act_backward(layer, dact))?; // [b s, f]
        let dh2 = self.backward_stage(at(Stage::MlpUp), |pass| {
            pass.mlp_up_backward(layer, dgate, dup)
        })?; // [b s, h]
        self.backward_stage(at(Stage::MlpNorm), |pass| {
            pass.mlp_norm_backward(layer, dx, dh2)
        })?;
        let dout =
            self.backward_stage(at(Stage::AttnOut), |pass| pass.attn_out_backward(layer, dx))?; // [b s, q]
        let dqkv = self.backward_stage(at(Stage::CoreAttn), |pass| {
            pass.core_attn_backward(layer, dout)
        })?; // [b s, q or k]
        let dh1 = self.backward_stage(at(Stage::Qkv), |pass| pass.qkv_backward(layer, dqkv))?; // [b s, h]
        self.backward_stage(at(Stage::AttnNorm), |pass| {
            pass.attn_norm_backward(layer, dx, dh1)
        })
    }

    fn mlp_down_backward(&mut self, layer: usize, dx: &Buffer) -> Result<Buffer, ModelError> {
        let weight = self.model.ids.blocks[layer].down_proj;
        let act = self.pull(layer, Act)?;
        self.weight_gradient(weight, dx.view(), act.view())?;
        self.release(layer, Act, act);
        let mut dact = self.temporary("d_act", [self.tokens(), self.model.config.ffn])?;
        self.kernels.matmul(
            dact.view_mut(),
            dx.view(),
            self.parameter(weight),
            Init::Overwrite,
        )?;
        Ok(dact)
    }

    /// The gradients take the places of gate and up.
    fn mlp_act_backward(
        &mut self,
        layer: usize,
        dact: Buffer,
    ) -> Result<(Buffer, Buffer), ModelError> {
        let (mut gate, mut up) = (self.take(layer, Gate)?, self.take(layer, Up)?);
        self.kernels
            .swiglu_backward(gate.view_mut(), up.view_mut(), dact.view())?;
        Ok((gate, up))
    }

    fn mlp_up_backward(
        &mut self,
        layer: usize,
        dgate: Buffer,
        dup: Buffer,
    ) -> Result<Buffer, ModelError> {
        let ids = &self.model.ids.blocks[layer];
        let h2 = self.pull(layer, H2)?;
        self.weight_gradient(ids.gate_proj, dgate.view(), h2.view())?;
        self.weight_gradient(ids.up_proj, dup.view(), h2.view())?;
        self.release(layer, H2, h2);
        let mut dh2 = self.temporary("d_h2", [self.tokens(), self.model.config.hidden])?;
        self.kernels.matmul(
            dh2.view_mut(),
            dgate.view(),
            self.parameter(ids.gate_proj),
            Init::Overwrite,
        )?;
        drop(dgate);
        self.kernels.matmul(
            dh2.view_mut(),
            dup.view(),
            self.parameter(ids.up_proj),
            Init::Accumulate,
        )?;
        Ok(dh2)
    }

    fn mlp_norm_backward(
        &mut self,
        layer: usize,
        dx: &mut Buffer,
        dh2: Buffer,
    ) -> Result<(), ModelError> {
        let weight = self.model.ids.blocks[layer].post_attention_layernorm;
        self.norm_backward(layer, dx, dh2, (X2, Rstd2), weight)
    }

    fn attn_out_backward(&mut self, layer: usize, dx: &Buffer) -> Result<Buffer, ModelError> {
        let weight = self.model.ids.blocks[layer].o_proj;
        let o = self.pull(layer, O)?;
        self.weight_gradient(weight, dx.view(), o.view())?;
        self.release(layer, O, o);
        let mut dout = self.temporary("d_o", [self.tokens(), self.model.config.q_width()])?;
        self.kernels.matmul(
            dout.view_mut(),
            dx.view(),
            self.parameter(weight),
            Init::Overwrite,
        )?;
        Ok(dout)
    }

    fn core_attn_backward(
        &mut self,
        layer: usize,
        dout: Buffer,
    ) -> Result<[Buffer; 3], ModelError> {
        let attention = self.model.attention;
        // What the kernel reads beside q, k and v: first what may have to be replayed.
        let (kept, o) = match attention {
            Attention::Eager => (self.pull(layer, Probs)?, None),
            Attention::Flash => (self.pull(layer, Lse)?, Some(self.pull(layer, O)?)),
        };
        let (q, k, v) = (
            self.pull(layer, Q)?,
            self.pull(layer, K)?,
            self.pull(layer, V)?,
        );
        let (tokens, kv_width) = (self.tokens(), self.model.config.kv_width());
        let mut dq = self.temporary("d_q", [tokens, self.model.config.q_width()])?;
        let (mut dk, mut dv) = (
            self.temporary("d_k", [tokens, kv_width])?,
            self.temporary("d_v", [tokens, kv_width])?,
        );
        let mut scratch = self.attention_scratch(AttentionPass::Backward)?;
        let scratch = scratch.view_mut();
        let gradients = (dq.view_mut(), dk.view_mut(), dv.view_mut());
        let (q, k, v) = (q.view(), k.view(), v.view());
        let (kept, dout, shape) = (kept.view(), dout.view(), self.attention_shape());
        match o {
            None => self.kernels.attention_backward(
                gradients.0,
                gradients.1,
                gradients.2,
                scratch,
                dout,
                kept,
                q,
                k,
                v,
                shape,
            )?,
            Some(o) => self.kernels.flash_attention_backward(
                gradients.0,
                gradients.1,
                gradients.2,
                scratch,
                dout,
                o.view(),
                kept,
                q,
                k,
                v,
                shape,
                FlashOptions::default(),
            )?,
        }
        Ok([dq, dk, dv])
    }

    fn qkv_backward(
        &mut self,
        layer: usize,
        [mut dq, mut dk, dv]: [Buffer; 3],
    ) -> Result<Buffer, ModelError> {
        let ids = &self.model.ids.blocks[layer];
        for gradient in [&mut dq, &mut dk] {
            self.kernels
                .rotary(gradient.view_mut(), self.model.rope.view(), true)?;
        }
        if let Some([q_norm, k_norm]) = ids.qk_norm {
            dq = self.head_norm_backward(layer, dq, QRaw, q_norm)?;
            dk = self.head_norm_backward(layer, dk, KRaw, k_norm)?;
        }
        let gradients = [(dq, ids.q_proj), (dk, ids.k_proj), (dv, ids.v_proj)];
        if let Some(biases) = ids.qkv_bias {
            for ((gradient, _), bias) in gradients.iter().zip(biases) {
                let (dbias, init) = self.gradients.accumulate(bias);
                self.kernels.bias_backward(dbias, gradient.view(), init)?;
            }
        }
        let h1 = self.pull(layer, H1)?;
        for (gradient, weight) in &gradients {
            self.weight_gradient(*weight, gradient.view(), h1.view())?;
        }
        self.release(layer, H1, h1);
        let mut dh1 = self.temporary("d_h1", [self.tokens(), self.model.config.hidden])?;
        let mut init = Init::Overwrite;
        for (gradient, weight) in gradients {
            self.kernels.matmul(
                dh1.view_mut(),
                gradient.view(),
                self.parameter(weight),
                init,
            )?;
            init = Init::Accumulate;
        }
        Ok(dh1)
    }

    fn attn_norm_backward(
        &mut self,
        layer: usize,
        dx: &mut Buffer,
        dh1: Buffer,
    ) -> Result<(), ModelError> {
        let weight = self.model.ids.blocks[layer].input_layernorm;
        self.norm_backward(layer, dx, dh1, (X, Rstd1), weight)
    }

    /// Adds the gradient through a norm to the residual stream's.
    fn norm_backward(
        &mut self,
        layer: usize,
        dx: &mut Buffer,
        dh: Buffer,
        (input, statistics): (Activation, Activation),
        weight: usize,
    ) -> Result<(), ModelError> {
        let (x, rstd) = (self.pull(layer, input)?, self.pull(layer, statistics)?);
        let (dweight, init) = self.gradients.accumulate(weight);
        let weight = self.parameters.view(weight);
        let dx = dx.view_mut();
        Ok(self.kernels.rms_norm_backward(
            dx,
            Init::Accumulate,
            dweight,
            init,
            dh.view(),
            x.view(),
            weight,
            rstd.view(),
        )?)
    }

    /// The gradient through the norm of each query or key head. Its statistics are made again: they are smaller
    /// than a lease.
    fn head_norm_backward(
        &mut self,
        layer: usize,
        dy: Buffer,
        raw: Activation,
        weight: usize,
    ) -> Result<Buffer, ModelError> {
        let x = self.pull(layer, raw)?;
        let head_dim = self.model.config.head_dim;
        let heads = [x.dims().elements() / head_dim, head_dim];
        let mut rstd = self.temporary_f32("head_rstd", [heads[0]])?;
        let x_heads = x.view().reshape(heads);
        let eps = self.model.config.norm_eps as f32;
        self.kernels.rms_norm(
            None,
            Some(rstd.view_mut()),
            x_heads,
            self.parameter(weight),
            eps,
        )?;
        let mut dx = self.temporary("d_raw", [x.dims()[0], x.dims()[1]])?;
        let (dweight, init) = self.gradients.accumulate(weight);
        self.kernels.rms_norm_backward(
            dx.view_mut().reshape(heads),
            Init::Overwrite,
            dweight,
            init,
            dy.view().reshape(heads),
            x_heads,
            self.parameters.view(weight),
            rstd.view(),
        )?;
        self.release(layer, raw, x);
        Ok(dx)
    }

    /// dW [o, i] += dy [t, o]^T x [t, i].
    pub(crate) fn weight_gradient(
        &mut self,
        weight: usize,
        dy: In,
        x: In,
    ) -> Result<(), ModelError> {
        let (dweight, init) = self.gradients.accumulate(weight);
        Ok(self.kernels.matmul(dweight, dy.t(), x, init)?)
    }
}
