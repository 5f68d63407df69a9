//! Adafactor's updates, by sums over each whole tensor. Ranks that have pieces of a tensor exchange only their sums.

use crate::adafactor::{AdafactorGroup, shape};
use crate::segment::{Piece, Segment, Whole};
use crate::sources::Sources;
use crate::update::UpdateQueue;
use kernels::quantise::BLOCK;
use kernels::{
    AdafactorRate, AdafactorStep, ExchangeBytes, FactorVariance, MomentOperand, Result,
    UpdateSquares, VarianceOperand, VarianceScale, VarianceSums, WeightSquares,
};
use memory::{DType, In, Out, Rank, one_behind_another};
use std::ops::Range;
use units::{places_by_owner, to_all};

/// Where the parts of an update's scratch are, in bytes: of factored variances the squares by rows and columns of each
/// piece (f64, exact in any order); the squares of updates and of weights by blocks (f64); a scale of gradients (f64), the
/// step (f32), and a factor for each row (f32).
fn places(group: &AdafactorGroup, whole: &Whole) -> Vec<Range<usize>> {
    let shape = shape(&whole.tensor);
    let (sums, rows) = match group.is_factored {
        true => (whole.pieces.len() * shape.sums(), shape.all_rows()),
        false => (0, 0),
    };
    let blocks = whole.tensor.elements().div_ceil(BLOCK);
    one_behind_another([8 * sums, 8 * 2 * blocks, 8, 4, 4 * rows])
}

/// Bytes of scratch for [`update`].
pub(crate) fn room_bytes(group: &AdafactorGroup, whole: &Whole) -> usize {
    places(group, whole)[4].end
}

/// Enqueues the update of this rank's piece of a tensor. `room` is the scratch (u8).
pub(crate) fn update(
    on: &UpdateQueue,
    (group, segment): (&AdafactorGroup, &Segment),
    sources: &mut Sources,
    room: Out,
) -> Result {
    let whole = segment.whole();
    let own = whole.piece(sources.rank);
    // If one rank has all of the tensor and no rank keeps row or column states of it, that rank updates it alone.
    let is_shared = whole.pieces.len() > 1 || group.is_factored;
    if own.is_none() && !is_shared {
        return Ok(());
    }
    let parts = room.disjoint_rows(&places(group, whole));
    let Ok([sums, squares, scale, rate, factors]) = <[Out; 5]>::try_from(parts) else {
        unreachable!("there are five places")
    };
    let (mut rate, mut factors) = (rate.cast(DType::F32), factors.cast(DType::F32));
    let update = TensorUpdate {
        on,
        group,
        segment,
        whole,
        own,
        is_shared,
    };
    if group.is_factored {
        let sums = (sums.cast(DType::F64), scale.cast(DType::F64));
        update.factor_variance(sources, sums, factors.reborrow())?;
    }
    let squares = squares.cast(DType::F64);
    update.find_rate(sources, squares, factors.as_in(), rate.reborrow())?;
    update.apply(sources, factors.into_in(), rate.into_in())
}

/// The update of a tensor by a rank, which may have a range of it.
struct TensorUpdate<'a, 'b> {
    on: &'a UpdateQueue<'b>,
    group: &'a AdafactorGroup,
    segment: &'a Segment,
    whole: &'a Whole,
    own: Option<Range<usize>>,
    /// Whether other ranks make it too.
    is_shared: bool,
}

impl TensorUpdate<'_, '_> {
    /// Moves the variances of rows and columns, and computes the rows' factors on updates.
    fn factor_variance(
        &self,
        sources: &mut Sources,
        (mut sums, mut scale): (Out, Out),
        factors: Out,
    ) -> Result {
        let shape = shape(&self.whole.tensor);
        self.on.run(VarianceScale {
            out: scale.reborrow(),
            grains: sources.gradients.grains().rows(self.whole.grains.clone()),
            clip: sources.clip,
        })?;
        let pieces = self.whole.pieces.iter().enumerate();
        let rows = pieces.map(|(row, (rank, _))| {
            let start = row * shape.sums();
            (*rank, start..start + shape.sums())
        });
        let rows: Vec<Piece> = rows.collect();
        if let Some(range) = &self.own {
            let mut sums = own_parts(sums.reborrow(), &rows, sources.rank);
            let update = sources.update(self.segment, range);
            self.on.run(VarianceSums {
                sums: sums.pop().expect("a piece has one row of sums"),
                gradients: update.gradients,
                clip: update.clip,
                scale: scale.as_in(),
                first: self.first(range),
                shape,
            })?;
        }
        gather(self.on, sums.reborrow(), rows, sources.rank)?;
        let mut states = sources.tensor_states.views(self.whole.tensor.entry);
        let [rows, columns] = &mut states[..] else {
            unreachable!("a matrix has two states")
        };
        self.on.run(FactorVariance {
            rows: rows.reborrow(),
            columns: columns.reborrow(),
            factors,
            sums: sums
                .into_in()
                .reshape([self.whole.pieces.len(), shape.sums()]),
            scale: scale.into_in(),
            rates: sources.numbers.rates(self.segment.group),
            clip: sources.clip,
            eps: self.eps(),
            shape,
        })
    }

    /// Computes the step of the tensor from the squares of its updates and of its weights.
    fn find_rate(&self, sources: &mut Sources, mut squares: Out, factors: In, rate: Out) -> Result {
        let elements = self.whole.tensor.elements();
        let blocks = elements.div_ceil(BLOCK);
        let of_pieces = |row: usize| {
            let pieces = self.whole.pieces.iter();
            pieces.map(move |(rank, range)| {
                let end = self.first(range) + range.len();
                let own = self.first(range) / BLOCK..end.div_ceil(BLOCK);
                (*rank, row * blocks + own.start..row * blocks + own.end)
            })
        };
        let parts: Vec<Piece> = (0..2).flat_map(of_pieces).collect();
        if let Some(range) = &self.own {
            let own = own_parts(squares.reborrow(), &parts, sources.rank);
            let Ok([of_updates, of_weights]) = <[Out; 2]>::try_from(own) else {
                unreachable!("there are two sums of each block")
            };
            let update = sources.update(self.segment, range);
            self.on.run(UpdateSquares {
                squares: of_updates,
                gradients: update.gradients,
                variance: self.variance(range, factors, (&update.tensor_states, update.moments)),
                rates: update.rates,
                clip: update.clip,
                eps: self.eps(),
            })?;
            self.on.run(WeightSquares {
                squares: of_weights,
                parameters: update.weights,
                master: update.master,
            })?;
        }
        if self.is_shared {
            gather(self.on, squares.reborrow(), parts, sources.rank)?;
        }
        self.on.run(AdafactorRate {
            out: rate,
            squares: squares.into_in().reshape([2, blocks]),
            rates: sources.numbers.rates(self.segment.group),
            elements,
            least_rms: self.group.numbers.least_rms as f32,
            threshold: self.group.numbers.clip_threshold as f32,
        })
    }

    /// Updates this rank's range. If the clipping factor is not finite, it stays as it is.
    fn apply(&self, sources: &mut Sources, factors: In, rate: In) -> Result {
        let Some(range) = &self.own else {
            return Ok(());
        };
        let update = sources.update(self.segment, range);
        self.on.run(AdafactorStep {
            variance: self.variance(range, factors, (&update.tensor_states, update.moments)),
            parameters: update.weights,
            master: update.master,
            gradients: update.gradients,
            rate,
            rates: update.rates,
            clip: update.clip,
            key: update.key,
            first_index: update.first_index,
            eps: self.eps(),
            weight_decay: update.weight_decay,
        })
    }

    /// The variance of a range.
    fn variance<'c>(
        &self,
        range: &Range<usize>,
        factors: In<'c>,
        (states, mut moments): (&'c [Out], Vec<MomentOperand<'c>>),
    ) -> VarianceOperand<'c> {
        match (states, moments.pop()) {
            ([_, columns], _) => VarianceOperand::Factors {
                factors,
                columns: columns.as_in(),
                first: self.first(range),
                shape: shape(&self.whole.tensor),
            },
            (_, Some(MomentOperand::Plain(variance))) => VarianceOperand::Elements(variance),
            _ => unreachable!("settings refuse states that are not f32"),
        }
    }

    /// The index in the tensor of a range's first element.
    fn first(&self, range: &Range<usize>) -> usize {
        range.start - self.segment.range.start
    }

    fn eps(&self) -> f32 {
        self.group.numbers.eps as f32
    }
}

/// The parts of all sums that are this rank's.
fn own_parts<'a>(sums: Out<'a>, parts: &[Piece], rank: Rank) -> Vec<Out<'a>> {
    let own = parts.iter().filter(|(owner, _)| *owner == rank.number);
    let own: Vec<Range<usize>> = own.map(|(_, part)| part.clone()).collect();
    sums.disjoint_rows(&own)
}

/// Gives all ranks the sums of each. `parts` are those of each rank.
fn gather(on: &UpdateQueue, sums: Out, parts: Vec<Piece>, rank: Rank) -> Result {
    if rank.of == 1 {
        return Ok(());
    }
    let size = sums.dtype().size_in_bytes();
    let of_own = parts.iter().filter(|(owner, _)| *owner == rank.number);
    let own: usize = of_own.map(|(_, part)| part.len()).sum();
    let all: usize = parts.iter().map(|(_, part)| part.len()).sum();
    let bytes = ExchangeBytes::new(
        ((rank.of - 1) * own * size) as u64,
        ((all - own) * size) as u64,
    );
    on.exchange(bytes, || {
        let pieces = parts.into_iter().map(|(owner, part)| (part, owner));
        let places = places_by_owner(pieces.collect(), |parts| sums.disjoint_rows(parts));
        to_all(rank.number, (0..rank.of).collect(), None, places)
    })
}
