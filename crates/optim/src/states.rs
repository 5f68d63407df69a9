//! Moments and master weights of a part of the parameters, in one space.

use crate::cover::Cover;
use crate::master::MasterWeights;
use crate::moment::{FIRST, MomentBuffers, SECOND};
use crate::named::{NamedState, RestoreError, SavedState};
use crate::storage::Storage;
use crate::{MasterFormat, MomentFormat};
use kernels::{KernelError, Kernels, MasterOperand, MomentOperand};
use memory::{Arena, DType, Entry, Layout, Out, OutOfMemory};
use std::ops::Range;

/// The states of the elements that a cover names.
pub(crate) struct StateBuffers {
    master: MasterWeights,
    first_moment: MomentBuffers,
    second_moment: MomentBuffers,
}

/// Views of all states of one range.
pub(crate) struct StateViews<'a> {
    pub(crate) master: MasterOperand<'a>,
    pub(crate) first_moment: MomentOperand<'a>,
    pub(crate) second_moment: MomentOperand<'a>,
}

impl StateBuffers {
    /// Leases states, zeroed.
    pub(crate) fn lease(
        storage: Storage,
        layout: &Layout,
        cover: &Cover,
        (moments, master): (MomentFormat, MasterFormat),
        weights: DType,
    ) -> Result<StateBuffers, OutOfMemory> {
        let quantised = match moments {
            MomentFormat::Quantised => cover.within(&layout.quantisable()),
            MomentFormat::F32 | MomentFormat::Bf16 => Cover::new([]),
        };
        let plain = cover.without(&quantised);
        let moment = |kind| MomentBuffers::lease(storage, &plain, &quantised, moments, kind);
        Ok(StateBuffers {
            master: MasterWeights::lease(storage, cover, master, weights)?,
            first_moment: moment(&FIRST)?,
            second_moment: moment(&SECOND)?,
        })
    }

    /// Name and bytes of each arena.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let buffers = self
            .master
            .buffer()
            .into_iter()
            .chain(self.first_moment.buffers())
            .chain(self.second_moment.buffers());
        buffers.map(|(name, buffer)| (name, buffer.bytes()))
    }

    /// A range that is held as a whole, and quantised as a whole or not at all.
    pub(crate) fn views(&mut self, range: &Range<usize>) -> StateViews<'_> {
        StateViews {
            master: self.master.flat_mut(range),
            first_moment: self.first_moment.flat_mut(range),
            second_moment: self.second_moment.flat_mut(range),
        }
    }

    pub(crate) fn set_weights(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        range: Range<usize>,
        values: &[f32],
    ) -> Result<(), KernelError> {
        self.master.set(kernels, parameters, range, values)
    }

    pub(crate) fn named(&self, entry: &Entry) -> Vec<NamedState<'_>> {
        let master = self.master.named(entry).into_iter();
        master
            .chain(self.first_moment.named(entry))
            .chain(self.second_moment.named(entry))
            .collect()
    }

    pub(crate) fn restore<'s>(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        entry: &Entry,
        find: &dyn Fn(&str) -> Option<SavedState<'s>>,
    ) -> Result<(), RestoreError> {
        self.master.restore(kernels, parameters, entry, find)?;
        self.first_moment.restore(kernels, entry, find)?;
        self.second_moment.restore(kernels, entry, find)
    }
}

impl<'a> StateViews<'a> {
    /// Places in `bytes` (u8) for states like these, one behind the other.
    pub(crate) fn carve<'b>(&self, bytes: Out<'b>) -> StateViews<'b> {
        let mut knife = Knife { rest: Some(bytes) };
        StateViews {
            master: match &self.master {
                MasterOperand::Parameters => MasterOperand::Parameters,
                MasterOperand::F32(like) => MasterOperand::F32(knife.cut(like)),
                MasterOperand::Remainder(like) => MasterOperand::Remainder(knife.cut(like)),
            },
            first_moment: knife.moment(&self.first_moment),
            second_moment: knife.moment(&self.second_moment),
        }
    }

    /// The bytes that [`StateViews::carve`] takes.
    pub(crate) fn carved_bytes(self) -> usize {
        self.tensors().iter().map(carved_bytes).sum()
    }

    /// The bytes of all tensors.
    pub(crate) fn bytes(self) -> usize {
        let bytes = |tensor: &Out| tensor.elements() * tensor.dtype().size_in_bytes();
        self.tensors().iter().map(bytes).sum()
    }

    /// All tensors, in an order that depends on formats alone.
    pub(crate) fn tensors(self) -> Vec<Out<'a>> {
        let mut tensors = Vec::new();
        match self.master {
            MasterOperand::Parameters => {}
            MasterOperand::F32(master) | MasterOperand::Remainder(master) => {
                tensors.push(master);
            }
        }
        for moment in [self.first_moment, self.second_moment] {
            match moment {
                MomentOperand::Plain(values) => tensors.push(values),
                MomentOperand::Quantised { codes, absmax } => tensors.extend([codes, absmax]),
            }
        }
        tensors
    }
}

/// Cuts tensors from bytes.
struct Knife<'a> {
    rest: Option<Out<'a>>,
}

/// Where tensors within a slot start: kernels want 16 bytes, and device memory is leased in these.
const ALIGNMENT: usize = memory::GRANULARITY_BYTES as usize;

fn carved_bytes(like: &Out) -> usize {
    (like.elements() * like.dtype().size_in_bytes()).next_multiple_of(ALIGNMENT)
}

impl<'a> Knife<'a> {
    fn cut(&mut self, like: &Out) -> Out<'a> {
        let bytes = like.elements() * like.dtype().size_in_bytes();
        let rest = self.rest.take().expect("what is not cut is put back");
        let (taken, rest) = rest.split_at(carved_bytes(like));
        self.rest = Some(rest);
        taken.rows(0..bytes).cast(like.dtype())
    }

    fn moment(&mut self, like: &MomentOperand) -> MomentOperand<'a> {
        match like {
            MomentOperand::Plain(values) => MomentOperand::Plain(self.cut(values)),
            MomentOperand::Quantised { codes, absmax } => MomentOperand::Quantised {
                codes: self.cut(codes),
                absmax: self.cut(absmax),
            },
        }
    }
}
