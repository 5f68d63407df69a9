//! States on the device: one buffer per state, for some of the parameters.

use crate::form::{Form, StateTensor};
use memory::{Buffer, Category, Cover, In, Memory, Out, OutOfMemory};
use std::ops::Range;

/// The states of the elements of a cover.
pub(crate) struct Resident {
    /// The elements whose states are on the device.
    pub(crate) cover: Cover,
    /// In the order of the form's tensors.
    held: Vec<ResidentState>,
}

/// A state, and the elements of the layout that it is for.
struct ResidentState {
    tensor: StateTensor,
    cover: Cover,
    buffer: Buffer,
}

impl Resident {
    /// Leases states, zeroed.
    pub(crate) fn lease(
        memory: &Memory,
        form: &Form,
        cover: &Cover,
    ) -> Result<Resident, OutOfMemory> {
        let mut needed: Vec<(StateTensor, Cover)> = form.masters(cover).into_iter().collect();
        for group in &form.groups {
            let cover = cover.within_all(&group.cover);
            let quantised = cover.within(&form.quantised);
            let formats = [(false, cover.without(&quantised)), (true, quantised)];
            for moment in group.rule.moments() {
                for (is_quantised, cover) in &formats {
                    let tensors = form.moment(moment, *is_quantised);
                    needed.extend(tensors.into_iter().map(|tensor| (tensor, cover.clone())));
                }
            }
        }
        needed.retain(|(_, cover)| cover.elements() > 0);
        let lease = |(tensor, cover): (StateTensor, Cover)| {
            let dims = [tensor.elements(cover.elements())];
            let category = Category::OptimizerState;
            Ok(ResidentState {
                tensor,
                cover,
                buffer: memory.lease_persistent(category, tensor.kind, dims, tensor.dtype)?,
            })
        };
        let held = needed.into_iter().map(lease);
        Ok(Resident {
            held: held.collect::<Result<_, OutOfMemory>>()?,
            cover: cover.clone(),
        })
    }

    /// Name and bytes of each state's buffer.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let held = self.held.iter();
        held.map(|held| (held.tensor.kind, held.buffer.bytes()))
    }

    /// Views of all states of a range. The range must be on the device, and quantised wholly or not at all.
    pub(crate) fn views(&mut self, range: &Range<usize>) -> impl Iterator<Item = Out<'_>> {
        self.held.iter_mut().filter_map(|held| {
            let rows = held.tensor.rows(&held.cover.rows(range)?);
            Some(held.buffer.view_mut().rows(rows))
        })
    }

    /// The same for reading.
    pub(crate) fn tensors(&self, range: &Range<usize>) -> impl Iterator<Item = In<'_>> {
        self.held.iter().filter_map(|held| {
            let rows = held.tensor.rows(&held.cover.rows(range)?);
            Some(held.buffer.view().rows(rows))
        })
    }
}
