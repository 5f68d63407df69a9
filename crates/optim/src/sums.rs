//! Updates of tensors by sums over each whole tensor. Ranks that have pieces of a tensor exchange only their sums.

use crate::rule::{BySums, Summed, Sums, UpdateQueue, WholeTensor};
use crate::segment::{Piece, Segment, Whole};
use crate::sources::Sources;
use crate::tensor_states::TensorStates;
use kernels::quantise::BLOCK;
use kernels::{ExchangeBytes, Result};
use memory::{DType, Out, Rank, one_behind_another};
use std::ops::Range;
use units::{places_by_owner, to_all};

impl Sums {
    /// The shape of all sums of a tensor that is divided into `pieces`.
    fn shape(&self, tensor: &WholeTensor, pieces: usize) -> [usize; 2] {
        match *self {
            Sums::Exact(count) => [pieces, count],
            Sums::OfBlocks(count) => [count, tensor.elements().div_ceil(BLOCK)],
        }
    }

    /// The sums that each piece has.
    fn parts(&self, segment: &Segment, whole: &Whole) -> Vec<Piece> {
        let all = &whole.pieces;
        let [rows, columns] = self.shape(&whole.tensor, all.len());
        let of_row = |row: usize| {
            all.iter().enumerate().map(move |(number, (rank, range))| {
                let of_blocks = (range.start - segment.range.start) / BLOCK
                    ..(range.end - segment.range.start).div_ceil(BLOCK);
                let own = match self {
                    Sums::Exact(_) if number == row => 0..columns,
                    Sums::Exact(_) => 0..0,
                    Sums::OfBlocks(_) => of_blocks,
                };
                (*rank, row * columns + own.start..row * columns + own.end)
            })
        };
        let parts = (0..rows).flat_map(of_row);
        parts.filter(|(_, part)| !part.is_empty()).collect()
    }
}

/// Where the sums of each sweep are in the scratch of an update, in bytes. The rule's own scratch comes last.
fn places(rule: &dyn BySums, whole: &Whole) -> Vec<Range<usize>> {
    let tensor = &whole.tensor;
    let sweeps = rule.sweeps(tensor).into_iter();
    let sizes = sweeps.map(|sums| {
        let [rows, columns] = sums.shape(tensor, whole.pieces.len());
        DType::F64.size_in_bytes() * rows * columns
    });
    one_behind_another(sizes.chain([rule.scratch_bytes(tensor)]))
}

/// Bytes of scratch for [`update`].
pub(crate) fn room_bytes(rule: &dyn BySums, whole: &Whole) -> usize {
    let last = places(rule, whole).pop();
    last.map_or(0, |last| last.end)
}

/// Enqueues the update of this rank's piece of a tensor. `room` is the scratch (u8).
pub(crate) fn update(
    on: &UpdateQueue,
    (rule, segment): (&dyn BySums, &Segment),
    sources: &mut Sources,
    tensor_states: &mut TensorStates,
    room: Out,
) -> Result {
    let (whole, rank) = (segment.whole(), sources.rank);
    let tensor = &whole.tensor;
    let mut room = room.disjoint_rows(&places(rule, whole));
    let scratch = room.pop().expect("the scratch is the last");
    let mut summed = Summed {
        tensor,
        states: tensor_states.views(tensor.entry),
        scratch,
        norm_grains: sources.gradients.grains().rows(whole.grains.clone()),
        rates: sources.numbers.rates(segment.group),
        clip: sources.clip,
    };
    let own = whole.piece(rank);
    // If one rank has all of the tensor and no rank keeps row or column states of it, that rank updates it alone.
    let is_shared = whole.pieces.len() > 1 || !summed.states.is_empty();
    if own.is_none() && !is_shared {
        return Ok(());
    }
    let first = |range: &Range<usize>| range.start - segment.range.start;
    rule.begin(on, &mut summed)?;
    for (sweep, (sums, room)) in rule.sweeps(tensor).iter().zip(room).enumerate() {
        let mut all = room.cast(DType::F64);
        let parts = sums.parts(segment, whole);
        if let Some(range) = &own {
            let own = parts.iter().filter(|(of, _)| *of == rank.number);
            let own: Vec<Range<usize>> = own.map(|(_, part)| part.clone()).collect();
            let update = sources.update(segment, range);
            let out = all.reborrow().disjoint_rows(&own);
            rule.sum(on, sweep, &mut summed, (first(range), update), out)?;
        }
        if is_shared && rank.of > 1 {
            gather(on, all.reborrow(), parts, rank)?;
        }
        let shape = sums.shape(tensor, whole.pieces.len());
        rule.end_sweep(on, sweep, &mut summed, all.as_in().reshape(shape))?;
    }
    let Some(range) = own else { return Ok(()) };
    let update = sources.update(segment, &range);
    rule.apply(on, &mut summed, (first(&range), update))
}

/// Gives all ranks the sums of each. `rows` are the rows of sums of each rank.
fn gather(on: &UpdateQueue, sums: Out, rows: Vec<Piece>, rank: Rank) -> Result {
    let size = sums.dtype().size_in_bytes();
    let of_own = rows.iter().filter(|(owner, _)| *owner == rank.number);
    let own: usize = of_own.map(|(_, rows)| rows.len()).sum();
    let all: usize = rows.iter().map(|(_, rows)| rows.len()).sum();
    let bytes = ExchangeBytes::new(
        ((rank.of - 1) * own * size) as u64,
        ((all - own) * size) as u64,
    );
    on.exchange(bytes, || {
        let pieces = rows.into_iter().map(|(owner, rows)| (rows, owner));
        let places = places_by_owner(pieces.collect(), |rows| sums.disjoint_rows(rows));
        to_all(rank.number, (0..rank.of).collect(), None, places)
    })
}
