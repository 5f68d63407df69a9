//! Sums of squares of gradients, by grains of a fixed number of elements ([`GRAIN_ELEMENTS`]). So the norm has the same
//! bits wherever gradients live, and whichever rank sums them.

use crate::gather::gather;
use kernels::{ExchangeBytes, KernelError, Kernels, NormGrains};
use memory::{
    Buffer, Category, Cover, DType, GRAIN_ELEMENTS, In, Layout, Memory, OutOfMemory, Rank,
};
use std::ops::Range;
use std::rc::Rc;

/// The grains of all gradients.
pub(crate) struct Grains {
    layout: Rc<Layout>,
    /// f64 sums of squares, in the order of [`Layout::grained`].
    sums: Buffer,
}

impl Grains {
    pub(crate) fn lease(memory: &Memory, layout: &Rc<Layout>) -> Result<Grains, OutOfMemory> {
        let count = layout.grained().last().map_or(0, |(range, first)| {
            first + range.len().div_ceil(GRAIN_ELEMENTS)
        });
        let category = Category::Gradient;
        Ok(Grains {
            layout: layout.clone(),
            sums: memory.lease_persistent(category, "norm_grains", [count], DType::F64)?,
        })
    }

    /// Sums the squares of a cover's gradients. `of` reads a range of them.
    pub(crate) fn sum<'a>(
        &mut self,
        kernels: &Kernels,
        cover: &Cover,
        of: impl Fn(Range<usize>) -> In<'a>,
    ) -> Result<(), KernelError> {
        for (range, grains) in grains_of(&self.layout, cover) {
            let grains = self.sums.view_mut().rows(grains);
            let x = of(range);
            kernels.run(NormGrains { grains, x })?;
        }
        Ok(())
    }

    /// Gathers the sums of all ranks, each of which has summed the grains of its own elements.
    pub(crate) fn gather(&mut self, kernels: &Kernels, rank: Rank) -> Result<(), KernelError> {
        let layout = self.layout.clone();
        let of = move |rank| grains_of(&layout, &layout.own_trained(rank));
        let own: usize = of(rank).iter().map(|(_, grains)| grains.len()).sum();
        let others = self.sums.dims().elements() - own;
        let grain_bytes = self.sums.dtype().size_in_bytes();
        let bytes = ExchangeBytes::new(
            ((rank.of - 1) * own * grain_bytes) as u64,
            (others * grain_bytes) as u64,
        );
        let sums = self.sums.view_mut();
        let list = move || {
            let of = |rank: Rank| of(rank).into_iter().map(move |(_, own)| (own, rank.number));
            let mut pieces: Vec<(Range<usize>, usize)> = Rank::all(rank.of).flat_map(of).collect();
            pieces.sort_by_key(|(grains, _)| grains.start);
            let (ranges, owners): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
            owners
                .into_iter()
                .zip(sums.disjoint_rows(&ranges))
                .collect()
        };
        // SAFETY: the caller waits for this before the sums are read or written again, and they live as long as kernels
        // have work.
        unsafe { gather(kernels, rank, bytes, None, list) }
    }

    /// The sums of all grains, `[g]` f64.
    pub(crate) fn all(&self) -> In<'_> {
        self.sums.view()
    }

    /// The sums of a unit's grains, which are contiguous.
    pub(crate) fn within(&self, unit: Option<&Cover>) -> In<'_> {
        let all = unit.map_or(Vec::new(), |cover| grains_of(&self.layout, cover));
        let first = all.first().map_or(0, |(_, grains)| grains.start);
        let end = all.last().map_or(0, |(_, grains)| grains.end);
        self.sums.view().rows(first..end)
    }
}

/// The parts of a layout's grained ranges within a cover, each with its grains.
fn grains_of(layout: &Layout, cover: &Cover) -> Vec<(Range<usize>, Range<usize>)> {
    let grained = layout.grained().into_iter();
    let own = grained.flat_map(|(range, first)| {
        let pieces = cover.within(&range).ranges().to_vec();
        pieces.into_iter().map(move |piece| {
            let first = first + (piece.start - range.start) / GRAIN_ELEMENTS;
            let count = piece.len().div_ceil(GRAIN_ELEMENTS);
            (piece, first..first + count)
        })
    });
    own.collect()
}
