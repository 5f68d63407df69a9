//! The buffers that updates read and write: those that stay on the device, and those that come with a chunk.

use crate::chunks::Chunk;
use crate::form::Form;
use crate::numbers::Numbers;
use crate::resident::Resident;
use crate::segment::Segment;
use crate::tensor_states::TensorStates;
use crate::update::Update;
use memory::{In, Out, Rank};
use std::ops::Range;
use units::{Gradients, Weights};

/// The states that stay on the device, and the form of all states.
pub(crate) struct States {
    pub(crate) form: Form,
    pub(crate) numbers: Numbers,
    /// States with one element per parameter or per block.
    pub(crate) resident: Resident,
    pub(crate) tensor_states: TensorStates,
    /// This rank, of the ranks that divide the update. The only rank if each one updates everything.
    pub(crate) rank: Rank,
}

impl States {
    /// The buffers that updates read and write, with the norm and the clipping factor of the step.
    pub(crate) fn sources<'a>(
        &'a mut self,
        weights: &'a mut Weights,
        gradients: &'a Gradients,
    ) -> Sources<'a> {
        Sources {
            form: &self.form,
            numbers: &self.numbers,
            rank: self.rank,
            clip: self.numbers.clip.view(),
            resident: &mut self.resident,
            tensor_states: &mut self.tensor_states,
            weights,
            gradients,
            fetched: None,
        }
    }
}

/// The buffers that updates read and write.
pub(crate) struct Sources<'a> {
    pub(crate) form: &'a Form,
    pub(crate) numbers: &'a Numbers,
    /// This rank, of the ranks that divide the update.
    pub(crate) rank: Rank,
    /// `[2]` f32: the norm and the clipping factor.
    pub(crate) clip: In<'a>,
    pub(crate) resident: &'a mut Resident,
    pub(crate) tensor_states: &'a mut TensorStates,
    pub(crate) weights: &'a mut Weights,
    pub(crate) gradients: &'a Gradients,
    /// The chunk that was fetched for this update, if any.
    pub(crate) fetched: Option<FetchedChunk<'a>>,
}

/// The bytes of a chunk on the device, as u8.
pub(crate) struct FetchedChunk<'a> {
    pub(crate) chunk: &'a Chunk,
    pub(crate) states: Out<'a>,
    pub(crate) gradients: In<'a>,
}

impl Sources<'_> {
    /// These sources, with the chunk that was fetched.
    pub(crate) fn with<'b>(&'b mut self, fetched: Option<FetchedChunk<'b>>) -> Sources<'b> {
        Sources {
            resident: &mut *self.resident,
            tensor_states: &mut *self.tensor_states,
            weights: &mut *self.weights,
            fetched,
            ..*self
        }
    }

    /// The buffers that the update of a range of a segment reads and writes.
    pub(crate) fn update(&mut self, segment: &Segment, range: &Range<usize>) -> Update<'_> {
        let (form, numbers, gradients) = (self.form, self.numbers, self.gradients);
        let gradients = match (gradients.on_host(range), &self.fetched) {
            (Some(x), Some(fetched)) => {
                let all = fetched.gradients.cast(x.dtype());
                all.rows(fetched.chunk.rows(range))
            }
            _ => gradients.flat(range),
        };
        let states = match &mut self.fetched {
            Some(fetched) if fetched.chunk.away.is_some() => {
                form.carve(&fetched.chunk.ranges, range, fetched.states.reborrow())
            }
            _ => form.views(range, self.resident.views(range)),
        };
        let tensor = segment.whole.as_ref().map(|whole| whole.tensor.entry);
        let of_tensor = tensor.map(|entry| self.tensor_states.views(entry));
        let weight_decay = if segment.decays {
            numbers.weight_decay
        } else {
            0.0
        };
        Update {
            first_index: self.weights.layout().untailed(range.start) as u64,
            weights: self.weights.flat_mut(range.clone()),
            master: states.master,
            moments: states.moments,
            tensor_states: of_tensor.unwrap_or_default(),
            gradients,
            rates: numbers.rates(segment.group),
            clip: self.clip,
            key: numbers.key.view(),
            weight_decay: weight_decay as f32,
        }
    }
}
