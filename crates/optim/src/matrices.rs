//! Updates of whole matrices. If ranks hold pieces, a round updates one matrix per rank. Each rank owns one matrix: the
//! others send it their parts of the direction, it runs the iteration, and sends each rank its part of the result.

use crate::rule::{ByMatrix, UpdateQueue};
use crate::segment::{Segment, Whole};
use crate::sources::Sources;
use kernels::{Exchange, ExchangeBytes, Result};
use memory::{DType, GRANULARITY_BYTES, In, Out, Rank};
use std::ops::Range;

/// Bytes of scratch for [`update`].
pub(crate) fn room_bytes(rule: &dyn ByMatrix, round: &[Segment], rank: Rank) -> usize {
    room(rule, round, rank).iter().sum()
}

/// Bytes for the direction of this rank's matrix, and for a second part. That part holds either what this rank sends of
/// the other matrices, or the iteration's scratch, never both at once.
fn room(rule: &dyn ByMatrix, round: &[Segment], rank: Rank) -> [usize; 2] {
    let size = rule.dtype().size_in_bytes();
    let pieces = round.iter().filter_map(|one| one.whole().piece(rank));
    let staged = pieces.map(|piece| size * piece.len()).max().unwrap_or(0);
    let [direction, scratch] = round.get(rank.number).map_or([0; 2], |own| {
        let tensor = &own.whole().tensor;
        [size * tensor.elements(), rule.scratch_bytes(tensor.shape)]
    });
    let direction = direction.next_multiple_of(GRANULARITY_BYTES as usize);
    [direction, scratch.max(staged)]
}

/// Views the first `elements` elements of some bytes.
fn first(bytes: Out<'_>, dtype: DType, elements: usize) -> Out<'_> {
    bytes.rows(0..elements * dtype.size_in_bytes()).cast(dtype)
}

/// Enqueues the update of this rank's pieces of a round's matrices. `room` is the scratch (u8).
pub(crate) fn update(
    on: &UpdateQueue,
    rule: &dyn ByMatrix,
    round: &[Segment],
    sources: &mut Sources,
    room: Out,
) -> Result {
    let rank = sources.rank;
    let (mut whole, mut rest) = room.split_at(self::room(rule, round, rank)[0]);
    let matrices = round.iter().enumerate().map(|(owner, segment)| Owned {
        rule,
        segment,
        whole: segment.whole(),
        owner,
        rank,
    });
    for matrix in matrices.clone() {
        matrix.direct(on, sources, (whole.reborrow(), rest.reborrow()))?;
        matrix.gather(on, whole.reborrow(), rest.as_in())?;
    }
    if let Some(segment) = round.get(rank.number) {
        let tensor = &segment.whole().tensor;
        let mut direction = first(whole.reborrow(), rule.dtype(), tensor.elements());
        let rates = sources.numbers.rates(segment.group);
        let of_matrix = tensor.elements() / tensor.count;
        for number in 0..tensor.count {
            let matrix = number * of_matrix..(number + 1) * of_matrix;
            let direction = direction.reborrow().rows(matrix);
            rule.transform(on, tensor.shape, direction, rest.reborrow(), rates)?;
        }
    }
    for matrix in matrices {
        matrix.scatter(on, whole.as_in(), rest.reborrow())?;
        matrix.apply(on, sources, (whole.as_in(), rest.as_in()))?;
    }
    Ok(())
}

/// A matrix of a round, and its owner: the rank that transforms its direction. The owner has the whole direction; other
/// ranks stage their pieces.
#[derive(Clone, Copy)]
struct Owned<'a> {
    rule: &'a dyn ByMatrix,
    segment: &'a Segment,
    whole: &'a Whole,
    owner: usize,
    rank: Rank,
}

impl Owned<'_> {
    fn is_own(&self) -> bool {
        self.owner == self.rank.number
    }

    /// Where a range lies in the whole direction, in bytes.
    fn place(&self, range: &Range<usize>) -> Range<usize> {
        let size = self.rule.dtype().size_in_bytes();
        let first = self.segment.range.start;
        size * (range.start - first)..size * (range.end - first)
    }

    /// Where this rank's piece lies, in bytes: in the whole direction, or in the staged bytes.
    fn own_place(&self, piece: &Range<usize>) -> Range<usize> {
        match self.is_own() {
            true => self.place(piece),
            false => 0..self.place(piece).len(),
        }
    }

    /// Computes the direction of this rank's piece.
    fn direct(
        &self,
        on: &UpdateQueue,
        sources: &mut Sources,
        (whole, staged): (Out, Out),
    ) -> Result {
        let Some(piece) = self.whole.piece(self.rank) else {
            return Ok(());
        };
        let bytes = if self.is_own() { whole } else { staged };
        let out = bytes.rows(self.own_place(&piece)).cast(self.rule.dtype());
        let mut update = sources.update(self.segment, &piece);
        self.rule.direct(on, &mut update, out)
    }

    /// Updates this rank's piece along its transformed direction.
    fn apply(&self, on: &UpdateQueue, sources: &mut Sources, (whole, staged): (In, In)) -> Result {
        let Some(piece) = self.whole.piece(self.rank) else {
            return Ok(());
        };
        let bytes = if self.is_own() { whole } else { staged };
        let direction = bytes.rows(self.own_place(&piece)).cast(self.rule.dtype());
        let update = sources.update(self.segment, &piece);
        self.rule.apply(on, update, &self.whole.tensor, direction)
    }

    /// Sends the staged pieces of the direction to the owner.
    fn gather(&self, on: &UpdateQueue, whole: Out, staged: In) -> Result {
        let [sent, received] = self.bytes();
        self.exchange(on, ExchangeBytes::new(sent, received), || {
            let (ranks, places) = self.others();
            let sends = self.staged().map(|bytes| (self.owner, staged.rows(bytes)));
            Exchange {
                sends: sends.into_iter().collect(),
                receives: ranks
                    .into_iter()
                    .zip(whole.disjoint_rows(&places))
                    .collect(),
            }
        })
    }

    /// Sends the other ranks' pieces of the transformed direction from the owner.
    fn scatter(&self, on: &UpdateQueue, whole: In, staged: Out) -> Result {
        let [received, sent] = self.bytes();
        self.exchange(on, ExchangeBytes::new(sent, received), || {
            let (ranks, places) = self.others();
            let pieces = places.into_iter().map(|bytes| whole.rows(bytes));
            let receives = self.staged().map(|bytes| (self.owner, staged.rows(bytes)));
            Exchange {
                sends: ranks.into_iter().zip(pieces).collect(),
                receives: receives.into_iter().collect(),
            }
        })
    }

    /// Starts an exchange, if there is any other rank in it.
    fn exchange<'b>(
        &self,
        on: &UpdateQueue,
        bytes: ExchangeBytes,
        list: impl FnOnce() -> Exchange<'b> + 'b,
    ) -> Result {
        match self.rank.of {
            1 => Ok(()),
            _ => on.exchange(bytes, list),
        }
    }

    /// Where this rank's piece is staged, in bytes; none if this rank is the owner.
    fn staged(&self) -> Option<Range<usize>> {
        let piece = self.whole.piece(self.rank).filter(|_| !self.is_own())?;
        Some(self.own_place(&piece))
    }

    /// The other ranks, and where their pieces lie in the whole direction, in bytes. Empty if this rank is not the
    /// owner.
    fn others(&self) -> (Vec<usize>, Vec<Range<usize>>) {
        let pieces = self.whole.pieces.iter();
        let others = pieces.filter(|(rank, _)| self.is_own() && *rank != self.owner);
        others
            .map(|(rank, range)| (*rank, self.place(range)))
            .unzip()
    }

    /// Bytes of the direction that this rank sends to the owner, and that it receives as the owner.
    fn bytes(&self) -> [u64; 2] {
        let staged = self.staged().map_or(0, |bytes| bytes.len());
        let others: usize = self.others().1.iter().map(Range::len).sum();
        [staged, others].map(|bytes| bytes as u64)
    }
}
