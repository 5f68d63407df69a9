//! Sets weights and states of single parameters, and reads their states.

use crate::form::{StateTensor, StateViews};
use crate::master::{SavedMaster, held, set_master, weight_bytes};
use crate::moment::SavedMoment;
use crate::named::{NamedState, ReadFrom};
use crate::optimizer::Optimizer;
use crate::saved::{RestoreError, SavedState, state_name};
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
        let states = self.states_by_element(index, range).into_iter();
        states.chain(self.states_of_tensor(index, range)).collect()
    }

    /// The part of the tensor's own states that is saved with these elements.
    fn states_of_tensor(
        &self,
        index: usize,
        range: &Range<usize>,
    ) -> impl Iterator<Item = NamedState<'_>> {
        let entry = &self.layout.entries()[index];
        let own = range.start - entry.offset..range.end - entry.offset;
        let states = self.states.tensor_states.tensors(index);
        states.map(move |(kind, view)| {
            let elements = share(entry, &own, view.elements());
            NamedState {
                name: state_name(entry, kind),
                dtype: view.dtype(),
                whole: view.elements(),
                from: ReadFrom::Device(view.rows(elements.clone())),
                elements,
            }
        })
    }

    /// The states that have one element per parameter or per block.
    fn states_by_element(&self, index: usize, range: &Range<usize>) -> Vec<NamedState<'_>> {
        assert!(!self.is_pending(), "an update is pending");
        let entry = &self.layout.entries()[index];
        let own = range.start - entry.offset..range.end - entry.offset;
        let state = |tensor: StateTensor, from| NamedState {
            name: state_name(entry, tensor.kind),
            dtype: tensor.dtype,
            elements: tensor.rows(&own),
            whole: tensor.elements(entry.elements()),
            from,
        };
        let tensors = self.states.form.tensors(range).into_iter();
        if self.states.resident.cover().rows(range).is_some() {
            let views = self.states.resident.tensors(range);
            let views = views.map(|(_, view)| ReadFrom::Device(view));
            return tensors
                .zip(views)
                .map(|(tensor, view)| state(tensor, view))
                .collect();
        }
        let streamed = self.streamed.as_ref();
        let streamed = streamed.expect("states that are not on the device are in chunks");
        let store = streamed.store().expect("these states are in the store");
        let states = tensors.enumerate().map(|(number, tensor)| {
            let held = streamed.chunks().holding(range);
            let places = held.filter_map(|(chunk, range)| {
                let place = self.states.form.places(&chunk.ranges, &range)[number]
                    .1
                    .clone();
                let start = chunk.away.as_ref()?.place.start;
                Some(start + place.start..start + place.end)
            });
            state(tensor, ReadFrom::Chunks(store, places.collect()))
        });
        states.collect()
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
        let master = SavedMaster::find(entry, find)?;
        let moments = self.states.form.moments(&entry.padded_range()).iter();
        let moments = moments.map(|moment| SavedMoment::find(moment, entry, find));
        let moments = moments.collect::<Result<Vec<_>, _>>()?;
        let range = entry.range();
        let rounds = self.states.form.rounds_masters(&range);
        let mut restored = Vec::new();
        self.each_chunk(kernels, &entry.padded_range(), |chunk, space, states| {
            let own = without_padding(entry, chunk);
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
            .restore(kernels, (index, entry), find)?;
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
        let resident = self.states.resident.cover().within(range);
        for own in resident.ranges().iter().cloned().flat_map(in_chunks) {
            let states = self.states.resident.views(&own);
            set(own, Space::Device, states)?;
        }
        if resident.elements() == range.len() {
            return Ok(());
        }
        assert!(!self.is_pending(), "an update is under way");
        let Some(streamed) = &mut self.streamed else {
            return Ok(());
        };
        let (chunks, store) = streamed.at_rest(kernels)?;
        let Some(store) = store else { return Ok(()) };
        for (chunk, held) in chunks.holding(range) {
            let Some(away) = &chunk.away else { continue };
            for own in in_chunks(held) {
                let bytes = store.change(&away.place)?;
                let states = self.states.form.carve(&chunk.ranges, &own, bytes);
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

/// The part of a range that is not padding.
fn without_padding(entry: &Entry, range: Range<usize>) -> Range<usize> {
    range.start..range.end.min(entry.range().end)
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
