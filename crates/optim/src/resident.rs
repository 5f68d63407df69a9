//! States on the device: one buffer per state, for some of the parameters.

use crate::form::{Form, StateTensor, StateViews};
use memory::{Buffer, Category, Cover, In, Memory, OutOfMemory};
use std::ops::Range;
use std::rc::Rc;

/// The states of the elements of a cover.
pub(crate) struct Resident {
    form: Rc<Form>,
    cover: Cover,
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
        form: &Rc<Form>,
        cover: &Cover,
    ) -> Result<Resident, OutOfMemory> {
        let mut needed: Vec<(StateTensor, Cover)> = form.masters(cover).into_iter().collect();
        for group in form.groups() {
            let cover = cover.within_all(&group.cover);
            let quantised = cover.within(&form.quantised());
            let formats = [(false, cover.without(&quantised)), (true, quantised)];
            for moment in group.rule.moments() {
                for (is_quantised, cover) in &formats {
                    let tensors = form.moment(moment, *is_quantised);
                    needed.extend(tensors.map(|tensor| (tensor, cover.clone())));
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
        Ok(Resident {
            held: needed
                .into_iter()
                .map(lease)
                .collect::<Result<_, OutOfMemory>>()?,
            form: form.clone(),
            cover: cover.clone(),
        })
    }

    /// The elements whose states are on the device.
    pub(crate) fn cover(&self) -> &Cover {
        &self.cover
    }

    /// Name and bytes of each state's buffer.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let held = self.held.iter();
        held.map(|held| (held.tensor.kind, held.buffer.bytes()))
    }

    /// Views of all states of a range. The range must be on the device, and quantised wholly or not at all.
    pub(crate) fn views(&mut self, range: &Range<usize>) -> StateViews<'_> {
        let held = self.held.iter_mut();
        let views = held.filter_map(|held| {
            let rows = held.tensor.rows(&held.cover.rows(range)?);
            Some(held.buffer.view_mut().rows(rows))
        });
        self.form.views(range, views)
    }

    /// The same for reading, each with its name.
    pub(crate) fn tensors(
        &self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (&'static str, In<'_>)> {
        self.held.iter().filter_map(|held| {
            let rows = held.tensor.rows(&held.cover.rows(range)?);
            Some((held.tensor.kind, held.buffer.view().rows(rows)))
        })
    }
}
