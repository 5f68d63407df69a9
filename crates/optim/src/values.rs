//! Weights and states of single parameters into the optimizer, and states out of it.

use crate::AdamW;
use crate::form::StateViews;
use crate::master::{SavedMaster, parameter_bytes, set_master};
use crate::moment::{FIRST_MOMENT, SECOND_MOMENT, SavedMoment};
use crate::named::{NamedState, RestoreError, SavedState, StatePlace, state_name};
use kernels::{KernelError, Kernels};
use memory::{Entry, Space};
use std::ops::Range;
use units::Weights;

impl AdamW {
    /// Sets weights from the layout's element `offset` on, within one tensor: the parameters, and what stands beside them.
    ///
    /// # Errors
    /// [`KernelError`] if the device or a disk fails.
    pub fn set_weights(
        &mut self,
        kernels: &dyn Kernels,
        weights: &mut Weights,
        offset: usize,
        values: &[f32],
    ) -> Result<(), KernelError> {
        let range = offset..offset + values.len();
        let bytes = parameter_bytes(weights.dtype(), values);
        weights.store(kernels, range.clone(), &bytes)?;
        if self.form.master().is_none() {
            return Ok(());
        }
        self.each_piece(kernels, &range, |piece, space, states| {
            let values = &values[piece.start - offset..piece.end - offset];
            set_master(kernels, space, states.master, values)
        })
    }

    /// The states of a parameter, by its index in the layout. No update may be pending: see [`AdamW::finish`].
    pub fn named_states(&self, index: usize) -> Vec<NamedState<'_>> {
        assert!(!self.is_pending(), "an update is pending");
        let entry = &self.layout.entries()[index];
        let range = entry.range();
        let state = |kind, dtype, elements, place| NamedState {
            name: state_name(entry, kind),
            dtype,
            elements,
            place,
        };
        if self.resident.cover().rows(&range).is_some() {
            let tensors = self.resident.tensors(&range);
            let states = tensors.map(|(kind, view)| {
                let place = StatePlace::Device(view);
                state(kind, view.dtype(), view.elements(), place)
            });
            return states.collect();
        }
        let streamed = self.streamed.as_ref();
        let streamed = streamed.expect("states that are not on the device are in chunks");
        let store = streamed.store().expect("these states are in the store");
        let tensors = self.form.tensors(&range).into_iter().enumerate();
        let states = tensors.map(|(number, tensor)| {
            let pieces = streamed.chunks().pieces(&range);
            let places = pieces.filter_map(|(chunk, piece)| {
                let place = self.form.places(&chunk.segment.range, &piece)[number]
                    .1
                    .clone();
                let start = chunk.away.as_ref()?.place.start;
                Some(start + place.start..start + place.end)
            });
            let place = StatePlace::Chunks(store, places.collect());
            state(
                tensor.kind,
                tensor.dtype,
                tensor.elements(range.len()),
                place,
            )
        });
        states.collect()
    }

    /// Sets the states of a parameter from those that `find` has by name, saved in any format. What has the format of
    /// this run is restored bit by bit; the rest is converted. `weights` hold the saved ones.
    ///
    /// # Errors
    /// [`RestoreError`] if a moment is missing or something has another size.
    pub fn restore<'s>(
        &mut self,
        kernels: &dyn Kernels,
        weights: &mut Weights,
        index: usize,
        find: &dyn Fn(&str) -> Option<SavedState<'s>>,
    ) -> Result<(), RestoreError> {
        let layout = self.layout.clone();
        let entry = &layout.entries()[index];
        let master = SavedMaster::find(entry, find)?;
        let first_moment = SavedMoment::find(&FIRST_MOMENT, entry, find)?;
        let second_moment = SavedMoment::find(&SECOND_MOMENT, entry, find)?;
        self.each_piece(kernels, &entry.padded_range(), |piece, space, states| {
            let own = without_padding(entry, piece);
            let elements = own.start - entry.offset..own.end - entry.offset;
            let parameters = parameters(kernels, weights, &own)?;
            let values = master.values(&elements, parameters);
            weights.store(kernels, own, &parameter_bytes(weights.dtype(), &values))?;
            set_master(kernels, space, states.master, &values)?;
            first_moment.store(kernels, space, states.first_moment, &elements)?;
            second_moment.store(kernels, space, states.second_moment, &elements)
        })?;
        Ok(())
    }

    /// Hands the states of a range, of one tensor, to the host, in as many pieces as it lies in. All but the first begin a
    /// block.
    fn each_piece(
        &mut self,
        kernels: &dyn Kernels,
        range: &Range<usize>,
        mut set: impl FnMut(Range<usize>, Space, StateViews) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        if self.resident.cover().rows(range).is_some() {
            return set(range.clone(), Space::Device, self.resident.views(range));
        }
        assert!(!self.is_pending(), "an update is under way");
        let streamed = self.streamed.as_mut();
        let streamed = streamed.expect("states that are not on the device are in chunks");
        let (chunks, store) = streamed.at_rest(kernels)?;
        let store = store.expect("these states are in the store");
        for (chunk, piece) in chunks.pieces(range) {
            let Some(away) = &chunk.away else { continue };
            let bytes = store.change(kernels, away)?;
            let states = self.form.carve(&chunk.segment.range, &piece, bytes);
            set(piece, Space::Host, states)?;
        }
        Ok(())
    }
}

/// What of a range is the tensor's own.
fn without_padding(entry: &Entry, range: Range<usize>) -> Range<usize> {
    range.start..range.end.min(entry.range().end)
}

/// Parameters, widened to f32.
fn parameters(
    kernels: &dyn Kernels,
    weights: &Weights,
    range: &Range<usize>,
) -> Result<Vec<f32>, KernelError> {
    let dtype = weights.dtype();
    let mut bytes = vec![0; range.len() * dtype.size_in_bytes()];
    weights.read(kernels, range.clone(), &mut bytes)?;
    let read = SavedState {
        dtype,
        bytes: &bytes,
    };
    Ok(read.widened(&(0..range.len())))
}
