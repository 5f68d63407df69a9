//! The loss on data that is not trained on.

use crate::error::SessionError;
use crate::forward::Forward;
use crate::upload::upload;
use data::MicroBatch;
use kernels::Reading;
use memory::{Category, DType, Layer, Phase};

/// What a model makes of some data.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the losses of all targets.
    pub loss_sum: f64,
    /// Targets counted.
    pub targets: usize,
    /// Most live device bytes.
    pub peak_bytes: u64,
}

impl Evaluation {
    /// Mean over all targets.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.targets as f64
    }

    /// Between how many tokens, equally likely, the model would be as much at a loss.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// What a byte of text would take if it were compressed by the model, where a token stands for so many bytes on
    /// average: comparable between tokenizers.
    pub fn bits_per_byte(&self, bytes_per_token: f64) -> f64 {
        self.loss() / std::f64::consts::LN_2 / bytes_per_token
    }
}

impl Forward<'_> {
    /// Evaluates on micro-batches. Of each, nothing stays on the device: sums arrive one micro-batch late, so that the
    /// device need not wait for the host.
    pub(crate) fn evaluate<E: From<SessionError>>(
        &mut self,
        batches: impl IntoIterator<Item = Result<MicroBatch, E>>,
    ) -> Result<Evaluation, E> {
        let _place = self.memory.enter(Phase::Eval, Layer::Whole);
        let mut evaluation = Evaluation::default();
        let mut under_way = None;
        for micro in batches {
            let micro = micro?;
            let reading = self.start(&micro)?;
            evaluation.targets += micro.target_count();
            if let Some(before) = under_way.replace(reading) {
                evaluation.loss_sum += self.finish(before)?;
            }
        }
        if let Some(last) = under_way {
            evaluation.loss_sum += self.finish(last)?;
        }
        evaluation.peak_bytes = self.memory.step_memory().phase_peaks.eval;
        Ok(evaluation)
    }

    /// Asks for the sum of a micro-batch's losses.
    fn start(&mut self, micro: &MicroBatch) -> Result<Reading, SessionError> {
        let (model, kernels) = (self.model, self.kernels);
        let batch = upload(self.memory, kernels, micro, None)?;
        let memory = self.memory;
        let mut sum = memory.lease(Category::Temporary, "loss", [1], DType::F32)?;
        model.loss(self.work(&batch, None), &mut sum)?;
        Ok(kernels.start_read(sum.view())?)
    }

    fn finish(&self, reading: Reading) -> Result<f64, SessionError> {
        let bytes = self.kernels.finish_read(reading)?;
        Ok(f64::from(bytemuck::pod_read_unaligned::<f32>(&bytes)))
    }
}
