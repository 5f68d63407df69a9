//! The loss on data that the model is not trained on.

use crate::error::SessionError;
use crate::forward::Forward;
use crate::upload::upload;
use data::MicroBatch;
use kernels::Reading;
use memory::{Category, DType, Layer, Phase};

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the losses of all targets.
    pub loss_sum: f64,
    /// Targets counted.
    pub targets: usize,
    /// The most live device bytes.
    pub peak_bytes: u64,
}

impl Evaluation {
    /// Mean over all targets.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.targets as f64
    }

    /// The number of equally likely tokens among which the model would be equally uncertain.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Bits for each byte of text if the model compressed it, with `bytes_per_token` bytes in an average token.
    /// Comparable between tokenizers.
    pub fn bits_per_byte(&self, bytes_per_token: f64) -> f64 {
        self.loss() / std::f64::consts::LN_2 / bytes_per_token
    }
}

impl Forward<'_> {
    /// Evaluates micro-batches. Nothing of them stays on the device. Sums are read one micro-batch late, so that the
    /// device does not wait for the host.
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

    /// Starts a micro-batch, and the read of the sum of its losses.
    fn start(&mut self, micro: &MicroBatch) -> Result<Reading, SessionError> {
        let (model, kernels) = (self.model, self.kernels);
        let batch = upload(self.memory, kernels, model.architecture(), micro, None)?;
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
