//! Gathers the pieces or shards of a bundle from the ranks that have them.

use crate::Ranks;
use kernels::{Exchange, ExchangeBytes, Kernels, Queue, Result};
use memory::{Arena, Cover, In, Layout, Out, Rank};
use std::ops::Range;

const COMPLETE: &str = "what a rank has is complete before the others get it";
const ALL_CAME: &str = "what all ranks have has come before it is read";

/// Starts gatherings by `ask`. They wait for the computation so far, and the computation then waits for them.
pub(crate) fn gathered(kernels: &Kernels, ask: impl FnOnce() -> Result) -> Result {
    kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, COMPLETE)?;
    ask()?;
    kernels.wait(Queue::Compute, kernels.record(Queue::Collective)?, ALL_CAME)
}

/// What ranks gather from each other of a bundle.
#[derive(Clone, Copy)]
pub(crate) enum GatheredParts {
    /// All of it: the piece that each rank updates.
    Pieces,
    /// This rank's shard: the pieces that its copies update, in other shard groups.
    OwnShard,
    /// All of it: the shard of each rank of this shard group.
    Shards,
}

impl GatheredParts {
    /// The ranks that take part in a rank's gathering.
    fn ranks(self, layout: &Layout, rank: Rank) -> Vec<Rank> {
        match self {
            GatheredParts::Pieces => Rank::all(rank.of).collect(),
            GatheredParts::OwnShard => layout.ranks_of_shard(rank).collect(),
            GatheredParts::Shards => layout.ranks_of_shard_group(rank).collect(),
        }
    }

    /// The elements of a bundle that a rank gives.
    fn of(self, layout: &Layout, bundle: &Cover, rank: Rank) -> Cover {
        match self {
            GatheredParts::Pieces | GatheredParts::OwnShard => layout.piece(bundle, rank),
            GatheredParts::Shards => layout.shard(bundle, rank),
        }
    }
}

/// Starts to gather a bundle into an arena, as bytes. This rank's own part comes from the arena `own`, or is in its place already.
///
/// # Safety
/// As for [`gather`].
pub(crate) unsafe fn gather_bundle<'a>(
    kernels: &Kernels,
    (bundle, rank, what): (&'a Cover, Rank, GatheredParts),
    own: Option<&'a Arena>,
    into: &'a mut Arena,
) -> Result {
    let (layout, types) = (into.layout().clone(), into.types());
    let piece = what.of(&layout, bundle, rank);
    let own_bytes = types.bytes(&piece);
    let all_bytes = match what {
        GatheredParts::Pieces | GatheredParts::Shards => types.bytes(bundle),
        GatheredParts::OwnShard => types.bytes(&layout.shard(bundle, rank)),
    };
    let ranks = what.ranks(&layout, rank);
    let bytes = ExchangeBytes::new(
        ((ranks.len() - 1) * own_bytes) as u64,
        (all_bytes - own_bytes) as u64,
    );
    let bytes = match what {
        GatheredParts::Shards => bytes.among(ranks.len()),
        GatheredParts::Pieces | GatheredParts::OwnShard => bytes,
    };
    let own = own.map(|own| piece.ranges().iter().map(|range| own.raw(range)).collect());
    let numbers = ranks.iter().map(|rank| rank.number).collect();
    let list = move || {
        let of = |rank: Rank| {
            let ranges = what.of(&layout, bundle, rank).ranges().to_vec();
            ranges.into_iter().map(move |range| (range, rank.number))
        };
        places_by_owner(ranks.into_iter().flat_map(of).collect(), |ranges| {
            into.disjoint_raw_mut(ranges)
        })
    };
    // SAFETY: the caller's promise.
    unsafe { gather(kernels, (rank, || numbers), bytes, own, list) }
}

/// Starts gathering the pieces of some ranks, each with its rank and its place. This rank's own piece comes from `own`, or is
/// in its place already. `ranks` returns the numbers of those that take part.
///
/// # Safety
/// Until an event recorded after this in [`Queue::Collective`] is over, all of the memory stays alive, nothing writes
/// it, and nothing reads the places.
pub(crate) unsafe fn gather<'a>(
    kernels: &Kernels,
    (rank, ranks): (Rank, impl FnOnce() -> Vec<usize> + 'a),
    bytes: ExchangeBytes,
    own: Option<Vec<In<'a>>>,
    places: impl FnOnce() -> Vec<(usize, Out<'a>)> + 'a,
) -> Result {
    let list = move || to_all(rank.number, ranks(), own, places());
    // SAFETY: the caller's promise.
    unsafe { kernels.start_exchange_of(bytes, Box::new(list)) }
}

/// The exchange in which each of some ranks gives its pieces to all others. Places have their owners; this rank's own pieces come from
/// `own`, or are in their places already.
pub fn to_all<'a>(
    rank: usize,
    ranks: Vec<usize>,
    own: Option<Vec<In<'a>>>,
    places: Vec<(usize, Out<'a>)>,
) -> Exchange<'a> {
    let is_there = own.is_none();
    let (kept, receives): (Vec<_>, Vec<_>) = places
        .into_iter()
        .partition(|(of, _)| is_there && *of == rank);
    let kept = kept.into_iter().map(|(_, place)| place.into_in());
    let own: Vec<In> = own.unwrap_or_else(|| kept.collect());
    let to = ranks.into_iter().filter(|to| !is_there || *to != rank);
    let sends = to.flat_map(|to| own.iter().map(move |piece| (to, *piece)));
    Exchange {
        sends: sends.collect(),
        receives,
    }
}

/// Places for ranges, each with its owner, in the order of the ranges. `cut` returns the places.
pub fn places_by_owner<'a>(
    mut pieces: Vec<(Range<usize>, usize)>,
    cut: impl FnOnce(&[Range<usize>]) -> Vec<Out<'a>>,
) -> Vec<(usize, Out<'a>)> {
    pieces.sort_by_key(|(range, _)| range.start);
    let (ranges, owners): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
    owners.into_iter().zip(cut(&ranges)).collect()
}

/// Exchanges ranges of something of which each stage of a pipeline has some, given in the order of stages. `cut` returns their places.
///
/// # Safety
/// As for [`exchange_stages`].
pub(crate) unsafe fn exchange_ranges_of_stages<'a>(
    kernels: &Kernels,
    ranks: &'a Ranks,
    of_stages: Vec<Vec<Range<usize>>>,
    bytes_of: impl Fn(&Range<usize>) -> usize,
    cut: impl FnOnce(&[Range<usize>]) -> Vec<Out<'a>> + 'a,
) -> Result {
    let bytes = of_stages.iter();
    let bytes = bytes.map(|ranges| ranges.iter().map(&bytes_of).sum::<usize>() as u64);
    let bytes: Vec<u64> = bytes.collect();
    let places = move || {
        let pieces = of_stages.into_iter().enumerate();
        let pieces =
            pieces.flat_map(|(stage, ranges)| ranges.into_iter().map(move |range| (range, stage)));
        places_by_owner(pieces.collect(), cut)
    };
    // SAFETY: the caller's promise.
    unsafe { exchange_stages(kernels, ranks, &bytes, places) }
}

/// Starts an exchange among the stages of a pipeline: each gives its own pieces to the rank with this rank's place in every other
/// stage, and gets theirs. `bytes` has those of each stage's pieces, and `places` returns all pieces, each with its stage.
///
/// # Safety
/// Until an event recorded after this in [`Queue::Collective`] is over, all of the memory stays alive, nothing writes it, and nothing
/// reads what is received.
///
/// # Errors
/// `KernelError` if the device or another rank fails.
pub unsafe fn exchange_stages<'a>(
    kernels: &Kernels,
    ranks: &'a Ranks,
    bytes: &[u64],
    places: impl FnOnce() -> Vec<(usize, Out<'a>)> + 'a,
) -> Result {
    let (own, stages) = (bytes[ranks.stage.number], ranks.stage.of);
    let bytes = ExchangeBytes::new((stages as u64 - 1) * own, bytes.iter().sum::<u64>() - own);
    let list = move || {
        let places = places().into_iter();
        let places = places.map(|(stage, place)| (ranks.in_stage(stage), place));
        let all = (0..stages).map(|stage| ranks.in_stage(stage)).collect();
        to_all(
            ranks.in_stage(ranks.stage.number),
            all,
            None,
            places.collect(),
        )
    };
    // SAFETY: the caller's promise.
    unsafe { kernels.start_exchange_of_all(bytes, Box::new(list)) }
}
