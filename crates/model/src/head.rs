//! Final norm, output head and cross-entropy, forward and backward at once, in chunks of tokens: the logits of a
//! whole micro-batch never exist.

use crate::model::ModelError;
use crate::pass::Pass;
use crate::stage::Activation;
use kernels::Init;
use memory::{Buffer, Layer, Phase};
use std::ops::Range;

impl Pass<'_> {
    /// Adds the micro-batch's loss to `loss [1]` (f32; a sum over targets) and returns the gradient of the head's
    /// input `[b s, h]`. Gradients are multiplied by `scale`.
    pub(crate) fn head(
        &mut self,
        loss: &mut Buffer,
        loss_init: Init,
        scale: f32,
    ) -> Result<Buffer, ModelError> {
        let _place = self.memory.enter(Phase::Forward, Layer::Head);
        self.before_forward(Layer::Head)?;
        let (tokens, hidden) = (self.tokens(), self.model.config.hidden);
        let x = self.saved.take(self.model.config.layers, Activation::X);
        let mut losses = self.temporary_f32("losses", [tokens])?;
        let mut dx = self.temporary("d_x", [tokens, hidden])?;
        for start in (0..tokens).step_by(self.model.head_chunk) {
            let rows = start..(start + self.model.head_chunk).min(tokens);
            self.head_chunk(rows, &x, &mut losses, &mut dx, scale)?;
        }
        self.kernels
            .sum(loss.view_mut(), losses.view(), loss_init)?;
        Ok(dx)
    }

    fn head_chunk(
        &mut self,
        rows: Range<usize>,
        x: &Buffer,
        losses: &mut Buffer,
        dx: &mut Buffer,
        scale: f32,
    ) -> Result<(), ModelError> {
        let (chunk, config, ids) = (rows.len(), &self.model.config, &self.model.ids);
        let x = x.view().rows(rows.clone());
        let mut h = self.temporary("final_norm", [chunk, config.hidden])?;
        let mut rstd = self.temporary_f32("final_rstd", [chunk])?;
        let eps = config.norm_eps as f32;
        self.kernels.rms_norm(
            Some(h.view_mut()),
            Some(rstd.view_mut()),
            x,
            self.parameter(ids.norm),
            eps,
        )?;
        let mut logits = self.temporary("logits", [chunk, config.vocab])?;
        self.kernels.matmul(
            logits.view_mut(),
            h.view(),
            self.parameter(ids.lm_head).t(),
            Init::Overwrite,
        )?;
        let targets = self.batch.targets.view().rows(rows.clone());
        self.kernels.cross_entropy(
            losses.view_mut().rows(rows.clone()),
            logits.view_mut(),
            targets,
            scale,
        )?;

        let _place = self.memory.enter(Phase::Backward, Layer::Head);
        let dlogits = logits;
        self.weight_gradient(ids.lm_head, dlogits.view(), h.view())?;
        drop(h);
        let mut dh = self.temporary("d_final_norm", [chunk, config.hidden])?;
        self.kernels.matmul(
            dh.view_mut(),
            dlogits.view(),
            self.parameter(ids.lm_head),
            Init::Overwrite,
        )?;
        drop(dlogits);
        let (dweight, init) = self.gradients.accumulate(ids.norm);
        let (dx, weight) = (dx.view_mut().rows(rows), self.parameters.view(ids.norm));
        self.kernels.rms_norm_backward(
            dx,
            Init::Overwrite,
            dweight,
            init,
            dh.view(),
            x,
            weight,
            rstd.view(),
        )?;
        Ok(())
    }
}
