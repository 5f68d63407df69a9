//! A training step, composed from model and optimizer: the same code for a run and, on shapes, for its plan.

use crate::error::SessionError;
use crate::forward::Forward;
use crate::offload::{offloaded, updates_in_forward};
use crate::read_back::PendingResults;
use crate::snapshot::CopyPlace;
use crate::updating::{UpdateTraffic, Updating};
use crate::upload::upload;
use data::StepBatch;
use kernels::cpu::Cpu;
use kernels::meta::{FlopCounter, Meta};
use kernels::{Kernels, Queue, Target, Traffic};
use memory::{Arena, Buffer, Category, DType, Layer, Memory, Phase, StepMemory};
use model::{
    Architecture, BatchShape, Computation, Gradients, Model, Purpose, Randomness, ReplayCounts,
    Saved, StepTotals, Training, Work,
};
use optim::{AdamW, StepNumbers};
use settings::Settings;
use std::rc::Rc;
use std::time::Instant;

/// Everything that lives across steps.
pub struct Session {
    pub(crate) memory: Memory,
    /// Dropped first, with all work that is under way: it may use everything below. Stays above it.
    pub(crate) kernels: Box<dyn Kernels>,
    pub(crate) settings: Settings,
    pub(crate) model: Model,
    pub(crate) parameters: Arena,
    pub(crate) gradients: Gradients,
    pub(crate) optimizer: AdamW,
    /// Where a copy of the state waits to be written, if one is to be made.
    pub(crate) copy_place: Option<CopyPlace>,
    /// The table of activations, empty between micro-batches.
    saved: Saved,
    /// `[1]` f32: sum of the step's losses.
    loss: Buffer,
    step: usize,
    /// Steps that were not skipped, of those that are finished.
    updates: usize,
    /// Whether a step that is being made is to be broken off.
    stop: Box<dyn Fn() -> bool>,
    /// Told how many of a step's micro-batches have been asked for.
    each_micro_batch: Box<dyn Fn(usize, usize)>,
    /// The step that was asked for last, if it is not known to be done.
    in_flight: Option<InFlight>,
    /// The outcome of the last step that is known to be done, until somebody takes it.
    finished: Option<StepOutcome>,
}

/// A step that the device may still be at: all that the host knows of it.
struct InFlight {
    step: usize,
    lr: f64,
    targets: usize,
    tokens: usize,
    memory: StepMemory,
    traffic: Traffic,
    micro_batch_traffic: Traffic,
    replayed: ReplayCounts,
    results: PendingResults,
    /// When it was made, where the host computes.
    made_at: Option<Instant>,
}

/// What a step computed and used.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// The step, from 1.
    pub step: usize,
    /// Mean over all targets of the step.
    pub loss: f32,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// Targets counted.
    pub targets: usize,
    /// Tokens read, masked ones included.
    pub tokens: usize,
    /// Memory.
    pub memory: StepMemory,
    /// Bytes between host and device.
    pub traffic: Traffic,
    /// Those of them in the last micro-batch: every one moves as many.
    pub micro_batch_traffic: Traffic,
    /// Replays of each stage.
    pub replayed: ReplayCounts,
    /// When it was made, or known to be made.
    pub done_at: Instant,
}

impl StepOutcome {
    /// Whether loss and gradients are finite. If not, the step was skipped: weights and optimizer states are as they were.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

impl Session {
    /// A session on the processor; its weights are zero until they are set.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if what lives across steps does not fit.
    pub fn on_cpu(settings: Settings, memory: &Memory) -> Result<Session, SessionError> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let kernels = Box::new(Cpu::new(memory, settings.narrowest_dtype())?);
        Session::new(settings, memory, kernels)
    }

    /// A session on shapes, which leases what the target would, computes nothing, and counts operations.
    ///
    /// # Errors
    /// As [`Session::on_cpu`].
    pub fn on_shapes(
        settings: Settings,
        memory: &Memory,
        target: Target,
        flops: FlopCounter,
    ) -> Result<Session, SessionError> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let kernels = Box::new(Meta::new(
            memory,
            target,
            settings.narrowest_dtype(),
            flops,
        )?);
        Session::new(settings, memory, kernels)
    }

    /// A session on kernels that work in `memory`; its weights are zero until they are set.
    ///
    /// # Errors
    /// As [`Session::on_cpu`].
    pub fn on_kernels(
        settings: Settings,
        memory: &Memory,
        kernels: Box<dyn Kernels>,
    ) -> Result<Session, SessionError> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        Session::new(settings, memory, kernels)
    }

    fn new(
        settings: Settings,
        memory: &Memory,
        kernels: Box<dyn Kernels>,
    ) -> Result<Session, SessionError> {
        let architecture = Architecture::of(&settings.model, settings.attention);
        let layout = Rc::new(settings.layout(&architecture)?);
        let dtype = settings.dtype;
        let computation = Computation {
            dtype,
            seq: settings.seq,
            head_chunk: settings.head_chunk,
        };
        let model = Model::new(architecture, layout.clone(), memory, &*kernels, computation)?;
        let parameters = Arena::lease(memory, Category::Parameter, "parameters", &layout, dtype)?;
        let states = &settings.states;
        let gradients = Gradients::lease(memory, &layout, states.gradients)?;
        let formats = (states.moments, states.master);
        let offload = settings.offload.as_ref();
        let offload = offload.map(|offload| offloaded(offload, &model));
        let optimizer = AdamW::lease(
            memory,
            &layout,
            dtype,
            formats,
            settings.optimizer,
            offload.as_ref(),
        )?;
        let copy_place = settings.checkpoint_copy.then(|| {
            let declared = model.architecture().parameters();
            CopyPlace::lease(memory, declared, &parameters, &optimizer)
        });
        let loss = memory.lease_persistent(Category::OptimizerState, "loss", [1], DType::F32)?;
        let shape = BatchShape {
            rows: settings.micro_batch,
            seq: settings.seq,
        };
        let policy = &settings.policy;
        let saved = Saved::lease(memory, model.architecture(), dtype, policy, shape)?;
        let memory = memory.clone();
        Ok(Session {
            memory,
            kernels,
            settings,
            model,
            parameters,
            gradients,
            optimizer,
            copy_place: copy_place.transpose()?,
            saved,
            loss,
            step: 0,
            updates: 0,
            stop: Box::new(|| false),
            each_micro_batch: Box::new(|_, _| {}),
            in_flight: None,
            finished: None,
        })
    }

    /// One training step, to its end: forward and backward of every micro-batch, then the update.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if a lease is refused: nothing is updated then, and every lease is given back.
    pub fn step(&mut self, batch: &StepBatch) -> Result<StepOutcome, SessionError> {
        self.start_step(batch)?;
        let outcome = self.finish_step()?;
        Ok(outcome.expect("a step was started"))
    }

    /// Asks for one training step, while the device may still be at the one before. Where the host computes, the step
    /// is made when this returns.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn start_step(&mut self, batch: &StepBatch) -> Result<(), SessionError> {
        self.memory.begin_step();
        self.gradients.begin_step();
        let before = self.kernels.traffic();
        let targets = batch.target_count();
        let live_before = self.memory.live_leases();
        let mut beside = UpdateTraffic::default();
        let made = self.forward_backward(batch, targets, &mut beside);
        // Of the step before, also where this one is broken off.
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.traffic = in_flight.traffic.plus(beside.before);
        }
        let (replayed, micro_batch_traffic) = made?;
        let missing = self.gradients.missing();
        assert!(
            missing.is_empty(),
            "every parameter receives a gradient; these did not: {missing:?}"
        );
        self.finish_in_flight()?;
        let lr = self.update()?;
        let live_after = self.memory.live_leases();
        assert_eq!(live_before, live_after, "no lease outlives its step");
        let results = PendingResults::start(
            &*self.kernels,
            self.loss.view(),
            self.optimizer.norm_and_clip(),
        )?;
        self.in_flight = Some(InFlight {
            step: self.step,
            lr,
            targets,
            tokens: batch.micro.iter().map(|micro| micro.rows * micro.seq).sum(),
            memory: self.memory.step_memory(),
            traffic: self.kernels.traffic().since(before.plus(beside.before)),
            micro_batch_traffic,
            replayed,
            results,
            made_at: (!self.kernels.runs_ahead()).then(Instant::now),
        });
        if !self.kernels.runs_ahead() && !updates_in_forward(&self.settings) {
            self.finish_in_flight()?;
        }
        Ok(())
    }

    /// Breaks off every step during which `stop` says so, before its next block, with [`SessionError::Stopped`]. Nothing is
    /// left of such a step: weights and states are those after the one before, once [`Session::finish_step`] returned.
    pub fn stop_when(&mut self, stop: impl Fn() -> bool + 'static) {
        self.stop = Box::new(stop);
    }

    /// Calls `tell` after each micro-batch with how many of the step's have been asked for, and of how many.
    pub fn on_micro_batch(&mut self, tell: impl Fn(usize, usize) + 'static) {
        self.each_micro_batch = Box::new(tell);
    }

    /// The outcome of a step that [`Session::start_step`] has finished: the one asked for, or the one before.
    pub fn take_finished(&mut self) -> Option<StepOutcome> {
        self.finished.take()
    }

    /// Waits for the step that was asked for last, its update included; none if its outcome has been taken.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device failed.
    pub fn finish_step(&mut self) -> Result<Option<StepOutcome>, SessionError> {
        self.finish_update()?;
        self.finish_in_flight()?;
        Ok(self.finished.take())
    }

    /// Updates what is pending, and waits until offloaded states are back where they belong.
    fn finish_update(&mut self) -> Result<(), SessionError> {
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let before = self.kernels.traffic();
        let gradients = self.gradients.arena();
        self.optimizer
            .finish(&*self.kernels, &mut self.parameters, gradients)?;
        let crossed = self.kernels.traffic().since(before);
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.traffic = in_flight.traffic.plus(crossed);
        }
        let back = self.kernels.record(Queue::Download)?;
        Ok(self.kernels.finish(back)?)
    }

    /// Waits for the step in flight, if there is one. The number of updates counts it from then on: what a further
    /// update depends on.
    fn finish_in_flight(&mut self) -> Result<(), SessionError> {
        let Some(in_flight) = self.in_flight.take() else {
            return Ok(());
        };
        let results = in_flight.results.finish(&*self.kernels)?;
        let outcome = StepOutcome {
            step: in_flight.step,
            loss: (f64::from(results.loss_sum) / in_flight.targets as f64) as f32,
            grad_norm: results.grad_norm,
            lr: in_flight.lr,
            targets: in_flight.targets,
            tokens: in_flight.tokens,
            memory: in_flight.memory,
            traffic: in_flight.traffic,
            micro_batch_traffic: in_flight.micro_batch_traffic,
            replayed: in_flight.replayed,
            done_at: in_flight.made_at.unwrap_or_else(Instant::now),
        };
        self.updates += usize::from(outcome.is_finite());
        let untaken = self.finished.replace(outcome);
        assert!(
            untaken.is_none(),
            "outcomes are taken before the next step ends"
        );
        Ok(())
    }

    /// What forward passes between two steps work with: the step before is done then, its update included.
    pub(crate) fn between_steps(&mut self) -> Result<Forward<'_>, SessionError> {
        self.finish_update()?;
        self.finish_in_flight()?;
        Ok(Forward {
            memory: &self.memory,
            kernels: &*self.kernels,
            model: &self.model,
            parameters: &mut self.parameters,
            saved: &mut self.saved,
        })
    }

    fn forward_backward(
        &mut self,
        step: &StepBatch,
        targets: usize,
        beside: &mut UpdateTraffic,
    ) -> Result<(ReplayCounts, Traffic), SessionError> {
        let mut traffic = Traffic::default();
        let mut replayed = self.model.no_replays();
        let mut totals = StepTotals {
            loss: &mut self.loss,
            replayed: &mut replayed,
            is_first: true,
            gradient_scale: 1.0 / targets as f32,
        };
        for (index, micro) in step.micro.iter().enumerate() {
            let _place = self.memory.enter(Phase::Forward, Layer::Whole);
            let before = self.kernels.traffic().since(beside.total());
            let batch = upload(&self.memory, &*self.kernels, micro)?;
            let mut updating = Updating {
                kernels: &*self.kernels,
                memory: &self.memory,
                optimizer: &mut self.optimizer,
                in_forward: updates_in_forward(&self.settings),
                is_first_micro_batch: index == 0,
                is_last_micro_batch: index + 1 == step.micro.len(),
                stop: &*self.stop,
                traffic: &mut *beside,
            };
            let work = Work {
                memory: &self.memory,
                kernels: &*self.kernels,
                parameters: &mut self.parameters,
                saved: &mut self.saved,
                batch: &batch,
                purpose: Purpose::Training(Training {
                    gradients: &mut self.gradients,
                    beside: &mut updating,
                    randomness: Some(Randomness {
                        seed: self.settings.seed,
                        step: self.step as u64 + 1,
                        micro_batch: index as u64,
                    }),
                }),
            };
            self.model.forward_backward(work, &mut totals)?;
            (self.each_micro_batch)(index + 1, step.micro.len());
            traffic = self.kernels.traffic().since(before.plus(beside.total()));
        }
        Ok((replayed, traffic))
    }

    fn update(&mut self) -> Result<f64, SessionError> {
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        self.step += 1;
        let lr = self.settings.schedule.rate(self.step);
        let (kernels, gradients) = (&*self.kernels, self.gradients.arena());
        self.optimizer.begin(
            kernels,
            &mut self.parameters,
            gradients,
            self.loss.view(),
            StepNumbers {
                step: self.step,
                update: self.updates + 1,
                learning_rate: lr,
                seed: self.settings.seed,
            },
        )?;
        if !updates_in_forward(&self.settings) {
            self.optimizer
                .finish(kernels, &mut self.parameters, gradients)?;
        }
        Ok(lr)
    }

    /// Steps made, and updates: steps that were not skipped.
    pub fn progress(&self) -> (usize, usize) {
        (self.step, self.updates)
    }

    /// Goes on after so many steps and updates.
    pub fn set_progress(&mut self, (step, updates): (usize, usize)) {
        (self.step, self.updates) = (step, updates);
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The memory that everything is leased from.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Name and bytes of the arenas that live across steps: weights, gradients, optimizer states.
    pub fn arenas(&self) -> Vec<(&'static str, u64)> {
        let held = [
            ("parameters", self.parameters.bytes()),
            ("gradients", self.gradients.arena().bytes()),
        ];
        held.into_iter().chain(self.optimizer.arenas()).collect()
    }

    /// Name and bytes of the arenas in pinned host memory that live across steps.
    pub fn host_arenas(&self) -> Vec<(&'static str, u64)> {
        let copy = self.copy_place.iter().map(CopyPlace::arena);
        self.optimizer
            .host_arenas()
            .into_iter()
            .chain(copy)
            .collect()
    }

    /// Whether the padding of weights and gradients is zero, as it must always be: then that of the states is too.
    pub fn padding_is_zero(&self) -> bool {
        self.parameters.padding_is_zero() && self.gradients.arena().padding_is_zero()
    }
}
