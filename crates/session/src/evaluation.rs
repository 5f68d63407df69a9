//! The loss on data that the model is not trained on.

use crate::error::SessionError;
use crate::forward::Forward;
use crate::losses::gather;
use crate::read_back::numbers;
use crate::upload::upload;
use data::MicroBatch;
use kernels::operation::SumInOrder;
use kernels::{Init, KernelError, Kernels, Queue, Reading};
use memory::{Buffer, Category, DType, Layer, Phase};
use model::SharingRanks;

const COMPUTED: &str =
    "the loss of a part is computed before the ranks that share its sequences get it";
const CAME: &str = "the losses of all parts have come before they are added up";

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

/// Adds up a number over the ranks that share sequences, in their order; `all` has room for one of each.
fn sum_over(
    kernels: &Kernels,
    SharingRanks { first, rank }: SharingRanks,
    (sum, all): (&mut Buffer, &mut Buffer),
) -> Result<(), KernelError> {
    kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, COMPUTED)?;
    // SAFETY: the computation waits for it below, before the numbers are read, written, or given back.
    unsafe {
        let ranks = first..first + rank.of;
        gather(kernels, sum.view(), (all.view_mut(), 0), ranks)?;
    }
    kernels.wait(Queue::Compute, kernels.record(Queue::Collective)?, CAME)?;
    kernels.run(SumInOrder {
        out: sum.view_mut(),
        x: all.view().reshape([rank.of, 1]),
        init: Init::Overwrite,
    })
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

    /// The sum of the losses of each sequence of micro-batches, in order. Nothing of them stays on the device.
    pub(crate) fn sequence_losses<E: From<SessionError>>(
        &mut self,
        batches: impl IntoIterator<Item = Result<MicroBatch, E>>,
    ) -> Result<Vec<f32>, E> {
        let _place = self.memory.enter(Phase::Eval, Layer::Whole);
        let mut losses = Vec::new();
        for micro in batches {
            losses.extend(self.losses_of(&micro?)?);
        }
        Ok(losses)
    }

    fn losses_of(&mut self, micro: &MicroBatch) -> Result<Vec<f32>, SessionError> {
        let (memory, model, kernels) = (self.memory, self.model, self.kernels);
        let batch = upload(memory, kernels, model.architecture(), micro, None)?;
        let shape = [micro.rows];
        let mut sums = memory.lease(Category::Temporary, "sequence_losses", shape, DType::F32)?;
        model.sequence_losses(self.work(&batch, None), &mut sums)?;
        let reading = kernels.start_read(sums.view())?;
        Ok(numbers(&kernels.finish_read(reading)?))
    }

    /// Starts a micro-batch, and the read of the sum of its losses. Where ranks share sequences, all are given the same micro-batch.
    fn start(&mut self, micro: &MicroBatch) -> Result<Reading, SessionError> {
        let (memory, model, kernels) = (self.memory, self.model, self.kernels);
        let sharing = model.architecture().sharing();
        let own = micro.part(sharing.rank);
        let batch = upload(memory, kernels, model.architecture(), &own, None)?;
        let mut sum = memory.lease(Category::Temporary, "loss", [1], DType::F32)?;
        model.loss(self.work(&batch, None), &mut sum)?;
        if sharing.rank.of > 1 {
            let mut all = memory.lease(
                Category::Temporary,
                "losses_of_parts",
                [sharing.rank.of],
                DType::F32,
            )?;
            sum_over(kernels, sharing, (&mut sum, &mut all))?;
        }
        Ok(kernels.start_read(sum.view())?)
    }

    fn finish(&self, reading: Reading) -> Result<f64, SessionError> {
        let bytes = self.kernels.finish_read(reading)?;
        Ok(f64::from(bytemuck::pod_read_unaligned::<f32>(&bytes)))
    }
}
