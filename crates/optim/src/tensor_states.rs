//! States of a tensor as a whole, such as one per row. They are small, f32 in every format, and on the device of every
//! rank.

use crate::form::Form;
use crate::saved::{Find, RestoreError};
use kernels::Kernels;
use memory::{
    Buffer, Category, DType, Entry, GRANULARITY_BYTES, In, Memory, Out, OutOfMemory, Space,
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
        let aligned = GRANULARITY_BYTES as usize / DType::F32.size_in_bytes();
        let (mut places, mut end) = (BTreeMap::<usize, Vec<Place>>::new(), 0);
        for group in &form.groups {
            for tensor in &group.tensors {
                for (kind, elements) in group.rule.tensor_states(tensor) {
                    let start = usize::next_multiple_of(end, aligned);
                    end = start + elements;
                    let of_tensor = places.entry(tensor.entry).or_default();
                    of_tensor.push((kind, start..end));
                }
            }
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
        let ranges = self.places(entry).iter().map(|(_, range)| range.clone());
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

    /// Sets the states of a tensor from saved ones.
    pub(crate) fn restore(
        &mut self,
        kernels: &Kernels,
        (index, entry): (usize, &Entry),
        find: Find,
    ) -> Result<(), RestoreError> {
        let kinds: Vec<&str> = self.places(index).iter().map(|(kind, _)| *kind).collect();
        for (kind, out) in kinds.into_iter().zip(self.views(index)) {
            let saved = find(kind).ok_or_else(|| RestoreError::missing(entry, kind))?;
            let elements = out.elements();
            let saved = saved.checked(entry, elements, &[DType::F32])?;
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
