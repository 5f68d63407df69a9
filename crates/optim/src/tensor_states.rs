//! States of a tensor as a whole, such as one per row. They are small, f32 in every format, and on the device of every
//! rank.

use crate::form::Form;
use crate::rule::WholeTensor;
use crate::saved::{RestoreError, SavedState, state_name};
use kernels::Kernels;
use memory::{
    Buffer, Category, DType, Entry, In, Memory, Out, OutOfMemory, Space, one_behind_another,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// The arena's name.
const NAME: &str = "tensor_states";

/// A state's name, and its elements of the arena.
type Place = (&'static str, Range<usize>);

/// The states of all tensors that have such states.
pub(crate) struct TensorStates {
    /// By the tensors' index in the layout.
    places: BTreeMap<usize, Vec<Place>>,
    /// None if no tensor has any.
    arena: Option<Buffer>,
}

impl TensorStates {
    /// Leases the states, zeroed.
    pub(crate) fn lease(memory: &Memory, form: &Form) -> Result<TensorStates, OutOfMemory> {
        let tensors = form.groups().iter().flat_map(|group| {
            let states = |tensor: &WholeTensor| (tensor.entry, group.rule.tensor_states(tensor));
            group.tensors.iter().map(states)
        });
        let states = tensors.flat_map(|(entry, states)| {
            let of_entry = states.into_iter();
            of_entry.map(move |(kind, elements)| (entry, kind, elements))
        });
        let states: Vec<(usize, &str, usize)> = states.collect();
        let size = DType::F32.size_in_bytes();
        let bytes = one_behind_another(states.iter().map(|(_, _, elements)| size * elements));
        let end = bytes.last().map_or(0, |last| last.end / size);
        let mut places: BTreeMap<usize, Vec<Place>> = BTreeMap::new();
        for ((entry, kind, _), bytes) in states.into_iter().zip(bytes) {
            let place = (kind, bytes.start / size..bytes.end / size);
            places.entry(entry).or_default().push(place);
        }
        let lease = |elements: usize| {
            memory.lease_persistent(Category::OptimizerState, NAME, [elements], DType::F32)
        };
        Ok(TensorStates {
            places,
            arena: (end > 0).then(|| lease(end)).transpose()?,
        })
    }

    /// Name and bytes of the arena.
    pub(crate) fn arena(&self) -> Option<(&'static str, u64)> {
        self.arena.as_ref().map(|arena| (NAME, arena.bytes()))
    }

    fn places(&self, entry: usize) -> &[Place] {
        self.places.get(&entry).map_or(&[], Vec::as_slice)
    }

    /// Views of the states of a tensor.
    pub(crate) fn views(&mut self, entry: usize) -> Vec<Out<'_>> {
        let places = self.places.get(&entry);
        let ranges = places.into_iter().flatten().map(|(_, range)| range.clone());
        let ranges: Vec<Range<usize>> = ranges.collect();
        let arena = self.arena.as_mut().map(Buffer::view_mut);
        arena.map_or(Vec::new(), |arena| arena.disjoint_rows(&ranges))
    }

    /// The same for reading, each with its name.
    pub(crate) fn tensors(&self, entry: usize) -> impl Iterator<Item = (&'static str, In<'_>)> {
        let places = self.places(entry).iter();
        places.filter_map(|(kind, range)| {
            let arena = self.arena.as_ref()?;
            Some((*kind, arena.view().rows(range.clone())))
        })
    }

    /// Sets the states of a tensor from saved ones, which `find` returns by name.
    pub(crate) fn restore<'s>(
        &mut self,
        kernels: &Kernels,
        (index, entry): (usize, &Entry),
        find: &dyn Fn(&str) -> Option<SavedState<'s>>,
    ) -> Result<(), RestoreError> {
        let kinds: Vec<&str> = self.places(index).iter().map(|(kind, _)| *kind).collect();
        for (kind, out) in kinds.into_iter().zip(self.views(index)) {
            let saved = find(&state_name(entry, kind));
            let saved = saved.ok_or_else(|| RestoreError::missing(entry, kind))?;
            let elements = out.elements();
            let saved = saved.exactly(entry, elements, DType::F32)?;
            crate::host::store(kernels, Space::Device, out, &saved.part(&(0..elements))?)?;
        }
        Ok(())
    }
}

/// The elements of a state that are saved with some of the tensor's elements. A part of the tensor gets a share in
/// proportion.
pub(crate) fn share(entry: &Entry, own: &Range<usize>, state: usize) -> Range<usize> {
    let of = |element: usize| (element as u128 * state as u128 / entry.elements() as u128) as usize;
    of(own.start)..of(own.end)
}
