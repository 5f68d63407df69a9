//! AdamW over arenas, with moments and master weights in any of their formats.

use crate::cover::Cover;
use crate::named::{NamedState, RestoreError, SavedState};
use crate::numbers::{Hyperparameters, Numbers, StepNumbers};
use crate::offload::{Offload, Offloaded};
use crate::segment::{Segment, segments};
use crate::states::StateBuffers;
use crate::storage::Storage;
use crate::{MasterFormat, MomentFormat};
use kernels::{KernelError, Kernels, NORM_PARTS, NormAndClip};
use memory::{Arena, Buffer, Category, DType, In, Layer, Layout, Memory, OutOfMemory, Space};
use std::ops::Range;
use std::rc::Rc;

/// The optimizer and its states.
pub struct AdamW {
    layout: Rc<Layout>,
    numbers: Numbers,
    /// States on the device, and what one call updates of them.
    resident: StateBuffers,
    segments: Vec<Segment>,
    offloaded: Option<Offloaded>,
    /// Whether offloaded states still have to be updated with the gradients of the last step.
    is_pending: bool,
    /// Scratch of the norm.
    parts: Buffer,
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
        let lease_away = |offload| Offloaded::lease(memory, layout, offload, formats, weights);
        Ok(AdamW {
            resident: StateBuffers::lease(
                Storage { memory, space },
                layout,
                &resident,
                formats,
                weights,
            )?,
            segments: segments(layout, formats.0, &resident),
            offloaded: offload.map(lease_away).transpose()?,
            is_pending: false,
            layout: layout.clone(),
            numbers: Numbers::lease(memory, hyperparameters)?,
            parts: memory.lease_persistent(
                Category::OptimizerState,
                "norm_parts",
                [NORM_PARTS],
                DType::F64,
            )?,
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
    ) -> Result<&mut StateBuffers, KernelError> {
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
        let clip_norm = self.numbers.clip_norm();
        let max_norm = clip_norm.is_finite().then_some(clip_norm as f32);
        let (clip, parts) = (self.numbers.clip.view_mut(), self.parts.view_mut());
        kernels.run(NormAndClip {
            out: clip,
            parts,
            x: all,
            loss,
            max_norm,
        })?;
        for segment in &self.segments {
            let states = self.resident.views(&segment.range);
            let update = self.numbers.update(parameters, gradients, segment, states);
            kernels.run(update)?;
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
