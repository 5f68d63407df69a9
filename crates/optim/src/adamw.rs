//! AdamW with f32 moments, and an f32 master where the weights are bf16.

use kernels::{KernelError, Kernels, NORM_PARTS};
use memory::{Arena, Buffer, Category, DType, In, Layout, Memory, OutOfMemory};
use std::ops::Range;
use std::rc::Rc;

/// The numbers of AdamW that stay the same over a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices; vectors have none.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm; infinite: never.
    pub clip_norm: f64,
}

/// The optimizer and its states.
pub struct AdamW {
    hyperparameters: Hyperparameters,
    layout: Rc<Layout>,
    master: Option<Arena>,
    first_moment: Arena,
    second_moment: Arena,
    /// `[3]` f32: learning rate and bias corrections of the step.
    rates: Buffer,
    /// `[2]` f32: gradient norm and clipping factor of the step.
    clip: Buffer,
    /// Scratch of the norm.
    parts: Buffer,
}

impl AdamW {
    /// Leases all states: moments, and a master for bf16 weights. They are zero.
    ///
    /// # Errors
    /// [`OutOfMemory`] if they do not fit.
    pub fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        weights: DType,
        hyperparameters: Hyperparameters,
    ) -> Result<AdamW, OutOfMemory> {
        let arena = |name| Arena::lease(memory, Category::OptimizerState, name, layout, DType::F32);
        let small = |name, elements: usize, dtype| {
            memory.lease_persistent(Category::OptimizerState, name, [elements], dtype)
        };
        Ok(AdamW {
            hyperparameters,
            layout: layout.clone(),
            master: if weights == DType::F32 {
                None
            } else {
                Some(arena("master")?)
            },
            first_moment: arena("first_moment")?,
            second_moment: arena("second_moment")?,
            rates: small("rates", 3, DType::F32)?,
            clip: small("clip", 2, DType::F32)?,
            parts: small("norm_parts", NORM_PARTS, DType::F64)?,
        })
    }

    /// The arenas of states, for reports.
    pub fn arenas(&self) -> impl Iterator<Item = &Arena> {
        self.master
            .iter()
            .chain([&self.first_moment, &self.second_moment])
    }

    /// The master weights, where the weights are bf16.
    pub fn master(&self) -> Option<&Arena> {
        self.master.as_ref()
    }

    /// The master weights, to fill.
    pub fn master_mut(&mut self) -> Option<&mut Arena> {
        self.master.as_mut()
    }

    /// Norm of the last step's gradients before clipping, and the clipping factor, `[2]` f32.
    pub fn norm_and_clip(&self) -> In<'_> {
        self.clip.view()
    }

    /// One update with the gradients of a step, which counts from 1. Where their norm is not finite, weights and
    /// states stay as they are.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn step(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        gradients: &Arena,
        step: usize,
        learning_rate: f64,
    ) -> Result<(), KernelError> {
        let Hyperparameters {
            beta1,
            beta2,
            clip_norm,
            weight_decay,
            ..
        } = self.hyperparameters;
        let first_correction = 1.0 / (1.0 - beta1.powi(step as i32));
        let second_correction = 1.0 / (1.0 - beta2.powi(step as i32)).sqrt();
        let rates = [
            learning_rate as f32,
            first_correction as f32,
            second_correction as f32,
        ];
        kernels.upload(self.rates.view_mut(), bytemuck::cast_slice(&rates))?;
        let all = gradients.flat(0..self.layout.elements());
        let max_norm = clip_norm.is_finite().then_some(clip_norm as f32);
        kernels.norm_and_clip(self.clip.view_mut(), self.parts.view_mut(), all, max_norm)?;
        self.update(
            kernels,
            parameters,
            gradients,
            self.layout.matrices(),
            weight_decay,
        )?;
        self.update(kernels, parameters, gradients, self.layout.vectors(), 0.0)
    }

    fn update(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        gradients: &Arena,
        range: Range<usize>,
        weight_decay: f64,
    ) -> Result<(), KernelError> {
        let Hyperparameters {
            beta1, beta2, eps, ..
        } = self.hyperparameters;
        kernels.adamw(kernels::AdamW {
            parameters: parameters.flat_mut(range.clone()),
            master: self
                .master
                .as_mut()
                .map(|master| master.flat_mut(range.clone())),
            first_moment: self.first_moment.flat_mut(range.clone()),
            second_moment: self.second_moment.flat_mut(range.clone()),
            gradients: gradients.flat(range.clone()),
            rates: self.rates.view(),
            clip: self.clip.view(),
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            eps: eps as f32,
            weight_decay: weight_decay as f32,
        })
    }
}
