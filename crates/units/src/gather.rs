//! Gathers the pieces of a bundle from the ranks that have them.

use crate::Ranks;
use kernels::{Exchange, ExchangeBytes, KernelError, Kernels, Queue, Traffic};
use memory::{Cover, In, Out, Rank, Types};
use std::ops::Range;

const COMPLETE: &str = "what a rank has is complete before the others get it";
const ALL_CAME: &str = "what all ranks have has come before it is read";

/// Starts gatherings by `ask`. They wait for the computation so far, and the computation then waits for them.
pub(crate) fn gathered(
    kernels: &Kernels,
    ask: impl FnOnce() -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, COMPLETE)?;
    ask()?;
    kernels.wait(Queue::Compute, kernels.record(Queue::Collective)?, ALL_CAME)
}

/// The ranges in which the pieces of a bundle lie in the layout, with the rank of each, in order.
fn pieces(bundle: &Cover, rank: Rank) -> Vec<(usize, Range<usize>)> {
    let of = |rank: Rank| {
        let ranges = bundle.piece(rank).ranges().to_vec();
        ranges.into_iter().map(move |range| (rank.number, range))
    };
    Rank::all(rank.of).flat_map(of).collect()
}

/// Starts gathering all ranks' pieces of a bundle, as bytes. `places` returns the places for ranges of the layout, in
/// the same order.
///
/// # Safety
/// As for [`gather`].
pub(crate) unsafe fn gather_bundle<'a>(
    kernels: &Kernels,
    rank: Rank,
    (bundle, types): (&'a Cover, &Types),
    own: Option<Vec<In<'a>>>,
    places: impl FnOnce(&[Range<usize>]) -> Vec<Out<'a>> + 'a,
) -> Result<Traffic, KernelError> {
    let own_bytes = types.bytes(&bundle.piece(rank));
    let bytes = ExchangeBytes::new(
        ((rank.of - 1) * own_bytes) as u64,
        (types.bytes(bundle) - own_bytes) as u64,
    );
    let list = move || {
        let (of, ranges): (Vec<_>, Vec<_>) = pieces(bundle, rank).into_iter().unzip();
        of.into_iter().zip(places(&ranges)).collect()
    };
    // SAFETY: the caller's promise.
    unsafe { gather(kernels, rank, bytes, own, list) }?;
    Ok(Traffic::of(Queue::Collective, bytes.sent))
}

/// Starts gathering all ranks' pieces, each with its rank and its place. This rank's own piece comes from `own`, or is
/// in its place already.
///
/// # Safety
/// Until an event recorded after this in [`Queue::Collective`] is over, all of the memory stays alive, nothing writes
/// it, and nothing reads the places.
pub(crate) unsafe fn gather<'a>(
    kernels: &Kernels,
    rank: Rank,
    bytes: ExchangeBytes,
    own: Option<Vec<In<'a>>>,
    places: impl FnOnce() -> Vec<(usize, Out<'a>)> + 'a,
) -> Result<(), KernelError> {
    let list = move || {
        let is_there = own.is_none();
        let places = places().into_iter();
        let (kept, receives): (Vec<_>, Vec<_>) =
            places.partition(|(of, _)| is_there && *of == rank.number);
        let kept = kept.into_iter().map(|(_, place)| place.into_in());
        let own: Vec<In> = own.unwrap_or_else(|| kept.collect());
        let to = (0..rank.of).filter(|to| !is_there || *to != rank.number);
        let sends = to.flat_map(|to| own.iter().map(move |piece| (to, *piece)));
        Exchange {
            sends: sends.collect(),
            receives,
        }
    };
    // SAFETY: the caller's promise.
    unsafe { kernels.start_exchange_of(bytes, Box::new(list)) }
}

/// Places for ranges, each with its owner, in the order of the ranges. `cut` returns the places.
pub(crate) fn places_by_owner<'a>(
    mut pieces: Vec<(Range<usize>, usize)>,
    cut: impl FnOnce(&[Range<usize>]) -> Vec<Out<'a>>,
) -> Vec<(usize, Out<'a>)> {
    pieces.sort_by_key(|(range, _)| range.start);
    let (ranges, owners): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
    owners.into_iter().zip(cut(&ranges)).collect()
}

/// Starts an exchange among the stages of a pipeline: each gives its own pieces to the rank with this rank's place in every other
/// stage, and gets theirs. `bytes` has those of each stage's pieces, and `places` returns all pieces, each with its stage.
///
/// # Safety
/// Until an event recorded after this in [`Queue::Collective`] is over, all of the memory stays alive, nothing writes it, and nothing
/// reads what is received.
///
/// # Errors
/// [`KernelError`] if the device or another rank fails.
pub unsafe fn exchange_stages<'a>(
    kernels: &Kernels,
    ranks: &'a Ranks,
    bytes: &[u64],
    places: impl FnOnce() -> Vec<(usize, Out<'a>)> + 'a,
) -> Result<Traffic, KernelError> {
    let (own, stages) = (bytes[ranks.stage.number], ranks.stage.of);
    let bytes = ExchangeBytes::new((stages as u64 - 1) * own, bytes.iter().sum::<u64>() - own);
    let list = move || {
        let is_own = |(stage, _): &(usize, Out)| *stage == ranks.stage.number;
        let (kept, receives): (Vec<_>, Vec<_>) = places().into_iter().partition(is_own);
        let kept: Vec<In> = kept.into_iter().map(|(_, place)| place.into_in()).collect();
        let others = (0..stages).filter(|stage| *stage != ranks.stage.number);
        let to = |stage| {
            kept.iter()
                .map(move |piece| (ranks.in_stage(stage), *piece))
        };
        let receives = receives.into_iter();
        Exchange {
            sends: others.flat_map(to).collect(),
            receives: receives
                .map(|(stage, place)| (ranks.in_stage(stage), place))
                .collect(),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { kernels.start_exchange_of_all(bytes, Box::new(list)) }?;
    Ok(Traffic::of(Queue::Collective, bytes.sent))
}
