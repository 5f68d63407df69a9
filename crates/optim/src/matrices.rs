//! Updates of whole matrices. Where ranks hold pieces, matrices are updated in rounds of one matrix a rank. Each rank owns one: the
//! others send it their parts of the direction, it runs the iteration, and sends each its part of the result.

use crate::rule::{Asking, ByMatrix};
use crate::segment::{Segment, Whole};
use crate::sources::Sources;
use kernels::{Exchange, ExchangeBytes, KernelError};
use memory::{DType, GRANULARITY_BYTES, In, Out, Rank};
use std::ops::Range;

/// Bytes of room for [`update`].
pub(crate) fn room_bytes(rule: &dyn ByMatrix, round: &[Segment], rank: Rank) -> usize {
    room(rule, round, rank).iter().sum()
}

/// Bytes for the direction of this rank's matrix, and for what there is besides: what it sends of the others', or the scratch
/// of the iteration, which are never there at once.
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

/// The first elements of some bytes.
fn first(bytes: Out<'_>, dtype: DType, elements: usize) -> Out<'_> {
    bytes.rows(0..elements * dtype.size_in_bytes()).cast(dtype)
}

/// Asks for the update of this rank's pieces of the matrices of a round, in `room` (u8).
pub(crate) fn update(
    on: &Asking,
    rule: &dyn ByMatrix,
    round: &[Segment],
    sources: &mut Sources,
    room: Out,
) -> Result<(), KernelError> {
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
        let direction = first(whole.reborrow(), rule.dtype(), tensor.elements());
        let rates = sources.numbers.rates(segment.group);
        rule.transform(on, tensor.shape, direction, rest.reborrow(), rates)?;
    }
    for matrix in matrices {
        matrix.scatter(on, whole.as_in(), rest.reborrow())?;
        matrix.apply(on, sources, (whole.as_in(), rest.as_in()))?;
    }
    Ok(())
}

/// A matrix of a round, and the rank that makes what its weights move along. There its direction is whole; other ranks stage
/// their pieces.
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

    /// Where a range is in the whole direction, in bytes.
    fn place(&self, range: &Range<usize>) -> Range<usize> {
        let size = self.rule.dtype().size_in_bytes();
        let first = self.segment.range.start;
        size * (range.start - first)..size * (range.end - first)
    }

    /// Where this rank's piece is, in the whole direction or among what is staged.
    fn own_place(&self, piece: &Range<usize>) -> Range<usize> {
        match self.is_own() {
            true => self.place(piece),
            false => 0..self.place(piece).len(),
        }
    }

    /// Makes the direction of this rank's piece.
    fn direct(
        &self,
        on: &Asking,
        sources: &mut Sources,
        (whole, staged): (Out, Out),
    ) -> Result<(), KernelError> {
        let Some(piece) = self.whole.piece(self.rank) else {
            return Ok(());
        };
        let bytes = if self.is_own() { whole } else { staged };
        let out = bytes.rows(self.own_place(&piece)).cast(self.rule.dtype());
        let mut update = sources.update(self.segment, &piece);
        self.rule.direct(on, &mut update, out)
    }

    /// Updates this rank's piece along what has become of its direction.
    fn apply(
        &self,
        on: &Asking,
        sources: &mut Sources,
        (whole, staged): (In, In),
    ) -> Result<(), KernelError> {
        let Some(piece) = self.whole.piece(self.rank) else {
            return Ok(());
        };
        let bytes = if self.is_own() { whole } else { staged };
        let direction = bytes.rows(self.own_place(&piece)).cast(self.rule.dtype());
        let update = sources.update(self.segment, &piece);
        self.rule.apply(on, update, &self.whole.tensor, direction)
    }

    /// The owner gets what the others staged of the direction.
    fn gather(&self, on: &Asking, whole: Out, staged: In) -> Result<(), KernelError> {
        let [sent, received] = self.bytes();
        self.exchange(on, ExchangeBytes { sent, received }, || {
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

    /// The others get from the owner what their pieces move along.
    fn scatter(&self, on: &Asking, whole: In, staged: Out) -> Result<(), KernelError> {
        let [received, sent] = self.bytes();
        self.exchange(on, ExchangeBytes { sent, received }, || {
            let (ranks, places) = self.others();
            let pieces = places.into_iter().map(|bytes| whole.rows(bytes));
            let receives = self.staged().map(|bytes| (self.owner, staged.rows(bytes)));
            Exchange {
                sends: ranks.into_iter().zip(pieces).collect(),
                receives: receives.into_iter().collect(),
            }
        })
    }

    /// Asks for an exchange, where there is anybody to exchange with.
    fn exchange<'b>(
        &self,
        on: &Asking,
        bytes: ExchangeBytes,
        list: impl FnOnce() -> Exchange<'b> + 'b,
    ) -> Result<(), KernelError> {
        match self.rank.of {
            1 => Ok(()),
            _ => on.exchange(bytes, list),
        }
    }

    /// Where this rank's piece is staged, in bytes; none where it is the owner.
    fn staged(&self) -> Option<Range<usize>> {
        let piece = self.whole.piece(self.rank).filter(|_| !self.is_own())?;
        Some(self.own_place(&piece))
    }

    /// The other ranks, and where their pieces are in the whole direction, in bytes; none where another rank is the owner.
    fn others(&self) -> (Vec<usize>, Vec<Range<usize>>) {
        let pieces = self.whole.pieces.iter();
        let others = pieces.filter(|(rank, _)| self.is_own() && *rank != self.owner);
        others
            .map(|(rank, range)| (*rank, self.place(range)))
            .unzip()
    }

    /// Bytes of the direction that this rank sends to the owner, and that it gets as the owner.
    fn bytes(&self) -> [u64; 2] {
        let staged = self.staged().map_or(0, |bytes| bytes.len());
        let others: usize = self.others().1.iter().map(Range::len).sum();
        [staged, others].map(|bytes| bytes as u64)
    }
}
