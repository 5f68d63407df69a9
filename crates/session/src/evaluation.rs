//! The loss on data that the model is not trained on.

use crate::Result;
use crate::error::SessionError;
use crate::forward::{Forward, WhichModel};
use crate::losses::from_last_stage;
use crate::neighbours::Neighbours;
use crate::read_back::PendingNumbers;
use crate::sum_of_ranks::{add_gathered, gather};
use crate::upload::upload;
use data::MicroBatch;
use memory::{Category, DType, Layer, Phase};
use model::Batch;
use settings::{Carried, Handover};
use units::Ranks;

const PARTS_COUNTED: &str = "a part's loss is counted before other ranks get it";
const PARTS_CAME: &str = "the losses of all parts have come before they are added up";

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

/// The input of a virtual stage, of the only micro-batch under way.
fn carried(input_of: usize) -> Carried {
    Carried {
        input_of,
        is_gradient: false,
        micro_batch: 0,
    }
}

impl Forward<'_> {
    /// Evaluates micro-batches, of any number of sequences. Nothing of them stays on the device. Sums are read one micro-batch
    /// late, so that the device does not wait for the host.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if a lease is refused, and the errors of the batches.
    pub fn evaluate<E: From<SessionError>>(
        &mut self,
        batches: impl IntoIterator<Item = Result<MicroBatch, E>>,
    ) -> Result<Evaluation, E> {
        let _place = self.memory.enter(Phase::Eval, Layer::Whole);
        let mut evaluation = Evaluation::default();
        let mut under_way = None;
        for micro in batches {
            let micro = micro?;
            let before = std::mem::replace(&mut under_way, self.start(&micro)?);
            evaluation.targets += micro.target_count();
            evaluation.loss_sum += self.finish(before)?;
        }
        evaluation.loss_sum += self.finish(under_way)?;
        if let Some((_, ranks)) = self.pipeline {
            evaluation.loss_sum = self.of_last_stage(ranks, evaluation.loss_sum)?;
        }
        evaluation.peak_bytes = self.memory.step_memory().phase_peaks.eval;
        Ok(evaluation)
    }

    /// The sum of the losses of each sequence of micro-batches, in order, and the most live device bytes. Nothing of them stays
    /// on the device.
    ///
    /// # Errors
    /// As [`Forward::evaluate`].
    pub fn sequence_losses<E: From<SessionError>>(
        &mut self,
        batches: impl IntoIterator<Item = Result<MicroBatch, E>>,
    ) -> Result<(Vec<f32>, u64), E> {
        let _place = self.memory.enter(Phase::Eval, Layer::Whole);
        let mut losses = Vec::new();
        for micro in batches {
            losses.extend(self.losses_of(&micro?)?);
        }
        Ok((losses, self.memory.step_memory().phase_peaks.eval))
    }

    /// The loss of each token of micro-batches, in order, 0 where it is masked, and the most live device bytes. Nothing of them stays on
    /// the device.
    ///
    /// # Errors
    /// As [`Forward::evaluate`].
    pub fn token_losses<E: From<SessionError>>(
        &mut self,
        which: WhichModel,
        batches: impl IntoIterator<Item = Result<MicroBatch, E>>,
    ) -> Result<(Vec<f32>, u64), E> {
        let _place = self.memory.enter(Phase::Eval, Layer::Whole);
        let mut losses = Vec::new();
        for micro in batches {
            losses.extend(self.token_losses_of(which, &micro?)?);
        }
        Ok((losses, self.memory.step_memory().phase_peaks.eval))
    }

    fn token_losses_of(&mut self, which: WhichModel, micro: &MicroBatch) -> Result<Vec<f32>> {
        let (memory, model, kernels) = (self.memory, self.model, self.kernels);
        let batch = upload(memory, kernels, micro, None)?;
        let losses = model.token_losses(self.work_of(which, std::slice::from_ref(&batch)))?;
        Ok(PendingNumbers::start(kernels, losses.view())?.finish(kernels)?)
    }

    fn losses_of(&mut self, micro: &MicroBatch) -> Result<Vec<f32>> {
        let (memory, model, kernels) = (self.memory, self.model, self.kernels);
        let batch = upload(memory, kernels, micro, None)?;
        let shape = [micro.rows];
        let mut sums = memory.lease(Category::Temporary, "sequence_losses", shape, DType::F32)?;
        let batches = std::slice::from_ref(&batch);
        model.sequence_losses(self.work(batches, None), &mut sums)?;
        Ok(PendingNumbers::start(kernels, sums.view())?.finish(kernels)?)
    }

    /// Starts a micro-batch, and the read of the sum of its losses, which is none in a stage without the head. Where ranks share
    /// sequences, all are given the same micro-batch; so are the stages of a pipeline.
    fn start(&mut self, micro: &MicroBatch) -> Result<Option<PendingNumbers>> {
        let (memory, model, kernels) = (self.memory, self.model, self.kernels);
        let parts = model.architecture().sharing.own_parts();
        let own = parts.each().map(|part| micro.part(part));
        let batches = own.map(|own| upload(memory, kernels, &own, None));
        let batches = batches.collect::<Result<Vec<_>, _>>()?;
        let Some((pipeline, ranks)) = self.pipeline else {
            return self.start_loss(&batches).map(Some);
        };
        let shape = batches[0].shape;
        let mut neighbours = Neighbours::default();
        for (virtual_stage, layers) in pipeline.of_stage(ranks.stage.number) {
            let (input, output) = (carried(virtual_stage), carried(virtual_stage + 1));
            self.layers = layers.clone();
            self.saved.use_table(self.saved.table_of(layers.start, 0));
            if virtual_stage > 0 {
                let (of, is_sent) = (input, false);
                neighbours.exchange((self, false), &[Handover { of, is_sent }], |_| shape)?;
                let input = neighbours.take(kernels, input)?;
                let input = input.expect("the stage before sent its output");
                self.saved.receive(layers.start, input);
            }
            if layers.end == model.layers() {
                return self.start_loss(&batches).map(Some);
            }
            let made = model.forward_on_pipeline_stage(self.work(&batches, None))?;
            neighbours.keep(output, made);
            let (of, is_sent) = (output, true);
            neighbours.exchange((self, false), &[Handover { of, is_sent }], |_| shape)?;
            neighbours.give_back(kernels)?;
        }
        Ok(None)
    }

    /// The loss of this rank's parts of a micro-batch, of whose blocks' last the head follows.
    fn start_loss(&mut self, batches: &[Batch]) -> Result<PendingNumbers> {
        let (memory, model, kernels) = (self.memory, self.model, self.kernels);
        let sharing = model.architecture().sharing;
        let parts = sharing.own_parts();
        let count = [parts.count];
        let mut sums = memory.lease(Category::Temporary, "loss", count, DType::F32)?;
        model.loss(self.work(batches, None), &mut sums)?;
        if parts.of > 1 {
            let first = self.ranks.map_or(0, Ranks::first_of_stage) + sharing.first;
            let (name, count) = ("losses_of_parts", [parts.of]);
            let mut all = memory.lease(Category::Temporary, name, count, DType::F32)?;
            let ranks = first..first + sharing.rank.of;
            // SAFETY: the computation waits for it below, before the numbers are read, written, or given back.
            unsafe { gather(kernels, sums.view(), all.view_mut(), ranks, PARTS_COUNTED) }?;
            add_gathered(kernels, all.view(), sums.view_mut().rows(0..1), PARTS_CAME)?;
        }
        Ok(PendingNumbers::start(kernels, sums.view().rows(0..1))?)
    }

    /// A number that the last stage has.
    fn of_last_stage(&self, ranks: &Ranks, number: f64) -> Result<f64> {
        let (memory, kernels) = (self.memory, self.kernels);
        let mut shared = memory.lease(Category::Temporary, "loss", [1], DType::F64)?;
        kernels.upload(shared.view_mut(), bytemuck::bytes_of(&number))?;
        // SAFETY: the computation waits for it before the lease ends.
        unsafe { from_last_stage(kernels, ranks, shared.view_mut()) }?;
        let reading = kernels.start_read(shared.view())?;
        Ok(bytemuck::pod_read_unaligned(&kernels.finish_read(reading)?))
    }

    fn finish(&self, sum: Option<PendingNumbers>) -> Result<f64> {
        Ok(match sum {
            Some(sum) => f64::from(sum.finish(self.kernels)?[0]),
            None => 0.0,
        })
    }
}
