//! A training step, composed from model and optimizer: the same code for a run and, on shapes, for its plan.

use crate::Result;
use crate::forward::Forward;
use crate::losses::Losses;
use crate::outcome::{InFlight, StepOutcome};
use crate::read_back::PendingNumbers;
use crate::routers::Routers;
use crate::snapshot::CopyPlace;
use crate::sum_of_ranks::SumOfRanks;
use crate::upload::LentTokens;
use data::{MicroBatch, StepBatch};
use kernels::Kernels;
use memory::{Memory, Rank, UpdateTime};
use model::{Model, SavedActivations};
use optim::Optimizer;
use scratch::ScratchFolder;
use settings::{PassKind, Settings, StepObjective};
use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;
use units::{Gradients, Weights};

/// The orders in which the passes of a training step use units of weights, replays included, by virtual stage. They decide what is fetched ahead.
pub(crate) type PassOrders = HashMap<(PassKind, usize), Rc<[usize]>>;

/// Everything that lives across steps.
pub struct Session {
    pub(crate) memory: Memory,
    /// Dropped before everything below, with all work that is under way, which may use it. Stays above it.
    pub(crate) kernels: Box<Kernels>,
    pub(crate) settings: Settings,
    pub(crate) model: Model,
    pub(crate) weights: Weights,
    /// Empty if all weights stay on the device.
    pub(crate) orders: PassOrders,
    pub(crate) gradients: Gradients,
    pub(crate) optimizer: Optimizer,
    /// Where a copy of the state waits to be written, if one is to be made.
    pub(crate) copy_place: Option<CopyPlace>,
    /// The table of activations, empty between micro-batches.
    pub(crate) saved: SavedActivations,
    /// The sum of the step's losses.
    pub(crate) losses: Losses,
    /// None if the model has no routers.
    pub(crate) routers: Option<Routers>,
    pub(crate) underflows_of_ranks: SumOfRanks,
    pub(crate) step: usize,
    /// Steps that were not skipped, of those that are finished.
    pub(crate) updates: usize,
    /// Whether a step that is being made is to be broken off.
    pub(crate) stop: Box<dyn Fn() -> bool>,
    /// Told how many of a step's micro-batches have been asked for.
    pub(crate) each_micro_batch: Box<dyn Fn(usize, usize)>,
    /// The step that was asked for last, if it is not known to be done.
    pub(crate) in_flight: Option<InFlight>,
    /// The outcome of the last step that is known to be done, until somebody takes it.
    pub(crate) finished: Option<StepOutcome>,
    /// Whether a step that releases gradients failed in its backward pass: some weights are a step ahead of others.
    pub(crate) is_half_updated: bool,
    /// Where optimizer states are on a disk; removed with all that is in it.
    pub(crate) _scratch: Option<ScratchFolder>,
}

impl Session {
    /// One training step, to its end: forward and backward of every micro-batch, then the update.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`](crate::SessionError::OutOfMemory) if a lease is refused: nothing is updated then, and every lease is
    /// given back. With two exceptions: a step whose update was refused a lease is made, and [`Session::finish_step`] completes it; one that
    /// releases gradients and fails in its backward pass has updated some of the weights, and cannot be made again.
    pub fn step(&mut self, batch: &StepBatch) -> Result<StepOutcome> {
        self.step_lent(batch, None)
    }

    /// As [`Session::step`], for tokens that another library may have on the device. They are read where they are, but where
    /// micro-batches are asked for at once ([`kernels::Section`]), which takes the same addresses every time: there the batch's are
    /// uploaded.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn step_lent(
        &mut self,
        batch: &StepBatch,
        lent: Option<LentTokens>,
    ) -> Result<StepOutcome> {
        self.start_step_of(batch, lent)?;
        let outcome = self.finish_step()?;
        Ok(outcome.expect("a step was started"))
    }

    /// Asks for one training step, while the device may still be at the one before. Where the host computes, the step
    /// is made when this returns, but for updates that the next pass makes or gathers. Where there are ranks, all are given the same step, of which each makes its micro-batches: of
    /// the others' it needs no more than how many targets they have.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn start_step(&mut self, batch: &StepBatch) -> Result {
        self.start_step_of(batch, None)
    }

    fn start_step_of(&mut self, batch: &StepBatch, lent: Option<LentTokens>) -> Result {
        self.refuse_half_updated()?;
        self.memory.begin_step();
        self.gradients.begin_step();
        let crossed = self.kernels.step_traffic();
        let crossed_for_step_before = self.kernels.traffic_of_step_before();
        let targets = batch.target_count();
        let live_before = self.memory.live_leases();
        if self.optimizer.update_time() == UpdateTime::Backward {
            self.begin_update()?;
        }
        let counted = match self.settings.objective {
            StepObjective::NextTokens => targets,
            StepObjective::Preferences { .. } => batch.pairs(),
            StepObjective::Policy => 1,
        };
        let made = self.run_micro_batches(batch, lent, counted);
        self.is_half_updated =
            made.is_err() && self.gradients.is_released() && self.optimizer.is_pending();
        // What crossed for the step before counts for it, also where this one is broken off.
        if let Some(in_flight) = &mut self.in_flight {
            let more = self.kernels.traffic_of_step_before();
            in_flight.crossed = in_flight.crossed.plus(more.since(crossed_for_step_before));
        }
        let (replayed, micro_batch) = made?;
        let missing = self.gradients.missing();
        assert!(
            missing.is_empty(),
            "every trained parameter receives a gradient; these did not: {missing:?}"
        );
        self.finish_in_flight()?;
        if let (Some(routers), Some(own)) = (&mut self.routers, self.saved.all_statistics()) {
            routers.of_ranks.add_up(&*self.kernels, own)?;
        }
        let underflows = self.underflows()?;
        let before_update = self.step;
        let updated = self.update();
        let live_after = self.memory.live_leases();
        assert!(
            updated.is_err() || live_before == live_after,
            "no lease outlives its step"
        );
        if self.step == before_update {
            return updated;
        }
        let choices = self.choices()?;
        let losses = PendingNumbers::start(&*self.kernels, self.losses.all())?;
        let norm_and_clip = self.optimizer.norm_and_clip();
        let norm_and_clip = PendingNumbers::start(&*self.kernels, norm_and_clip)?;
        self.in_flight = Some(InFlight {
            step: self.step,
            lr: self.settings.schedule.rate(self.step),
            lr_matrices: self.settings.matrix_rate(self.step),
            targets,
            objective: self.settings.objective,
            counted,
            tokens: own(&self.settings, batch)
                .flat_map(|(_, parts)| parts)
                .map(|part| part.rows * part.seq)
                .sum(),
            memory: self.memory.step_memory(),
            crossed: self.kernels.step_traffic().since(crossed),
            micro_batch,
            replayed,
            losses,
            norm_and_clip,
            choices,
            underflows,
            made_at: Cell::new((!self.kernels.runs_ahead()).then(Instant::now)),
        });
        updated?;
        let is_updated = self.optimizer.update_time() != UpdateTime::NextForward
            && !self.weights.owes_gathering();
        if is_updated && !self.kernels.runs_ahead() {
            self.finish_in_flight()?;
        }
        Ok(())
    }

    /// Moves the biases of routers, and sends for their choices.
    fn choices(&mut self) -> Result<Option<(usize, PendingNumbers)>> {
        let (Some(routers), Some(own)) = (&self.routers, self.saved.all_statistics()) else {
            return Ok(None);
        };
        let clip = self.optimizer.norm_and_clip();
        let choices = routers.end_step(&*self.kernels, &mut self.weights, own, clip)?;
        Ok(Some(choices))
    }

    /// Adds up the underflows of FP8 in the step, and sends for them.
    fn underflows(&mut self) -> Result<Option<PendingNumbers>> {
        let Some(own) = self.saved.count_underflows(&*self.kernels)? else {
            return Ok(None);
        };
        self.underflows_of_ranks.add_up(&*self.kernels, own)?;
        let all = self.underflows_of_ranks.sum(own);
        Ok(Some(PendingNumbers::start(&*self.kernels, all)?))
    }

    /// Breaks off every step during which `stop` says so, before its next block, with
    /// [`SessionError::Stopped`](crate::SessionError::Stopped). Nothing is left of such a step: weights and states are those after the one
    /// before, once [`Session::finish_step`] returned. Text that is being generated is broken off at its next token.
    pub fn stop_when(&mut self, stop: impl Fn() -> bool + 'static) {
        self.stop = Box::new(stop);
    }

    /// Calls `tell` after each micro-batch with how many of the step's have been asked for, and of how many.
    pub fn on_micro_batch(&mut self, tell: impl Fn(usize, usize) + 'static) {
        self.each_micro_batch = Box::new(tell);
    }

    /// Bytes that optimizer states take on a disk; none if they are in memory.
    pub fn disk_bytes(&self) -> Option<u64> {
        self.optimizer.disk_bytes()
    }

    /// The outcome of a step that [`Session::start_step`] has finished: the one asked for, or the one before.
    pub fn take_finished(&mut self) -> Option<StepOutcome> {
        self.finished.take()
    }

    /// Waits for the step that was asked for last, its update included; none if its outcome has been taken.
    ///
    /// # Errors
    /// [`SessionError::Kernel`](crate::SessionError::Kernel) if the device failed.
    pub fn finish_step(&mut self) -> Result<Option<StepOutcome>> {
        self.finish_update()?;
        self.finish_in_flight()?;
        Ok(self.finished.take())
    }

    /// Waits for the step in flight, if there is one. The number of updates counts it from then on: what a further
    /// update depends on.
    pub(crate) fn finish_in_flight(&mut self) -> Result {
        let Some(in_flight) = self.in_flight.take() else {
            return Ok(());
        };
        let outcome = in_flight.finish(&*self.kernels)?;
        self.updates += usize::from(outcome.is_finite());
        let untaken = self.finished.replace(outcome);
        assert!(
            untaken.is_none(),
            "outcomes are taken before the next step ends"
        );
        Ok(())
    }

    /// Finishes the step before, and lends the model for evaluations and for generating text. These change nothing that steps compute or
    /// need. The step's outcome stays available for [`Session::take_finished`].
    ///
    /// # Errors
    /// As [`Session::finish_step`].
    pub fn forward(&mut self) -> Result<Forward<'_>> {
        self.finish_update()?;
        self.finish_in_flight()?;
        Ok(self.forward_in_step())
    }

    /// The same within a step.
    pub(crate) fn forward_in_step(&mut self) -> Forward<'_> {
        let ranks = self.settings.ranks.as_ref();
        Forward {
            memory: &self.memory,
            kernels: &*self.kernels,
            model: &self.model,
            weights: &mut self.weights,
            saved: &mut self.saved,
            layers: 0..self.model.layers(),
            pipeline: self.settings.pipeline.as_ref().zip(ranks),
            ranks,
            stop: &*self.stop,
        }
    }

    /// Why the device has given up launching micro-batches at once, if it has tried and could not. Nothing else changes.
    pub fn graphs_refusal(&self) -> Option<String> {
        self.kernels.section_refusal()
    }

    /// Steps made, and updates: steps that were not skipped.
    pub fn progress(&self) -> (usize, usize) {
        (self.step, self.updates)
    }

    /// Sets how many steps and updates came before, when a run is resumed.
    pub fn set_progress(&mut self, (step, updates): (usize, usize)) {
        (self.step, self.updates) = (step, updates);
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The settings that it was opened with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The memory that everything is leased from.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Name and bytes of the arenas that live across steps: weights, gradients, optimizer states.
    pub fn arenas(&self) -> Vec<(&'static str, u64)> {
        let coded = self.weights.coded_bytes();
        let held = [
            ("parameters", self.weights.bytes() - coded),
            ("gradients", self.gradients.bytes()),
        ];
        let coded = (coded > 0).then_some(("coded_parameters", coded));
        let held = held
            .into_iter()
            .chain(coded)
            .chain(self.weights.step_codes_arena(false));
        held.chain(self.optimizer.arenas()).collect()
    }

    /// Name and bytes of the arenas in pinned host memory that live across steps.
    pub fn host_arenas(&self) -> Vec<(&'static str, u64)> {
        let units = [self.weights.host_arena(), self.gradients.host_arena()];
        let copy = self.copy_place.iter().map(CopyPlace::arena);
        let states = self.optimizer.host_arenas();
        units
            .into_iter()
            .flatten()
            .chain(self.weights.step_codes_arena(true))
            .chain(states)
            .chain(copy)
            .collect()
    }

    /// Bytes that training adds to the weights across steps, wherever they are: gradients and optimizer states.
    pub fn training_bytes(&self) -> u64 {
        let gradients = self.gradients.host_arena().into_iter();
        let (on_device, on_host) = (self.optimizer.arenas(), self.optimizer.host_arenas());
        let arenas = gradients.chain(on_device).chain(on_host);
        let states = arenas.map(|(_, bytes)| bytes).sum::<u64>();
        self.gradients.bytes() + states + self.disk_bytes().unwrap_or(0)
    }

    /// Whether the padding of weights and gradients is zero, as it must always be: then that of the states is too.
    pub fn padding_is_zero(&self) -> bool {
        self.weights.padding_is_zero() && self.gradients.padding_is_zero()
    }
}

/// The micro-batches of a step that a rank makes, or its parts of them, which are neighbours. Each has its number in the step, that of
/// its first part.
pub(crate) fn own<'a>(
    settings: &Settings,
    step: &'a StepBatch,
) -> impl Iterator<Item = (usize, &'a [MicroBatch])> {
    let Rank { number, of } = settings.rank();
    let each = settings.own_parts().count;
    let all = step.micro.chunks(each).enumerate();
    let own = all.skip(number).step_by(of);
    own.map(move |(number, parts)| (number * each, parts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shapes::shape_of_a_step;
    use kernels::Target;
    use kernels::meta::FlopCounter;
    use settings::Config;

    fn settings() -> Settings {
        let mut config = Config::default();
        (config.data.seq, config.batch.micro, config.batch.accum) = (8, 2, 3);
        Settings::new(&config).unwrap()
    }

    fn session(settings: &Settings) -> Session {
        let mut session = Session::on_cpu(settings.clone(), &Memory::host()).unwrap();
        session.initialise(3).unwrap();
        session
    }

    #[test]
    fn a_step_is_as_planned_and_gives_back_what_it_leased() {
        let settings = settings();
        let batch = shape_of_a_step(&settings, settings.seq);
        let (memory, flops) = (Memory::shapes(), FlopCounter::default());
        let plan = Session::on_shapes(settings.clone(), &memory, Target::Cpu, flops);
        let planned = plan.unwrap().step(&batch).unwrap().memory;
        let mut session = session(&settings);
        let live = session.memory.live_leases();
        let outcome = session.step(&batch).unwrap();
        assert_eq!(outcome.memory.peak, planned.peak);
        assert_eq!(outcome.memory.slab_bytes, planned.slab_bytes);
        assert_eq!(outcome.tokens, 2 * settings.micro_batch * settings.seq);
        assert_eq!(session.memory.live_leases(), live);
        assert!(session.take_finished().is_none(), "`step` returned it");
    }

    #[test]
    fn a_step_that_is_not_finite_is_made_and_is_no_update() {
        let settings = settings();
        let batch = shape_of_a_step(&settings, settings.seq);
        let mut session = session(&settings);
        let good = session.step(&batch).unwrap();
        assert!(good.is_finite() && good.loss > 0.0);
        assert_eq!(session.progress(), (1, 1));
        session.incoming().set_values(0, &[f32::NAN]).unwrap();
        let bad = session.step(&batch).unwrap();
        assert!(!bad.is_finite());
        assert_eq!(session.progress(), (2, 1));
    }

    #[test]
    fn a_rank_makes_every_nth_micro_batch() {
        let mut config = Config::default();
        config.join(Rank { number: 1, of: 3 }).unwrap();
        let settings = Settings::new(&config).unwrap();
        let micro = shape_of_a_step(&settings, 1).micro[0].clone();
        let step: StepBatch = (0..7).map(|_| micro.clone()).collect();
        let numbers: Vec<usize> = own(&settings, &step).map(|(number, _)| number).collect();
        assert_eq!(numbers, [1, 4]);
    }
}
