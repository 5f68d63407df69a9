//! A model for evaluation or generation, without gradients and optimizer states.

use crate::error::SessionError;
use crate::evaluation::Evaluation;
use crate::forward::Forward;
use crate::generation::{CachedText, Generated, Generation};
use crate::orders::Orders;
use crate::session::Session;
use data::MicroBatch;
use kernels::cpu::Cpu;
use kernels::meta::{FlopCounter, Meta};
use kernels::{Kernels, Target};
use memory::{Homes, Layer, Memory, Phase};
use model::{
    BatchShape, Computation, DrawingOrder, Fresh, HeldBlocks, Model, ParameterPart, Policy,
    SavedActivations, import, import_adapter, initialise,
};
use optim::weight_bytes;
use settings::Settings;
use std::path::Path;
use std::rc::Rc;
use units::Weights;

/// A model and its weights.
pub struct Inference {
    memory: Memory,
    /// Dropped before the memory that its work may use, so it must stay above it.
    kernels: Box<Kernels>,
    model: Model,
    weights: Weights,
    /// Empty, because all weights are on the device, and no unit has to be fetched.
    no_orders: Orders,
    saved: SavedActivations,
}

impl Inference {
    /// A model on the CPU. Its weights are zero until they are set.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if the weights do not fit.
    pub fn on_cpu(settings: &Settings, memory: &Memory) -> Result<Inference, SessionError> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let kernels = Box::new(Cpu::new(memory, settings.dtype)?);
        Inference::on_kernels(settings, memory, kernels)
    }

    /// A model on shapes, which makes the target's leases and computes nothing.
    ///
    /// # Errors
    /// As [`Inference::on_cpu`].
    pub fn on_shapes(
        settings: &Settings,
        memory: &Memory,
        target: Target,
    ) -> Result<Inference, SessionError> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let kernels = Meta::new(memory, target, settings.dtype, FlopCounter::default())?;
        Inference::on_kernels(settings, memory, Box::new(kernels))
    }

    /// A model on kernels that work in `memory`. Its weights are zero until they are set. Of the settings only model,
    /// type, sequence length, attention and chunks of the head count.
    ///
    /// # Errors
    /// As [`Inference::on_cpu`].
    pub fn on_kernels(
        settings: &Settings,
        memory: &Memory,
        kernels: Box<Kernels>,
    ) -> Result<Inference, SessionError> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        // Products in FP8 and parts of sequences are training's alone.
        let of_inference = Settings {
            fp8: None,
            ranks: None,
            pipeline: None,
            ..settings.clone()
        };
        let architecture = of_inference.architecture();
        let layout = Rc::new(architecture.parameters().layout(|_, _| false));
        let Settings { dtype, seq, .. } = *settings;
        let computation = Computation {
            dtype,
            seq,
            head_chunk: settings.head_chunk,
        };
        let model = Model::new(architecture, layout.clone(), memory, &*kernels, computation)?;
        let weights = Weights::lease(memory, &layout, dtype, &Homes::default(), None)?;
        let shape = BatchShape { rows: 1, seq };
        let policy = Policy::keep_all_of(model.architecture().labels(), model.layers());
        let saved = model.architecture().lease_saved(
            memory,
            dtype,
            &policy,
            (shape, &[HeldBlocks::all(model.layers())]),
        )?;
        Ok(Inference {
            memory: memory.clone(),
            kernels,
            model,
            weights,
            no_orders: Orders::default(),
            saved,
        })
    }

    /// Loads the weights from a folder in Hugging Face layout.
    ///
    /// # Errors
    /// [`SessionError::Weights`] if a tensor is missing or has another shape.
    pub fn import(&mut self, folder: &Path) -> Result<(), SessionError> {
        let layout = self.model.layout().clone();
        let parameters = self.model.architecture().parameters().clone();
        let held = self.weights.held();
        import(folder, &parameters, &layout, &held, |part| match part {
            ParameterPart::Values(offset, values) => self.set_values(offset, values),
            ParameterPart::Codes(entry, bytes) => {
                Ok(self.weights.store_codes(&*self.kernels, entry, &bytes)?)
            }
        })?;
        Ok(())
    }

    /// Fills the model with the weights of a fresh one, for adapters on a model that was never in files.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn initialise(&mut self, fresh: Fresh) -> Result<(), SessionError> {
        let layout = self.model.layout().clone();
        let parameters = self.model.architecture().parameters().clone();
        initialise(
            &parameters,
            &layout,
            fresh,
            DrawingOrder::Any,
            |offset, values| self.set_values(offset, values),
        )
    }

    /// Fills the factors of adapters from a folder as PEFT writes it.
    ///
    /// # Errors
    /// As [`Inference::import`].
    pub fn import_adapter(&mut self, folder: &Path) -> Result<(), SessionError> {
        let layout = self.model.layout().clone();
        let parameters = self.model.architecture().parameters().clone();
        let held = self.weights.held();
        import_adapter(folder, &parameters, &layout, &held, |offset, values| {
            self.set_values(offset, values)
        })
    }

    /// Sets values, beginning at an element of the arena, rounded as training rounds them.
    fn set_values(&mut self, offset: usize, values: &[f32]) -> Result<(), SessionError> {
        let range = offset..offset + values.len();
        let bytes = weight_bytes(self.weights.dtype_of(&range), values);
        Ok(self.weights.store(&*self.kernels, range, &bytes)?)
    }

    /// Evaluates micro-batches, of any number of sequences.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if a lease is refused, and the errors of the batches.
    pub fn evaluate<E: From<SessionError>>(
        &mut self,
        batches: impl IntoIterator<Item = Result<MicroBatch, E>>,
    ) -> Result<Evaluation, E> {
        self.forward().evaluate(batches)
    }

    /// The sum of the losses of each sequence of micro-batches, in order, and the most live device bytes.
    ///
    /// # Errors
    /// As [`Inference::evaluate`].
    pub fn sequence_losses<E: From<SessionError>>(
        &mut self,
        batches: impl IntoIterator<Item = Result<MicroBatch, E>>,
    ) -> Result<(Vec<f32>, u64), E> {
        let losses = self.forward().sequence_losses(batches)?;
        Ok((losses, self.memory.step_memory().phase_peaks.eval))
    }

    /// Continues prompts. Calls `each` for each token as it is made, with the prompt's number and the token.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if a lease is refused.
    ///
    /// # Panics
    /// If a prompt is empty, or longer than the window.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        wanted: &Generation,
        each: impl FnMut(usize, u32),
    ) -> Result<Vec<Generated>, SessionError> {
        self.forward().generate(prompts, wanted, each)
    }

    /// Leases a cache for a text of at most `window` tokens that is generated in parts.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if it is refused.
    pub fn cached_text(&mut self, window: usize) -> Result<CachedText, SessionError> {
        self.forward().cached_text(window)
    }

    /// Continues `prompt` as [`Inference::generate`] does the prompt of that number, and reads only what differs from the
    /// cached text. The window is that of the cache.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if a lease is refused.
    ///
    /// # Panics
    /// If the prompt is empty, or longer than the window.
    pub fn continue_text(
        &mut self,
        text: &mut CachedText,
        (number, prompt): (usize, &[u32]),
        wanted: &Generation,
        each: impl FnMut(u32),
    ) -> Result<Generated, SessionError> {
        self.forward()
            .continue_text(text, (number, prompt), wanted, each)
    }

    /// The memory that everything is leased from.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Bytes of the weights.
    pub fn weights_bytes(&self) -> u64 {
        self.weights.bytes()
    }

    fn forward(&mut self) -> Forward<'_> {
        Forward {
            memory: &self.memory,
            kernels: &*self.kernels,
            model: &self.model,
            weights: &mut self.weights,
            orders: &self.no_orders,
            saved: &mut self.saved,
            layers: 0..self.model.layers(),
            pipeline: None,
            ranks: None,
        }
    }
}

impl Session {
    /// Evaluates the model between two steps, without changing what they compute or need. The step before is finished
    /// first; its outcome stays available for [`Session::take_finished`].
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if a lease is refused, and the errors of the batches.
    pub fn evaluate<E: From<SessionError>>(
        &mut self,
        batches: impl IntoIterator<Item = Result<MicroBatch, E>>,
    ) -> Result<Evaluation, E> {
        self.between_steps()?.evaluate(batches)
    }

    /// Continues prompts between two steps, otherwise as [`Session::evaluate`].
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if a lease is refused.
    ///
    /// # Panics
    /// If a prompt is empty, or longer than the window.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        wanted: &Generation,
        each: impl FnMut(usize, u32),
    ) -> Result<Vec<Generated>, SessionError> {
        self.between_steps()?.generate(prompts, wanted, each)
    }
}
