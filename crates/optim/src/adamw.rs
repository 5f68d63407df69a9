//! AdamW over arenas, with moments and master weights in any of their formats.

use crate::cover::Cover;
use crate::named::{NamedState, RestoreError, SavedState};
use crate::offload::{Offload, Offloaded};
use crate::states::{Home, StateViews, States};
use crate::{MasterFormat, MomentFormat};
use kernels::{KernelError, Kernels, NORM_PARTS};
use memory::{Arena, Buffer, Category, DType, In, Layer, Layout, Memory, OutOfMemory, Space};
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
    layout: Rc<Layout>,
    numbers: Numbers,
    /// States on the device, and what one call updates of them.
    resident: States,
    segments: Vec<Segment>,
    offloaded: Option<Offloaded>,
    /// Whether offloaded states still have to be updated with the gradients of the last step.
    is_pending: bool,
    /// Scratch of the norm.
    parts: Buffer,
}

/// What all updates of a step share, on the device.
pub(crate) struct Numbers {
    hyperparameters: Hyperparameters,
    /// `[3]` f32: learning rate and bias corrections of the step.
    rates: Buffer,
    /// `[2]` f32: gradient norm and clipping factor of the step.
    clip: Buffer,
    /// `[2]` u32: key of the step's random numbers.
    key: Buffer,
}

/// A range of the arenas that one call updates: all matrices or all vectors, with moments of one format.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Segment {
    pub(crate) range: Range<usize>,
    pub(crate) decays: bool,
}

/// Matrices and vectors of a cover, cut where quantised moments begin and end.
pub(crate) fn segments(layout: &Layout, moments: MomentFormat, cover: &Cover) -> Vec<Segment> {
    let cuts = match moments {
        MomentFormat::Quantised => layout.quantisable(),
        MomentFormat::F32 | MomentFormat::Bf16 => 0..layout.elements(),
    };
    let mut segments = Vec::new();
    for (all, decays) in [(layout.matrices(), true), (layout.vectors(), false)] {
        let [start, end] = [cuts.start, cuts.end].map(|cut| cut.clamp(all.start, all.end));
        for kind in [all.start..start, start..end, end..all.end] {
            let ranges = cover.within(&kind);
            let segment = |range: &Range<usize>| Segment {
                range: range.clone(),
                decays,
            };
            segments.extend(ranges.ranges().iter().map(segment));
        }
    }
    segments
}

impl AdamW {
    /// Leases all states, zeroed: moments, and whatever bf16 weights have beside them. Work on offloaded states may be
    /// under way when the optimizer is dropped: the kernels must be dropped before it.
    ///
    /// # Errors
    /// [`OutOfMemory`] if they do not fit.
    pub fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        weights: DType,
        formats: (MomentFormat, MasterFormat),
        hyperparameters: Hyperparameters,
        offload: Option<&Offload>,
    ) -> Result<AdamW, OutOfMemory> {
        let all = Cover::new([layout.matrices(), layout.vectors()]);
        let away = offload.map_or(Cover::new([]), |offload| offload.cover(layout));
        let resident = all.without(&away);
        let space = Space::Device;
        let small = |name, elements: usize, dtype| {
            memory.lease_persistent(Category::OptimizerState, name, [elements], dtype)
        };
        let lease_away = |offload| Offloaded::lease(memory, layout, offload, formats, weights);
        Ok(AdamW {
            resident: States::lease(Home { memory, space }, layout, &resident, formats, weights)?,
            segments: segments(layout, formats.0, &resident),
            offloaded: offload.map(lease_away).transpose()?,
            is_pending: false,
            layout: layout.clone(),
            numbers: Numbers {
                hyperparameters,
                rates: small("rates", 3, DType::F32)?,
                clip: small("clip", 2, DType::F32)?,
                key: small("key", 2, DType::U32)?,
            },
            parts: small("norm_parts", NORM_PARTS, DType::F64)?,
        })
    }

    /// Name and bytes of each arena of states on the device, for reports.
    pub fn arenas(&self) -> Vec<(&'static str, u64)> {
        let slots = self.offloaded.as_ref();
        let slots = slots.map(|offloaded| ("offload_slots", offloaded.slot_bytes()));
        self.resident.arenas().chain(slots).collect()
    }

    /// Name and bytes of each arena of states in pinned host memory.
    pub fn host_arenas(&self) -> Vec<(&'static str, u64)> {
        let offloaded = self.offloaded.iter();
        let states = offloaded.flat_map(|offloaded| offloaded.states().arenas());
        states.collect()
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
        self.states_of_mut(kernels, &range)?
            .set_weights(kernels, parameters, range, values)
    }

    /// The states of a parameter, by its index in the layout. No update may be pending: see [`AdamW::finish`].
    pub fn named_states(&self, index: usize) -> Vec<NamedState<'_>> {
        assert!(!self.is_pending, "an update is pending");
        let entry = &self.layout.entries()[index];
        let states = match &self.offloaded {
            Some(offloaded) if offloaded.holds(&entry.range()) => offloaded.states(),
            _ => &self.resident,
        };
        states.named(entry)
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
        self.states_of_mut(kernels, &entry.range())?
            .restore(kernels, parameters, entry, find)
    }

    fn states_of_mut(
        &mut self,
        kernels: &dyn Kernels,
        range: &Range<usize>,
    ) -> Result<&mut States, KernelError> {
        match &mut self.offloaded {
            Some(offloaded) if offloaded.holds(range) => offloaded.states_at_rest(kernels),
            _ => Ok(&mut self.resident),
        }
    }

    /// Norm of the last step's gradients before clipping, and the clipping factor, `[2]` f32.
    pub fn norm_and_clip(&self) -> In<'_> {
        self.numbers.clip.view()
    }

    /// Starts to bring offloaded states to the device for the coming update, as far as there is room.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn prefetch(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        match &mut self.offloaded {
            Some(offloaded) => offloaded.prefetch(kernels),
            None => Ok(()),
        }
    }

    /// Begins an update with the gradients of a step whose losses add up to `loss` (`[1]` f32): norm, clipping factor,
    /// and all states on the device. Where loss or gradients are not finite, weights and states stay as they are.
    /// Offloaded states are pending: gradients must stay as they are until [`AdamW::update_part`] or [`AdamW::finish`] has
    /// updated them.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn begin(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        gradients: &Arena,
        loss: In,
        numbers: StepNumbers,
    ) -> Result<(), KernelError> {
        assert!(!self.is_pending, "the update before is pending");
        self.numbers.upload(kernels, numbers)?;
        let all = gradients.flat(0..self.layout.elements());
        let clip_norm = self.numbers.hyperparameters.clip_norm;
        let max_norm = clip_norm.is_finite().then_some(clip_norm as f32);
        let (clip, parts) = (self.numbers.clip.view_mut(), self.parts.view_mut());
        kernels.norm_and_clip(clip, parts, all, loss, max_norm)?;
        for segment in &self.segments {
            let states = self.resident.views(&segment.range);
            let update = self.numbers.update(parameters, gradients, segment, states);
            kernels.adamw(update)?;
        }
        if let Some(offloaded) = &mut self.offloaded {
            self.is_pending = true;
            offloaded.begin(kernels)?;
        }
        Ok(())
    }

    /// Updates the pending states of the parts up to this one ([`Offload::parts`]); nothing if none are pending.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn update_part(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        gradients: &Arena,
        part: Layer,
    ) -> Result<(), KernelError> {
        match &mut self.offloaded {
            Some(offloaded) if self.is_pending => {
                offloaded.update_part(kernels, &self.numbers, parameters, gradients, part)?;
                self.is_pending = !offloaded.is_updated();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Updates all states that are pending.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn finish(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        gradients: &Arena,
    ) -> Result<(), KernelError> {
        self.update_part(kernels, parameters, gradients, Layer::Whole)
    }
}

impl Numbers {
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

    /// The update of a segment whose states are on the device.
    pub(crate) fn update<'a>(
        &'a self,
        parameters: &'a mut Arena,
        gradients: &'a Arena,
        Segment { range, decays }: &Segment,
        states: StateViews<'a>,
    ) -> kernels::AdamW<'a> {
        let Hyperparameters {
            beta1,
            beta2,
            eps,
            weight_decay,
            ..
        } = self.hyperparameters;
        kernels::AdamW {
            parameters: parameters.flat_mut(range.clone()),
            master: states.master,
            first_moment: states.first_moment,
            second_moment: states.second_moment,
            gradients: gradients.flat(range.clone()),
            rates: self.rates.view(),
            clip: self.clip.view(),
            key: self.key.view(),
            first_index: range.start as u64,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            eps: eps as f32,
            weight_decay: if *decays { weight_decay as f32 } else { 0.0 },
        }
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
        let all = Cover::new([layout.matrices(), layout.vectors()]);
        let plain = segments(&layout, MomentFormat::Bf16, &all);
        let expected = [(layout.matrices(), true), (layout.vectors(), false)];
        let expected = expected.map(|(range, decays)| Segment { range, decays });
        assert_eq!(plain, expected);
        let quantised = segments(&layout, MomentFormat::Quantised, &all);
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
