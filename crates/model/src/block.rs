//! The forward pass, a stage a function: what runs forward also runs in a replay.

use crate::model::ModelError;
use crate::pass::{Pass, Position};
use crate::stage::{Activation, Stage};
use crate::table::Attention;
use kernels::attention::{Pass as AttentionPass, scratch_elements};
use kernels::{FlashOptions, Init, flash};
use memory::{Buffer, In, Layer, Out, Phase};

use Activation::{Act, Gate, H1, H2, K, KRaw, Lse, O, Probs, Q, QRaw, Rstd1, Rstd2, Up, V, X, X2};

impl Pass<'_> {
    /// Embedding and all blocks; leaves the head's input in the table.
    pub(crate) fn forward(&mut self) -> Result<(), ModelError> {
        {
            let _place = self.memory.enter(Phase::Forward, Layer::Embedding);
            self.before_forward(Layer::Embedding)?;
            self.embedding()?;
        }
        for layer in 0..self.model.config.layers {
            let _place = self.memory.enter(Phase::Forward, Layer::Block(layer));
            self.before_forward(Layer::Block(layer))?;
            for stage in Stage::BLOCK {
                self.forward_stage(Position { layer, stage })?;
            }
            if let Some(before) = layer.checked_sub(1) {
                self.give_back_left(before)?;
            }
        }
        Ok(())
    }

    /// Runs one stage: pulls its inputs, leases the outputs that are missing and needed, computes.
    pub(crate) fn run_stage(
        &mut self,
        Position { layer, stage }: Position,
    ) -> Result<(), ModelError> {
        match stage {
            Stage::Embedding => self.embedding(),
            Stage::AttnNorm => self.attn_norm(layer),
            Stage::Qkv => self.qkv(layer),
            Stage::CoreAttn => self.core_attn(layer),
            Stage::AttnOut => self.attn_out(layer),
            Stage::MlpNorm => self.mlp_norm(layer),
            Stage::MlpUp => self.mlp_up(layer),
            Stage::MlpAct => self.mlp_act(layer),
            Stage::MlpDown => self.mlp_down(layer),
        }
    }

    /// x [b s, h] = rows of the embedding.
    fn embedding(&mut self) -> Result<(), ModelError> {
        let mut x = self.output(0, X)?;
        if let Some(x) = &mut x {
            let table = self.parameter(self.model.ids.embed_tokens);
            self.kernels
                .embedding(x.view_mut(), table, self.batch.input_ids.view())?;
        }
        self.put(0, X, x);
        Ok(())
    }

    /// h1 [b s, h] = norm(x).
    fn attn_norm(&mut self, layer: usize) -> Result<(), ModelError> {
        let weight = self.model.ids.blocks[layer].input_layernorm;
        self.norm(layer, X, (H1, Rstd1), weight)
    }

    /// h2 [b s, h] = norm(x2).
    fn mlp_norm(&mut self, layer: usize) -> Result<(), ModelError> {
        let weight = self.model.ids.blocks[layer].post_attention_layernorm;
        self.norm(layer, X2, (H2, Rstd2), weight)
    }

    fn norm(
        &mut self,
        layer: usize,
        input: Activation,
        (output, statistics): (Activation, Activation),
        weight: usize,
    ) -> Result<(), ModelError> {
        let x = self.pull(layer, input)?;
        let (mut h, mut rstd) = (self.output(layer, output)?, self.output(layer, statistics)?);
        let eps = self.model.config.norm_eps as f32;
        self.kernels.rms_norm(
            write(&mut h),
            write(&mut rstd),
            x.view(),
            self.parameter(weight),
            eps,
        )?;
        self.put(layer, output, h);
        self.put(layer, statistics, rstd);
        Ok(())
    }

    /// q [b s, q], k, v [b s, k] = rotary(norm(h1 W + bias)); v without norm and rotary.
    fn qkv(&mut self, layer: usize) -> Result<(), ModelError> {
        let h1 = self.pull(layer, H1)?;
        let ids = &self.model.ids.blocks[layer];
        let [q_bias, k_bias, v_bias] = ids.qkv_bias.map_or([None; 3], |biases| biases.map(Some));
        let [q_norm, k_norm] = ids.qk_norm.map_or([None; 2], |norms| norms.map(Some));
        self.query_or_key(layer, h1.view(), (QRaw, Q), ids.q_proj, q_bias, q_norm)?;
        self.query_or_key(layer, h1.view(), (KRaw, K), ids.k_proj, k_bias, k_norm)?;
        let mut v = self.output(layer, V)?;
        if let Some(v) = &mut v {
            self.project(v.view_mut(), h1.view(), ids.v_proj, v_bias)?;
        }
        self.put(layer, V, v);
        Ok(())
    }

    fn query_or_key(
        &mut self,
        layer: usize,
        h1: In,
        (raw, rotated): (Activation, Activation),
        weight: usize,
        bias: Option<usize>,
        norm: Option<usize>,
    ) -> Result<(), ModelError> {
        let mut out = self.output(layer, rotated)?;
        let Some(norm) = norm else {
            if let Some(out) = &mut out {
                self.project(out.view_mut(), h1, weight, bias)?;
                self.kernels
                    .rotary(out.view_mut(), self.model.rope.view(), false)?;
            }
            self.put(layer, rotated, out);
            return Ok(());
        };
        let mut before_norm = self.output(layer, raw)?;
        if out.is_none() && before_norm.is_none() {
            return Ok(());
        }
        let saved = self.pull_unless_absent(layer, raw)?;
        let transient;
        let source = match (&mut before_norm, &saved) {
            (None, Some(saved)) => saved.view(),
            (Some(fresh), _) => {
                self.project(fresh.view_mut(), h1, weight, bias)?;
                fresh.view()
            }
            (None, None) => {
                let (shape, _) = self.shape(raw);
                let mut fresh = self.temporary(raw.name(), shape)?;
                self.project(fresh.view_mut(), h1, weight, bias)?;
                transient = fresh;
                transient.view()
            }
        };
        if let Some(out) = &mut out {
            let heads = [
                source.elements() / self.model.config.head_dim,
                self.model.config.head_dim,
            ];
            let (y, eps) = (
                out.view_mut().reshape(heads),
                self.model.config.norm_eps as f32,
            );
            self.kernels.rms_norm(
                Some(y),
                None,
                source.reshape(heads),
                self.parameter(norm),
                eps,
            )?;
            self.kernels
                .rotary(out.view_mut(), self.model.rope.view(), false)?;
        }
        self.put(layer, raw, before_norm);
        self.put(layer, rotated, out);
        Ok(())
    }

    /// y = x W^T + bias.
    fn project(
        &self,
        mut y: Out,
        x: In,
        weight: usize,
        bias: Option<usize>,
    ) -> Result<(), ModelError> {
        self.kernels
            .matmul(y.reborrow(), x, self.parameter(weight).t(), Init::Overwrite)?;
        if let Some(bias) = bias {
            self.kernels.add_bias(y, self.parameter(bias))?;
        }
        Ok(())
    }

    /// o [b s, q] = softmax(q k^T) v; probs [b, a, s, s] or lse [b, a, s].
    fn core_attn(&mut self, layer: usize) -> Result<(), ModelError> {
        let (q, k, v) = (
            self.pull(layer, Q)?,
            self.pull(layer, K)?,
            self.pull(layer, V)?,
        );
        let statistics = match self.model.attention {
            Attention::Eager => Probs,
            Attention::Flash => Lse,
        };
        let (mut o, mut kept) = (self.output(layer, O)?, self.output(layer, statistics)?);
        let mut scratch = self.attention_scratch(AttentionPass::Forward {
            probs_kept: kept.is_some(),
        })?;
        let (o_out, kept_out) = (write(&mut o), write(&mut kept));
        let (q, k, v) = (q.view(), k.view(), v.view());
        let (scratch, shape) = (scratch.view_mut(), self.attention_shape());
        match self.model.attention {
            Attention::Eager => self
                .kernels
                .attention(o_out, kept_out, scratch, q, k, v, shape)?,
            Attention::Flash => {
                let options = FlashOptions::default();
                self.kernels
                    .flash_attention(o_out, kept_out, scratch, q, k, v, shape, options)?;
            }
        }
        self.put(layer, O, o);
        self.put(layer, statistics, kept);
        Ok(())
    }

    pub(crate) fn attention_scratch(&self, pass: AttentionPass) -> Result<Buffer, ModelError> {
        let (target, dtype) = (self.kernels.target(), self.model.dtype);
        let shape = self.attention_shape();
        let elements = match (self.model.attention, pass) {
            (Attention::Eager, pass) => scratch_elements(target, shape, dtype, pass),
            (Attention::Flash, AttentionPass::Forward { .. }) => {
                flash::scratch_elements(target, shape, dtype, flash::Pass::Forward)
            }
            (Attention::Flash, AttentionPass::Backward) => {
                flash::scratch_elements(target, shape, dtype, flash::Pass::Backward)
            }
        };
        self.temporary_f32("attention_scratch", [elements])
    }

    /// x2 [b s, h] = x + o W_o.
    fn attn_out(&mut self, layer: usize) -> Result<(), ModelError> {
        let weight = self.model.ids.blocks[layer].o_proj;
        self.project_onto_residual((layer, O), (layer, X), (layer, X2), weight)
    }

    /// gate, up [b s, f] = h2 W_gate, h2 W_up.
    fn mlp_up(&mut self, layer: usize) -> Result<(), ModelError> {
        let h2 = self.pull(layer, H2)?;
        let ids = &self.model.ids.blocks[layer];
        for (activation, weight) in [(Gate, ids.gate_proj), (Up, ids.up_proj)] {
            let mut out = self.output(layer, activation)?;
            if let Some(out) = &mut out {
                self.project(out.view_mut(), h2.view(), weight, None)?;
            }
            self.put(layer, activation, out);
        }
        Ok(())
    }

    /// act [b s, f] = silu(gate) up.
    fn mlp_act(&mut self, layer: usize) -> Result<(), ModelError> {
        let (gate, up) = (self.pull(layer, Gate)?, self.pull(layer, Up)?);
        let mut act = self.output(layer, Act)?;
        if let Some(act) = &mut act {
            self.kernels
                .swiglu(act.view_mut(), gate.view(), up.view())?;
        }
        self.put(layer, Act, act);
        Ok(())
    }

    /// The next block's x [b s, h] = x2 + act W_down.
    fn mlp_down(&mut self, layer: usize) -> Result<(), ModelError> {
        let weight = self.model.ids.blocks[layer].down_proj;
        self.project_onto_residual((layer, Act), (layer, X2), (layer + 1, X), weight)
    }

    fn project_onto_residual(
        &mut self,
        input: (usize, Activation),
        residual: (usize, Activation),
        output: (usize, Activation),
        weight: usize,
    ) -> Result<(), ModelError> {
        let (x, residual) = (
            self.pull(input.0, input.1)?,
            self.pull(residual.0, residual.1)?,
        );
        let mut out = self.output(output.0, output.1)?;
        if let Some(out) = &mut out {
            let init = Init::Add(residual.view());
            self.kernels
                .matmul(out.view_mut(), x.view(), self.parameter(weight).t(), init)?;
        }
        self.put(output.0, output.1, out);
        Ok(())
    }
}

fn write(buffer: &mut Option<Buffer>) -> Option<Out<'_>> {
    buffer.as_mut().map(Buffer::view_mut)
}
