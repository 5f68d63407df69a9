//! A model for evaluation or generation, without gradients and optimizer states.

use crate::Result;
use crate::forward::Forward;
use crate::incoming::IncomingWeights;
use kernels::cpu::Cpu;
use kernels::meta::{FlopCounter, Meta};
use kernels::{Kernels, Target};
use memory::{Homes, Layer, Memory, Phase};
use model::{BatchShape, Computation, HeldBlocks, Model, Policy, SavedActivations};
use settings::Settings;
use std::rc::Rc;
use units::Weights;

/// A model and its weights.
pub struct Inference {
    memory: Memory,
    /// Dropped before the memory that its work may use, so it must stay above it.
    kernels: Box<Kernels>,
    model: Model,
    weights: Weights,
    saved: SavedActivations,
}

impl Inference {
    /// A model on the CPU. Its weights are zero until they are set.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`](crate::SessionError::OutOfMemory) if the weights do not fit.
    pub fn on_cpu(settings: &Settings, memory: &Memory) -> Result<Inference> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let kernels = Box::new(Cpu::new(memory, settings.dtype)?);
        Inference::on_kernels(settings, memory, kernels)
    }

    /// A model on shapes, which makes the target's leases and computes nothing.
    ///
    /// # Errors
    /// As [`Inference::on_cpu`].
    pub fn on_shapes(settings: &Settings, memory: &Memory, target: Target) -> Result<Inference> {
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
    ) -> Result<Inference> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        // Products in FP8 and parts of sequences are training's alone.
        let of_inference = Settings {
            fp8: None,
            ranks: None,
            pipeline: None,
            ..settings.clone()
        };
        let architecture = of_inference.architecture();
        let layout = Rc::new(architecture.parameters.layout(|_, _| false));
        let Settings { dtype, seq, .. } = *settings;
        let computation = Computation {
            dtype,
            seq,
            head_chunk: settings.head_chunk,
        };
        let model = Model::new(architecture, layout.clone(), memory, &*kernels, computation)?;
        let weights = Weights::lease(memory, &layout, dtype, &Homes::default(), None)?;
        let shape = BatchShape { rows: 1, seq };
        let policy = Policy::keep_all_of(model.architecture().labels, model.layers());
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
            saved,
        })
    }

    /// What fills the model's weights.
    pub fn incoming(&mut self) -> IncomingWeights<'_> {
        IncomingWeights {
            model: &self.model,
            kernels: &*self.kernels,
            weights: &mut self.weights,
            optimizer: None,
        }
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

    /// What evaluates the model, and generates text with it.
    pub fn forward(&mut self) -> Forward<'_> {
        Forward {
            memory: &self.memory,
            kernels: &*self.kernels,
            model: &self.model,
            weights: &mut self.weights,
            saved: &mut self.saved,
            layers: 0..self.model.layers(),
            pipeline: None,
            ranks: None,
            stop: &|| false,
        }
    }
}
