//! The loss on data that the model is not trained on.

use crate::Result;
use crate::error::SessionError;
use crate::forward::Forward;
use crate::losses::{from_last_stage, gather};
use crate::neighbours::{Neighbours, StageBetweenPasses};
use crate::read_back::numbers;
use crate::upload::upload;
use data::MicroBatch;
use kernels::operation::SumInOrder;
use kernels::{Init, KernelError, Kernels, Queue, Reading};
use memory::{Buffer, Category, DType, Layer, Phase};
use model::{Batch, BatchShape};
use settings::{Carried, Handover};
use std::ops::Range;
use units::Ranks;

const COMPUTED: &str =
    "the losses of parts are computed before the ranks that share their sequences get them";
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

/// Adds up the numbers that ranks which share sequences have of their parts, in the order of parts; `all` has room for all of them. The
/// sum is the first of `sums`.
fn sum_over(
    kernels: &Kernels,
    ranks: Range<usize>,
    (sums, all): (&mut Buffer, &mut Buffer),
) -> Result<(), KernelError> {
    kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, COMPUTED)?;
    // SAFETY: the computation waits for it below, before the numbers are read, written, or given back.
    unsafe {
        gather(kernels, sums.view(), (all.view_mut(), 0), ranks)?;
    }
    kernels.wait(Queue::Compute, kernels.record(Queue::Collective)?, CAME)?;
    kernels.run(SumInOrder {
        out: sums.view_mut().rows(0..1),
        x: all.view().reshape([all.dims()[0], 1]),
        init: Init::Overwrite,
    })
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
            let reading = self.start(&micro)?;
            evaluation.targets += micro.target_count();
            if let Some(before) = under_way.replace(reading) {
                evaluation.loss_sum += self.finish(before)?;
            }
        }
        if let Some(last) = under_way {
            evaluation.loss_sum += self.finish(last)?;
        }
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

    fn losses_of(&mut self, micro: &MicroBatch) -> Result<Vec<f32>> {
        let (memory, model, kernels) = (self.memory, self.model, self.kernels);
        let batch = upload(memory, kernels, micro, None)?;
        let shape = [micro.rows];
        let mut sums = memory.lease(Category::Temporary, "sequence_losses", shape, DType::F32)?;
        let batches = std::slice::from_ref(&batch);
        model.sequence_losses(self.work(batches, None), &mut sums)?;
        let reading = kernels.start_read(sums.view())?;
        Ok(numbers(&kernels.finish_read(reading)?))
    }

    /// Starts a micro-batch, and the read of the sum of its losses, which is none in a stage without the head. Where ranks share
    /// sequences, all are given the same micro-batch; so are the stages of a pipeline.
    fn start(&mut self, micro: &MicroBatch) -> Result<Option<Reading>> {
        let (memory, model, kernels) = (self.memory, self.model, self.kernels);
        let parts = model.architecture().sharing.own_parts();
        let own = parts.each().map(|part| micro.part(part));
        let batches = own.map(|own| upload(memory, kernels, &own, None));
        let batches = batches.collect::<Result<Vec<_>, _>>()?;
        let Some((pipeline, ranks)) = self.pipeline else {
            return self.start_loss(&batches).map(Some);
        };
        let shape = batches[0].shape;
        for (virtual_stage, layers) in pipeline.of_stage(ranks.stage.number) {
            self.layers = layers.clone();
            self.saved.use_table(self.saved.table_of(layers.start, 0));
            self.receive_input(virtual_stage, shape)?;
            if layers.end == model.layers() {
                return self.start_loss(&batches).map(Some);
            }
            let output = model.forward_on_pipeline_stage(self.work(&batches, None))?;
            self.send_output(virtual_stage, output, shape)?;
        }
        Ok(None)
    }

    /// The loss of this rank's parts of a micro-batch, of whose blocks' last the head follows.
    fn start_loss(&mut self, batches: &[Batch]) -> Result<Reading> {
        let (memory, model, kernels) = (self.memory, self.model, self.kernels);
        let sharing = model.architecture().sharing;
        let parts = sharing.own_parts();
        let count = [parts.count];
        let mut sums = memory.lease(Category::Temporary, "loss", count, DType::F32)?;
        model.loss(self.work(batches, None), &mut sums)?;
        if parts.of > 1 {
            let first = self.ranks.map_or(0, Ranks::first_of_stage) + sharing.first;
            let mut all = memory.lease(
                Category::Temporary,
                "losses_of_parts",
                [parts.of],
                DType::F32,
            )?;
            let ranks = first..first + sharing.rank.of;
            sum_over(kernels, ranks, (&mut sums, &mut all))?;
        }
        Ok(kernels.start_read(sums.view().rows(0..1))?)
    }

    /// Receives the input of a virtual stage's blocks, if another computes it.
    fn receive_input(&mut self, virtual_stage: usize, shape: BatchShape) -> Result {
        if virtual_stage == 0 {
            return Ok(());
        }
        let mut neighbours = Neighbours::default();
        let input_of = virtual_stage;
        self.exchange(&mut neighbours, shape, (input_of, false))?;
        let input = neighbours.take(self.kernels, carried(input_of))?;
        let input = input.expect("the stage before sent its output");
        self.saved.receive(self.layers.start, input);
        Ok(())
    }

    /// Sends what a virtual stage's blocks made.
    fn send_output(&mut self, virtual_stage: usize, output: Buffer, shape: BatchShape) -> Result {
        let mut neighbours = Neighbours::default();
        let input_of = virtual_stage + 1;
        neighbours.keep(carried(input_of), output);
        self.exchange(&mut neighbours, shape, (input_of, true))?;
        Ok(neighbours.give_back(self.kernels)?)
    }

    fn exchange(
        &self,
        neighbours: &mut Neighbours,
        shape: BatchShape,
        (input_of, is_sent): (usize, bool),
    ) -> Result {
        let Some((pipeline, ranks)) = self.pipeline else {
            return Ok(());
        };
        let at = StageBetweenPasses {
            memory: self.memory,
            kernels: self.kernels,
            model: self.model,
            saved: self.saved,
            ranks,
            pipeline,
            trains: false,
        };
        let transfer = Handover {
            of: carried(input_of),
            is_sent,
        };
        neighbours.exchange(at, &[transfer], |_| shape)
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

    fn finish(&self, reading: Option<Reading>) -> Result<f64> {
        let Some(reading) = reading else {
            return Ok(0.0);
        };
        let bytes = self.kernels.finish_read(reading)?;
        Ok(f64::from(bytemuck::pod_read_unaligned::<f32>(&bytes)))
    }
}
