//! AdamW over arenas, with moments and master weights in any of their formats.

use crate::master::Master;
use crate::moment::{FIRST, Moment, SECOND};
use crate::named::{NamedState, RestoreError, SavedState};
use crate::{MasterFormat, MomentFormat};
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

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// The step, from 1: with `seed` the key of the step's random numbers.
    pub step: usize,
    /// The update, from 1: unlike `step` it does not count skipped steps. Decides bias corrections.
    pub update: usize,
    /// The learning rate.
    pub learning_rate: f64,
    /// The run's seed.
    pub seed: u64,
}

/// The optimizer and its states.
pub struct AdamW {
    hyperparameters: Hyperparameters,
    layout: Rc<Layout>,
    segments: Vec<Segment>,
    master: Master,
    first_moment: Moment,
    second_moment: Moment,
    /// `[3]` f32: learning rate and bias corrections of the step.
    rates: Buffer,
    /// `[2]` f32: gradient norm and clipping factor of the step.
    clip: Buffer,
    /// `[2]` u32: key of the step's random numbers.
    key: Buffer,
    /// Scratch of the norm.
    parts: Buffer,
}

/// A range of the arenas that one call updates: all matrices or all vectors, with moments of one format.
#[derive(Clone, Debug, PartialEq)]
struct Segment {
    range: Range<usize>,
    decays: bool,
}

/// Matrices and vectors, cut where quantised moments begin and end.
fn segments(layout: &Layout, moments: MomentFormat) -> Vec<Segment> {
    let cuts = match moments {
        MomentFormat::Quantised => layout.quantisable(),
        MomentFormat::F32 | MomentFormat::Bf16 => 0..layout.elements(),
    };
    let mut segments = Vec::new();
    for (all, decays) in [(layout.matrices(), true), (layout.vectors(), false)] {
        let [start, end] = [cuts.start, cuts.end].map(|cut| cut.clamp(all.start, all.end));
        for range in [all.start..start, start..end, end..all.end] {
            if !range.is_empty() {
                segments.push(Segment { range, decays });
            }
        }
    }
    segments
}

impl AdamW {
    /// Leases all states, zeroed: moments, and whatever bf16 weights have beside them.
    ///
    /// # Errors
    /// [`OutOfMemory`] if they do not fit.
    pub fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        weights: DType,
        (moments, master): (MomentFormat, MasterFormat),
        hyperparameters: Hyperparameters,
    ) -> Result<AdamW, OutOfMemory> {
        let small = |name, elements: usize, dtype| {
            memory.lease_persistent(Category::OptimizerState, name, [elements], dtype)
        };
        Ok(AdamW {
            hyperparameters,
            layout: layout.clone(),
            segments: segments(layout, moments),
            master: Master::lease(memory, layout, master, weights)?,
            first_moment: Moment::lease(memory, layout, moments, &FIRST)?,
            second_moment: Moment::lease(memory, layout, moments, &SECOND)?,
            rates: small("rates", 3, DType::F32)?,
            clip: small("clip", 2, DType::F32)?,
            key: small("key", 2, DType::U32)?,
            parts: small("norm_parts", NORM_PARTS, DType::F64)?,
        })
    }

    /// Name and bytes of each arena of states, for reports.
    pub fn arenas(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let master = self.master.arena().into_iter();
        let moments = self
            .first_moment
            .buffers()
            .chain(self.second_moment.buffers());
        master
            .map(|(name, arena)| (name, arena.bytes()))
            .chain(moments.map(|(name, buffer)| (name, buffer.bytes())))
    }

    /// Sets weights from the layout's element `offset` on: the parameters, and what stands beside them.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn set_weights(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        offset: usize,
        values: &[f32],
    ) -> Result<(), KernelError> {
        let range = offset..offset + values.len();
        self.master.set(kernels, parameters, range, values)
    }

    /// The states of a parameter, by its index in the layout.
    pub fn named_states(&self, index: usize) -> Vec<NamedState<'_>> {
        let entry = &self.layout.entries()[index];
        let master = self.master.named(entry).into_iter();
        master
            .chain(self.first_moment.named(entry))
            .chain(self.second_moment.named(entry))
            .collect()
    }

    /// Sets the states of a parameter from those that `find` has by name, saved in any format. What has the format of
    /// this run is restored bit by bit; the rest is converted. `parameters` hold the saved weights.
    ///
    /// # Errors
    /// [`RestoreError`] if a moment is missing or something has another size.
    pub fn restore<'s>(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        index: usize,
        find: &dyn Fn(&str) -> Option<SavedState<'s>>,
    ) -> Result<(), RestoreError> {
        let layout = self.layout.clone();
        let entry = &layout.entries()[index];
        self.master.restore(kernels, parameters, entry, find)?;
        self.first_moment.restore(kernels, entry, find)?;
        self.second_moment.restore(kernels, entry, find)
    }

    /// Norm of the last step's gradients before clipping, and the clipping factor, `[2]` f32.
    pub fn norm_and_clip(&self) -> In<'_> {
        self.clip.view()
    }

    /// One update with the gradients of a step whose losses add up to `loss` (`[1]` f32). Where loss or gradients are
    /// not finite, weights and states stay as they are.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn step(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        gradients: &Arena,
        loss: In,
        numbers: StepNumbers,
    ) -> Result<(), KernelError> {
        self.upload(kernels, numbers)?;
        let all = gradients.flat(0..self.layout.elements());
        let clip_norm = self.hyperparameters.clip_norm;
        let max_norm = clip_norm.is_finite().then_some(clip_norm as f32);
        kernels.norm_and_clip(
            self.clip.view_mut(),
            self.parts.view_mut(),
            all,
            loss,
            max_norm,
        )?;
        for segment in self.segments.clone() {
            self.update(kernels, parameters, gradients, segment)?;
        }
        Ok(())
    }

    /// Sends what changes from step to step.
    fn upload(&mut self, kernels: &dyn Kernels, numbers: StepNumbers) -> Result<(), KernelError> {
        let Hyperparameters { beta1, beta2, .. } = self.hyperparameters;
        let update = numbers.update as i32;
        let rates = [
            numbers.learning_rate,
            1.0 / (1.0 - beta1.powi(update)),
            1.0 / (1.0 - beta2.powi(update)).sqrt(),
        ];
        let rates = rates.map(|rate| rate as f32);
        let key = kernels::random::key(numbers.seed, numbers.step as u64, ROUNDING);
        let key = [key as u32, (key >> 32) as u32];
        kernels.upload(self.rates.view_mut(), bytemuck::cast_slice(&rates))?;
        kernels.upload(self.key.view_mut(), bytemuck::cast_slice(&key))
    }

    fn update(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        gradients: &Arena,
        Segment { range, decays }: Segment,
    ) -> Result<(), KernelError> {
        let Hyperparameters {
            beta1,
            beta2,
            eps,
            weight_decay,
            ..
        } = self.hyperparameters;
        kernels.adamw(kernels::AdamW {
            parameters: parameters.flat_mut(range.clone()),
            master: self.master.flat_mut(range.clone()),
            first_moment: self.first_moment.flat_mut(range.clone()),
            second_moment: self.second_moment.flat_mut(range.clone()),
            gradients: gradients.flat(range.clone()),
            rates: self.rates.view(),
            clip: self.clip.view(),
            key: self.key.view(),
            first_index: range.start as u64,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            eps: eps as f32,
            weight_decay: if decays { weight_decay as f32 } else { 0.0 },
        })
    }
}

/// The stream of random numbers that states and weights are rounded with.
const ROUNDING: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use memory::LayoutBuilder;

    #[test]
    fn calls_do_not_depend_on_the_number_of_tensors() {
        let mut builder = LayoutBuilder::default();
        for layer in 0..40 {
            builder.add(format!("{layer}.small"), &[8, 8]);
            builder.add(format!("{layer}.large"), &[100, 100]);
            builder.add(format!("{layer}.norm"), &[5000]);
            builder.add(format!("{layer}.bias"), &[8]);
        }
        let layout = builder.build_precise(|_, elements| elements < 4096);
        let plain = segments(&layout, MomentFormat::Bf16);
        let expected = [(layout.matrices(), true), (layout.vectors(), false)];
        let expected = expected.map(|(range, decays)| Segment { range, decays });
        assert_eq!(plain, expected);
        let quantised = segments(&layout, MomentFormat::Quantised);
        assert_eq!(quantised.len(), 4);
        let decays: Vec<bool> = quantised.iter().map(|segment| segment.decays).collect();
        assert_eq!(decays, [true, true, false, false]);
        let joined: Vec<usize> = quantised
            .iter()
            .flat_map(|segment| segment.range.clone())
            .collect();
        assert!(joined.into_iter().eq(0..layout.elements()));
    }
}
