//! A training step, composed from model and optimizer: the same code for a run and, on shapes, for its plan.

use crate::failure::Failure;
use crate::settings::Settings;
use data::StepBatch;
use kernels::cpu::Cpu;
use kernels::meta::{FlopCounter, Meta};
use kernels::{Kernels, Target};
use memory::{Arena, Buffer, Category, DType, Layer, Memory, Phase, StepMemory};
use model::{Batch, Gradients, Model, ReplayCounts, Saved, StepTotals};
use optim::{AdamW, StepNumbers};
use std::rc::Rc;

/// Everything that lives across steps.
pub struct Session {
    pub(crate) memory: Memory,
    pub(crate) kernels: Box<dyn Kernels>,
    pub(crate) settings: Settings,
    pub(crate) model: Model,
    pub(crate) parameters: Arena,
    pub(crate) gradients: Gradients,
    pub(crate) optimizer: AdamW,
    /// The table of activations, empty between micro-batches.
    saved: Saved,
    /// `[1]` f32: sum of the step's losses.
    loss: Buffer,
    step: usize,
    /// Steps that were not skipped.
    updates: usize,
}

/// What a step computed and used.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// From 1.
    pub step: usize,
    /// Mean over all targets of the step.
    pub loss: f32,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// Targets counted.
    pub targets: usize,
    /// Memory.
    pub memory: StepMemory,
    /// Replays of each stage.
    pub replayed: ReplayCounts,
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
    /// [`Failure::OutOfMemory`] if what lives across steps does not fit.
    pub fn on_cpu(settings: Settings, memory: &Memory) -> Result<Session, Failure> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let kernels = Box::new(Cpu::new(memory, settings.narrowest_dtype())?);
        Session::new(settings, memory, kernels)
    }

    /// A session on a GPU; its weights are zero until they are set.
    ///
    /// # Errors
    /// As [`Session::on_cpu`], and [`Failure::Device`] if cuBLASLt does not start.
    #[cfg(feature = "cuda")]
    pub fn on_cuda(
        settings: Settings,
        memory: &Memory,
        device: &Rc<kernels::cuda::CudaDevice>,
    ) -> Result<Session, Failure> {
        use kernels::cuda::{Cuda, CudaDriver};
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let driver = CudaDriver::new(device)?;
        let kernels = Box::new(Cuda::new(driver, memory, settings.narrowest_dtype())?);
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
    ) -> Result<Session, Failure> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let kernels = Box::new(Meta::new(
            memory,
            target,
            settings.narrowest_dtype(),
            flops,
        )?);
        Session::new(settings, memory, kernels)
    }

    fn new(
        settings: Settings,
        memory: &Memory,
        kernels: Box<dyn Kernels>,
    ) -> Result<Session, Failure> {
        let Settings {
            seq,
            dtype,
            head_chunk,
            attention,
            ..
        } = settings;
        let layout = Rc::new(settings.layout()?);
        let model = Model::new(
            settings.model.clone(),
            layout.clone(),
            memory,
            &*kernels,
            seq,
            dtype,
            head_chunk,
            attention,
        )?;
        let parameters = Arena::lease(memory, Category::Parameter, "parameters", &layout, dtype)?;
        let states = &settings.states;
        let gradients = Gradients::lease(memory, &layout, states.gradients)?;
        let formats = (states.moments, states.master);
        let optimizer = AdamW::lease(memory, &layout, dtype, formats, settings.optimizer)?;
        let loss = memory.lease_persistent(Category::OptimizerState, "loss", [1], DType::F32)?;
        let saved = Saved::new(settings.model.layers);
        let memory = memory.clone();
        Ok(Session {
            memory,
            kernels,
            settings,
            model,
            parameters,
            gradients,
            optimizer,
            saved,
            loss,
            step: 0,
            updates: 0,
        })
    }

    /// One training step: forward and backward of every micro-batch, then the update.
    ///
    /// # Errors
    /// [`Failure::OutOfMemory`] if a lease is refused: nothing is updated then, and every lease is given back.
    pub fn step(&mut self, batch: &StepBatch) -> Result<StepOutcome, Failure> {
        self.memory.begin_step();
        self.gradients.begin_step();
        let targets = batch.target_count();
        let live_before = self.memory.live_leases();
        let replayed = self.forward_backward(batch, targets)?;
        let missing = self.gradients.missing();
        assert!(
            missing.is_empty(),
            "every parameter receives a gradient; these did not: {missing:?}"
        );
        let lr = self.update()?;
        let live_after = self.memory.live_leases();
        assert_eq!(live_before, live_after, "no lease outlives its step");
        let (loss_sum, grad_norm) = self.read_back()?;
        let outcome = StepOutcome {
            step: self.step,
            loss: (f64::from(loss_sum) / targets as f64) as f32,
            grad_norm,
            lr,
            targets,
            memory: self.memory.step_memory(),
            replayed,
        };
        self.updates += usize::from(outcome.is_finite());
        Ok(outcome)
    }

    fn forward_backward(
        &mut self,
        step: &StepBatch,
        targets: usize,
    ) -> Result<ReplayCounts, Failure> {
        let mut replayed = ReplayCounts::default();
        let mut totals = StepTotals {
            loss: &mut self.loss,
            replayed: &mut replayed,
            is_first: true,
            gradient_scale: 1.0 / targets as f32,
        };
        for micro in &step.micro {
            let _place = self.memory.enter(Phase::Forward, Layer::Whole);
            let shape = (micro.rows, micro.seq);
            let batch = Batch::upload(
                &self.memory,
                &*self.kernels,
                shape,
                &micro.input_ids,
                &micro.targets,
            )?;
            self.model.forward_backward(
                &self.memory,
                &*self.kernels,
                &self.parameters,
                &mut self.gradients,
                &self.settings.policy,
                &mut self.saved,
                &batch,
                &mut totals,
            )?;
        }
        Ok(replayed)
    }

    fn update(&mut self) -> Result<f64, Failure> {
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        self.step += 1;
        let lr = self.settings.schedule.rate(self.step);
        self.optimizer.step(
            &*self.kernels,
            &mut self.parameters,
            self.gradients.arena(),
            self.loss.view(),
            StepNumbers {
                step: self.step,
                update: self.updates + 1,
                learning_rate: lr,
                seed: self.settings.seed,
            },
        )?;
        Ok(lr)
    }

    /// Loss sum and gradient norm of the step.
    fn read_back(&self) -> Result<(f32, f32), Failure> {
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let (mut loss, mut norm_and_clip) = ([0f32; 1], [0f32; 2]);
        self.kernels
            .download(bytemuck::cast_slice_mut(&mut loss), self.loss.view())?;
        self.kernels.download(
            bytemuck::cast_slice_mut(&mut norm_and_clip),
            self.optimizer.norm_and_clip(),
        )?;
        Ok((loss[0], norm_and_clip[0]))
    }

    /// Steps made, and updates: steps that were not skipped.
    pub fn progress(&self) -> (usize, usize) {
        (self.step, self.updates)
    }

    /// Goes on after so many steps and updates.
    pub(crate) fn set_progress(&mut self, (step, updates): (usize, usize)) {
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

    /// Whether the padding of weights and gradients is zero, as it must always be: then that of the states is too.
    pub fn padding_is_zero(&self) -> bool {
        self.parameters.padding_is_zero() && self.gradients.arena().padding_is_zero()
    }
}
