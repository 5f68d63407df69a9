//! Updates of whole matrices. If ranks hold pieces, a round updates one matrix per rank. Each rank owns one matrix: the
//! others send it their parts of the direction, it runs the iteration, and sends each rank its part of the result.

use crate::muon::Muon;
use crate::segment::{Segment, Whole};
use crate::sources::Sources;
use crate::update::UpdateQueue;
use kernels::{Exchange, ExchangeBytes, Result};
use memory::{DType, GRANULARITY_BYTES, Out, Rank};
use std::ops::Range;

/// Bytes of scratch for [`update`]: for the direction of this rank's matrix, and for a second part. That part holds
/// either what this rank sends of the other matrices, or the iteration's scratch, never both at once.
pub(crate) fn room(muon: &Muon, round: &[Segment], rank: Rank) -> [usize; 2] {
    let size = muon.ns_dtype.size_in_bytes();
    let pieces = round.iter().filter_map(|one| one.whole().piece(rank));
    let staged = pieces.map(|piece| size * piece.len()).max().unwrap_or(0);
    let [direction, scratch] = round.get(rank.number).map_or([0; 2], |own| {
        let tensor = &own.whole().tensor;
        [size * tensor.elements(), muon.scratch_bytes(tensor.shape)]
    });
    let direction = direction.next_multiple_of(GRANULARITY_BYTES as usize);
    [direction, scratch.max(staged)]
}

/// Enqueues the update of this rank's pieces of a round's matrices. `room` is the scratch (u8).
pub(crate) fn update(
    on: &UpdateQueue,
    muon: &Muon,
    round: &[Segment],
    sources: &mut Sources,
    room: Out,
) -> Result {
    let rank = sources.rank;
    let (mut whole, mut rest) = room.split_at(self::room(muon, round, rank)[0]);
    let matrices = round.iter().enumerate().map(|(owner, segment)| Owned {
        dtype: muon.ns_dtype,
        segment,
        whole: segment.whole(),
        owner,
        rank,
    });
    for matrix in matrices.clone() {
        if let Some((piece, out)) = matrix.own(whole.reborrow(), rest.reborrow()) {
            muon.direct(on, sources.update(matrix.segment, &piece), out)?;
        }
        matrix.exchange(on, true, (whole.reborrow(), rest.reborrow()))?;
    }
    if let Some(segment) = round.get(rank.number) {
        let tensor = &segment.whole().tensor;
        let bytes = 0..tensor.elements() * muon.ns_dtype.size_in_bytes();
        let mut direction = whole.reborrow().rows(bytes).cast(muon.ns_dtype);
        let rates = sources.numbers.rates(segment.group);
        let of_matrix = tensor.elements() / tensor.count;
        for number in 0..tensor.count {
            let matrix = number * of_matrix..(number + 1) * of_matrix;
            let direction = direction.reborrow().rows(matrix);
            muon.transform(on, tensor.shape, direction, rest.reborrow(), rates)?;
        }
    }
    for matrix in matrices {
        matrix.exchange(on, false, (whole.reborrow(), rest.reborrow()))?;
        if let Some((piece, direction)) = matrix.own(whole.reborrow(), rest.reborrow()) {
            let update = sources.update(matrix.segment, &piece);
            muon.apply(on, update, &matrix.whole.tensor, direction.into_in())?;
        }
    }
    Ok(())
}

/// A matrix of a round, and its owner: the rank that transforms its direction. The owner has the whole direction; other
/// ranks stage their pieces.
struct Owned<'a> {
    /// The type of directions.
    dtype: DType,
    segment: &'a Segment,
    whole: &'a Whole,
    owner: usize,
    rank: Rank,
}

impl Owned<'_> {
    /// Where a range lies in the whole direction, in bytes.
    fn place(&self, range: &Range<usize>) -> Range<usize> {
        let size = self.dtype.size_in_bytes();
        let first = self.segment.range.start;
        size * (range.start - first)..size * (range.end - first)
    }

    /// This rank's piece, if it has one, and the direction of that in the whole direction or in the staged bytes.
    fn own<'b>(&self, whole: Out<'b>, staged: Out<'b>) -> Option<(Range<usize>, Out<'b>)> {
        let piece = self.whole.piece(self.rank)?;
        let place = self.place(&piece);
        let bytes = match self.owner == self.rank.number {
            true => whole.rows(place),
            false => staged.rows(0..place.len()),
        };
        Some((piece, bytes.cast(self.dtype)))
    }

    /// Sends the staged pieces of the direction to the owner, or what has become of them from the owner to the other ranks.
    fn exchange(&self, on: &UpdateQueue, to_owner: bool, (whole, staged): (Out, Out)) -> Result {
        if self.rank.of == 1 {
            return Ok(());
        }
        let is_own = self.owner == self.rank.number;
        let piece = self.whole.piece(self.rank).filter(|_| !is_own);
        let staged_bytes = piece.map(|piece| 0..self.place(&piece).len());
        let pieces = self.whole.pieces.iter();
        let others = pieces.filter(|(rank, _)| is_own && *rank != self.owner);
        let (ranks, places): (Vec<_>, Vec<_>) = others
            .map(|(rank, range)| (*rank, self.place(range)))
            .unzip();
        let to = staged_bytes.as_ref().map_or(0, Range::len) as u64;
        let from = places.iter().map(Range::len).sum::<usize>() as u64;
        let (sent, received) = if to_owner { (to, from) } else { (from, to) };
        on.exchange(ExchangeBytes::new(sent, received), move || {
            let own = staged_bytes.map(|bytes| (self.owner, staged.rows(bytes)));
            let own = own.into_iter().collect();
            let others = ranks.into_iter().zip(whole.disjoint_rows(&places));
            let (sends, receives): (Vec<_>, Vec<_>) = match to_owner {
                true => (own, others.collect()),
                false => (others.collect(), own),
            };
            let sends = sends.into_iter().map(|(rank, out)| (rank, out.into_in()));
            Exchange {
                sends: sends.collect(),
                receives,
            }
        })
    }
}
