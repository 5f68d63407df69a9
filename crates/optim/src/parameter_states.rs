//! Sets weights and states of single parameters, and reads their states.

use crate::form::StateViews;
use crate::master::{SavedMaster, held, set_master, weight_bytes};
use crate::moment::SavedMoment;
use crate::named::{NamedState, ReadFrom};
use crate::optimizer::Optimizer;
use crate::saved::{RestoreError, SavedState, state_name};
use crate::sources::States;
use crate::tensor_states::share;
use files::{in_chunks, widen};
use kernels::{KernelError, Kernels, Result};
use memory::{Cover, Entry, Space};
use std::borrow::Cow;
use std::ops::Range;
use units::Weights;

impl Optimizer {
    /// Sets weights of one tensor from the layout's element `offset` on: the parameters and their master states, as far
    /// as this rank keeps them.
    ///
    /// # Errors
    /// [`KernelError`] if the device or a disk fails.
    pub fn set_weights(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        offset: usize,
        values: &[f32],
    ) -> Result {
        let range = offset..offset + values.len();
        let rounds = self.states.form.rounds_masters(&range);
        let values = held(Cow::Borrowed(values), rounds);
        let bytes = weight_bytes(weights.dtype_of(&range), &values);
        weights.store(kernels, range.clone(), &bytes)?;
        if self.states.form.master(&range).is_none() {
            return Ok(());
        }
        self.each_chunk(kernels, &range, |chunk, space, states| {
            let values = &values[chunk.start - offset..chunk.end - offset];
            set_master(kernels, space, states.master, values)
        })
    }

    /// The states of some of a parameter's elements. The range has whole blocks, or ends with the parameter. No update
    /// may be pending: see [`Optimizer::finish`].
    ///
    /// # Panics
    /// If this rank does not keep all of them.
    pub fn named_states(&self, index: usize, range: &Range<usize>) -> Vec<NamedState<'_>> {
        assert!(!self.is_pending(), "an update is pending");
        let entry = &self.layout.entries()[index];
        let own = range.start - entry.offset..range.end - entry.offset;
        let tensors = self.states.form.tensors(range).into_iter().enumerate();
        let mut resident = self.states.resident.tensors(range).map(ReadFrom::Device);
        let by_element = tensors.map(|(number, tensor)| NamedState {
            name: state_name(entry, tensor.kind),
            dtype: tensor.dtype,
            elements: tensor.rows(&own),
            whole: tensor.elements(entry.elements()),
            from: resident
                .next()
                .unwrap_or_else(|| self.stored(range, number)),
        });
        // A tensor's own states are saved in parts too.
        let of_tensor = self.states.tensor_states.tensors(index);
        let of_tensor = of_tensor.map(|(kind, view)| {
            let elements = share(entry, &own, view.elements());
            NamedState {
                name: state_name(entry, kind),
                dtype: view.dtype(),
                whole: view.elements(),
                from: ReadFrom::Device(view.rows(elements.clone())),
                elements,
            }
        });
        by_element.chain(of_tensor).collect()
    }

    /// Where the store has one of the states of a range: that of this number in the form.
    fn stored(&self, range: &Range<usize>, number: usize) -> ReadFrom<'_> {
        let streamed = self.streamed.as_ref();
        let streamed = streamed.expect("states that are not on the device are in chunks");
        let store = streamed.store.as_deref();
        let places = streamed.chunks.holding(range).filter_map(|(chunk, range)| {
            let places = self.states.form.places(&chunk.ranges, &range);
            let (start, place) = (chunk.away.as_ref()?.place.start, &places[number].1);
            Some(start + place.start..start + place.end)
        });
        let places = places.collect();
        ReadFrom::Chunks(store.expect("these states are in the store"), places)
    }

    /// Sets the states of a parameter, as far as this rank keeps them. `find` returns saved states by name, in any
    /// format. A state in the format of this run is restored bit by bit; others are converted. `weights` already hold
    /// the saved weights.
    ///
    /// # Errors
    /// [`RestoreError`] if a moment is missing, something has another size, or a file cannot be read.
    pub fn restore<'s>(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        index: usize,
        find: &dyn Fn(&str) -> Option<SavedState<'s>>,
    ) -> Result<(), RestoreError> {
        let layout = self.layout.clone();
        let entry = &layout.entries()[index];
        let find = |kind: &str| find(&state_name(entry, kind));
        let master = SavedMaster::find(entry, &find)?;
        let moments = self.states.form.moments(&entry.padded_range()).iter();
        let moments = moments.map(|moment| SavedMoment::find(moment, entry, &find));
        let moments = moments.collect::<Result<Vec<_>, _>>()?;
        let range = entry.range();
        let rounds = self.states.form.rounds_masters(&range);
        let mut restored = Vec::new();
        self.each_chunk(kernels, &entry.padded_range(), |chunk, space, states| {
            let own = chunk.start..chunk.end.min(range.end);
            let elements = own.start - entry.offset..own.end - entry.offset;
            let values = set_exact(kernels, weights, entry, &own, (&master, rounds))?;
            set_master(kernels, space, states.master, &values)?;
            for (saved, out) in moments.iter().zip(states.moments) {
                saved.store(kernels, space, out, &elements)?;
            }
            restored.push(own);
            Ok::<_, RestoreError>(())
        })?;
        self.states
            .tensor_states
            .restore(kernels, (index, entry), &find)?;
        if master.refines(weights.dtype_of(&range), rounds) {
            // The weights held here may be more than the states: other ranks keep the others' states.
            let held = weights.held().within(&range);
            let others = held.without(&Cover::new(restored));
            for own in others.ranges().iter().cloned().flat_map(in_chunks) {
                set_exact(kernels, weights, entry, &own, (&master, rounds))?;
            }
        }
        Ok(())
    }

    /// Gives the host the states of a range of one tensor, one chunk at a time, as far as this rank keeps them. Every
    /// chunk but the first begins with a block.
    fn each_chunk<E: From<KernelError>>(
        &mut self,
        kernels: &Kernels,
        range: &Range<usize>,
        mut set: impl FnMut(Range<usize>, Space, StateViews) -> Result<(), E>,
    ) -> Result<(), E> {
        let is_pending = self.is_pending();
        let States { resident, form, .. } = &mut self.states;
        let here = resident.cover.within(range);
        for own in here.ranges().iter().cloned().flat_map(in_chunks) {
            let states = form.views(&own, resident.views(&own));
            set(own, Space::Device, states)?;
        }
        if here.elements() == range.len() {
            return Ok(());
        }
        assert!(!is_pending, "an update is under way");
        let Some(streamed) = &mut self.streamed else {
            return Ok(());
        };
        streamed.rest(kernels)?;
        for (chunk, held) in streamed.chunks.holding(range) {
            let (Some(away), Some(store)) = (&chunk.away, &mut streamed.store) else {
                continue;
            };
            for own in in_chunks(held) {
                let bytes = store.change(away)?;
                let states = form.carve(&chunk.ranges, &own, bytes);
                set(own, Space::Host, states)?;
            }
        }
        Ok(())
    }
}

/// Sets the parameters of some of a tensor's elements from the exact weights that were saved, rounded to 24 bits if
/// `rounds`. Returns the exact weights.
fn set_exact(
    kernels: &Kernels,
    weights: &mut Weights,
    entry: &Entry,
    own: &Range<usize>,
    (master, rounds): (&SavedMaster, bool),
) -> Result<Vec<f32>, RestoreError> {
    let elements = own.start - entry.offset..own.end - entry.offset;
    let values = master.values(&elements, parameters(kernels, weights, own)?)?;
    let values = held(values.into(), rounds);
    let bytes = weight_bytes(weights.dtype_of(own), &values);
    weights.store(kernels, own.clone(), &bytes)?;
    Ok(values.into_owned())
}

/// Parameters, widened to f32.
fn parameters(kernels: &Kernels, weights: &Weights, range: &Range<usize>) -> Result<Vec<f32>> {
    let dtype = weights.dtype_of(range);
    let mut bytes = vec![0; range.len() * dtype.size_in_bytes()];
    weights.read(kernels, range.clone(), &mut bytes)?;
    let mut values = Vec::with_capacity(range.len());
    widen(dtype.into(), &bytes, &mut values);
    Ok(values)
}
