//! Sums of squares of gradients, by grains of a fixed number of elements ([`GRAIN_ELEMENTS`]). So the norm has the same
//! bits wherever gradients live, and whichever rank sums them.

use crate::Ranks;
use crate::gather::{exchange_ranges_of_stages, gather, places_by_owner};
use kernels::{ExchangeBytes, Kernels, NormGrains, Result};
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
    ) -> Result {
        for (range, grains) in grains_of(&self.layout, cover) {
            let grains = self.sums.view_mut().rows(grains);
            let x = of(range);
            kernels.run(NormGrains { grains, x })?;
        }
        Ok(())
    }

    /// Gathers the sums of all ranks, each of which has summed the grains of its own elements.
    pub(crate) fn gather(&mut self, kernels: &Kernels, rank: Rank) -> Result {
        let layout = self.layout.clone();
        let of = move |rank| grains_of(&layout, &layout.own_trained(rank));
        let ranks = move || (0..rank.of).collect();
        let own: usize = of(rank).iter().map(|(_, grains)| grains.len()).sum();
        let all = grains_of(&self.layout, &self.layout.trained());
        let others = all.iter().map(|(_, grains)| grains.len()).sum::<usize>() - own;
        let grain_bytes = self.sums.dtype().size_in_bytes();
        let bytes = ExchangeBytes::new(
            ((rank.of - 1) * own * grain_bytes) as u64,
            (others * grain_bytes) as u64,
        );
        let sums = self.sums.view_mut();
        let list = move || {
            let of = |rank: Rank| of(rank).into_iter().map(move |(_, own)| (own, rank.number));
            let pieces = Rank::all(rank.of).flat_map(of).collect();
            places_by_owner(pieces, |rows| sums.disjoint_rows(rows))
        };
        // SAFETY: the caller waits for this before the sums are read or written again, and they live as long as kernels
        // have work.
        unsafe { gather(kernels, (rank, ranks), bytes, None, list) }
    }

    /// Gives the other stages of a pipeline this stage's grains, and gets theirs. Every rank of this stage has them all by then.
    pub(crate) fn gather_stages(&mut self, kernels: &Kernels, ranks: &Ranks) -> Result {
        let grain_bytes = self.sums.dtype().size_in_bytes();
        let stages = 0..ranks.stage.of;
        let grains = stages
            .map(|stage| self.layout.grains_of_stage(stage))
            .collect();
        let bytes_of = |grains: &Range<usize>| grains.len() * grain_bytes;
        let sums = self.sums.view_mut();
        // SAFETY: as for `gather`.
        unsafe {
            exchange_ranges_of_stages(kernels, ranks, grains, bytes_of, |grains| {
                sums.disjoint_rows(grains)
            })
        }
    }

    /// The sums of all grains, `[g]` f64.
    pub(crate) fn all(&self) -> In<'_> {
        self.sums.view()
    }

    /// The sums of a unit's grains, which have to be contiguous.
    pub(crate) fn within(&self, unit: &Cover) -> In<'_> {
        let all = grains_of(&self.layout, unit);
        let first = all.first().map_or(0, |(_, grains)| grains.start);
        let end = all.last().map_or(0, |(_, grains)| grains.end);
        self.sums.view().rows(first..end)
    }
}

/// The parts of a layout's grained ranges within a cover, each with its grains.
fn grains_of(layout: &Layout, cover: &Cover) -> Vec<(Range<usize>, Range<usize>)> {
    let grained = layout.grained().iter();
    let own = grained.flat_map(|(range, first)| {
        let pieces = cover.within(range).ranges().to_vec();
        pieces.into_iter().map(move |piece| {
            let first = first + (piece.start - range.start) / GRAIN_ELEMENTS;
            let count = piece.len().div_ceil(GRAIN_ELEMENTS);
            (piece, first..first + count)
        })
    });
    own.collect()
}
