//! Updates of tensors by sums over all of each: of its one range, or of those that ranks have, which exchange sums alone.

use crate::form::Form;
use crate::matrices::{DeviceSources, exchange, pieces};
use crate::numbers::{Numbers, Operands};
use crate::rule::{Asking, BySums, Rule, Summed, Sums, WholeTensor};
use crate::segment::{Segment, tensors_of};
use crate::tensor_states::TensorStates;
use kernels::quantise::BLOCK;
use kernels::{Exchange, ExchangeBytes, KernelError};
use memory::{DType, In, Layout, Out, Rank, one_behind_another};
use std::ops::Range;
use std::rc::Rc;

/// A range of a tensor, and the rank that updates it.
type Piece = (usize, Range<usize>);

/// What the update of a tensor by its sums reads and writes, beside its ranges.
pub(crate) struct SummedSources<'a> {
    pub(crate) form: &'a Form,
    pub(crate) numbers: &'a Numbers,
    pub(crate) layout: &'a Layout,
    pub(crate) states: &'a mut TensorStates,
    /// f64: all grains of the norm.
    pub(crate) norm_grains: In<'a>,
    /// `[2]` f32: the norm and the factor on gradients.
    pub(crate) clip: In<'a>,
}

/// The ranges of a tensor.
trait Ranges {
    /// All of them, in order.
    fn all(&self) -> &[Piece];

    /// This rank.
    fn rank(&self) -> usize;

    /// What this rank's range reads and writes.
    fn operands(&mut self, range: &Range<usize>) -> Operands<'_>;

    /// All ranks get what each has of some sums: rows of them, each with its rank.
    fn gather(&self, sums: Out, rows: Vec<Piece>) -> Result<(), KernelError>;

    /// This rank's range, if it has one: its piece of a bundle has at most one of a tensor.
    fn own(&self) -> Option<Range<usize>> {
        let mut own = self.all().iter().filter(|(rank, _)| *rank == self.rank());
        let first = own.next().map(|(_, range)| range.clone());
        assert!(own.next().is_none(), "a rank has one range of a tensor");
        first
    }
}

/// The rule of a tensor.
fn rule<'a>(form: &'a Form, segment: &'a Segment) -> (&'a dyn BySums, &'a WholeTensor) {
    match (&form.groups()[segment.group].rule, &segment.whole) {
        (Rule::Sums(rule), Some(tensor)) => (&**rule, tensor),
        _ => unreachable!("these tensors have rules that update them by sums"),
    }
}

impl Sums {
    /// The shape of all sums of a tensor in so many ranges.
    fn shape(&self, tensor: &WholeTensor, ranges: usize) -> [usize; 2] {
        match *self {
            Sums::Exact(count) => [ranges, count],
            Sums::OfBlocks(count) => [count, tensor.elements().div_ceil(BLOCK)],
        }
    }

    /// Which of all sums are each range's.
    fn parts(&self, segment: &Segment, tensor: &WholeTensor, all: &[Piece]) -> Vec<Piece> {
        let [rows, columns] = self.shape(tensor, all.len());
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

/// Where the sums of each round are in the room for an update, in bytes, and behind them the rule's scratch.
fn places(rule: &dyn BySums, tensor: &WholeTensor, ranges: usize) -> Vec<Range<usize>> {
    let rounds = rule.rounds(tensor).into_iter();
    let sizes = rounds.map(|sums| {
        let [rows, columns] = sums.shape(tensor, ranges);
        DType::F64.size_in_bytes() * rows * columns
    });
    one_behind_another(sizes.chain([rule.scratch_bytes(tensor)]))
}

/// Bytes of room for the update of a tensor in so many ranges.
pub(crate) fn room_bytes(form: &Form, segment: &Segment, ranges: usize) -> usize {
    let (rule, tensor) = rule(form, segment);
    let last = places(rule, tensor, ranges).pop();
    last.map_or(0, |last| last.end)
}

/// Asks for the update of a tensor, in `room` (u8).
fn update(
    on: &Asking,
    sources: &mut SummedSources,
    segment: &Segment,
    ranges: &mut dyn Ranges,
    room: Out,
) -> Result<(), KernelError> {
    let (rule, tensor) = rule(sources.form, segment);
    let numbers = sources.numbers;
    let mut room = room.disjoint_rows(&places(rule, tensor, ranges.all().len()));
    let scratch = room.pop().expect("the scratch is the last");
    let mut summed = Summed {
        tensor,
        states: sources.states.views(tensor.entry),
        scratch,
        norm_grains: sources.norm_grains.rows(segment.grains.clone()),
        rates: numbers.rates(segment.group),
        clip: sources.clip,
    };
    let own = ranges.own();
    // Nobody else needs what the only rank that has the tensor finds out, unless all keep states of it.
    let is_shared = ranges.all().len() > 1 || !summed.states.is_empty();
    if own.is_none() && !is_shared {
        return Ok(());
    }
    let first = |range: &Range<usize>| range.start - segment.range.start;
    rule.begin(on, &mut summed)?;
    for (round, (sums, room)) in rule.rounds(tensor).iter().zip(room).enumerate() {
        let mut all = room.cast(DType::F64);
        let parts = sums.parts(segment, tensor, ranges.all());
        if let Some(range) = &own {
            let rank = ranges.rank();
            let own = parts.iter().filter(|(of, _)| *of == rank);
            let own: Vec<Range<usize>> = own.map(|(_, part)| part.clone()).collect();
            let part = segment.part(range, sources.layout);
            let update = numbers.update(&part, ranges.operands(range));
            let out = all.reborrow().disjoint_rows(&own);
            rule.sum(on, round, &mut summed, (first(range), update), out)?;
        }
        if is_shared {
            ranges.gather(all.reborrow(), parts)?;
        }
        let shape = sums.shape(tensor, ranges.all().len());
        rule.end_round(on, round, &mut summed, all.as_in().reshape(shape))?;
    }
    let Some(range) = own else { return Ok(()) };
    let part = segment.part(&range, sources.layout);
    let update = numbers.update(&part, ranges.operands(&range));
    rule.apply(on, &mut summed, (first(&range), update))
}

/// A tensor that is here as a whole.
struct Here<'a> {
    all: [Piece; 1],
    operands: Operands<'a>,
}

impl Ranges for Here<'_> {
    fn all(&self) -> &[Piece] {
        &self.all
    }

    fn rank(&self) -> usize {
        0
    }

    fn operands(&mut self, _: &Range<usize>) -> Operands<'_> {
        self.operands.reborrow()
    }

    fn gather(&self, _: Out, _: Vec<Piece>) -> Result<(), KernelError> {
        Ok(())
    }
}

/// Asks for the update of a tensor that is here as a whole, in `room` (u8).
pub(crate) fn update_here(
    on: &Asking,
    mut sources: SummedSources,
    segment: &Segment,
    operands: Operands,
    room: Out,
) -> Result<(), KernelError> {
    let mut here = Here {
        all: [(0, segment.own())],
        operands,
    };
    update(on, &mut sources, segment, &mut here, room)
}

/// Tensors of which ranks have ranges, each of which is updated where it is.
pub(crate) struct Divided {
    rank: Rank,
    /// With the ranges of all ranks.
    tensors: Vec<(Segment, Vec<Piece>)>,
    room_bytes: usize,
}

impl Divided {
    /// The tensors of all groups that are updated by sums, of a rank's layout.
    pub(crate) fn new(layout: &Rc<Layout>, form: &Form, rank: Rank) -> Divided {
        let groups = form.groups().iter().enumerate();
        let by_sums = groups.filter(|(_, group)| matches!(group.rule, Rule::Sums(_)));
        let segments = by_sums
            .flat_map(|(number, group)| tensors_of(layout, group, &layout.trained(), number));
        let with_ranges = |segment: Segment| {
            let of = |rank| pieces(layout, &segment, rank).into_iter();
            let all =
                Rank::all(rank.of).flat_map(|rank| of(rank).map(move |range| (rank.number, range)));
            let all: Vec<Piece> = all.collect();
            (segment, all)
        };
        let tensors: Vec<(Segment, Vec<Piece>)> = segments.map(with_ranges).collect();
        let needed = tensors.iter();
        let needed = needed.map(|(segment, all)| room_bytes(form, segment, all.len()));
        Divided {
            rank,
            room_bytes: needed.max().unwrap_or(0),
            tensors,
        }
    }

    /// Bytes of room for [`Divided::update`].
    pub(crate) fn room_bytes(&self) -> usize {
        self.room_bytes
    }

    /// Updates this rank's ranges of all tensors, in `room` (u8).
    pub(crate) fn update(
        &self,
        sources: &mut DeviceSources,
        states: &mut TensorStates,
        mut room: Out,
    ) -> Result<(), KernelError> {
        let kernels = sources.kernels;
        for (segment, all) in &self.tensors {
            let mut summed = SummedSources {
                form: sources.form,
                numbers: sources.numbers,
                layout: sources.gradients.layout(),
                states,
                norm_grains: sources.gradients.grains(),
                clip: sources.numbers.clip.view(),
            };
            let mut ranges = OnRanks {
                all,
                rank: self.rank,
                sources,
            };
            let on = Asking::in_computation(kernels);
            update(&on, &mut summed, segment, &mut ranges, room.reborrow())?;
        }
        Ok(())
    }
}

/// A tensor of which ranks have ranges.
struct OnRanks<'a, 'b> {
    all: &'a [Piece],
    rank: Rank,
    sources: &'a mut DeviceSources<'b>,
}

impl Ranges for OnRanks<'_, '_> {
    fn all(&self) -> &[Piece] {
        self.all
    }

    fn rank(&self) -> usize {
        self.rank.number
    }

    fn operands(&mut self, range: &Range<usize>) -> Operands<'_> {
        self.sources.operands(range)
    }

    fn gather(&self, sums: Out, rows: Vec<Piece>) -> Result<(), KernelError> {
        let size = sums.dtype().size_in_bytes();
        let of_own = rows.iter().filter(|(rank, _)| *rank == self.rank.number);
        let own: usize = of_own.map(|(_, rows)| rows.len()).sum();
        let all: usize = rows.iter().map(|(_, rows)| rows.len()).sum();
        let bytes = ExchangeBytes {
            sent: ((self.rank.of - 1) * own * size) as u64,
            received: ((all - own) * size) as u64,
        };
        exchange(self.sources.kernels, bytes, || {
            to_all(sums, rows, self.rank)
        })
    }
}

/// Every rank's rows to all other ranks.
fn to_all(sums: Out<'_>, mut rows: Vec<Piece>, rank: Rank) -> Exchange<'_> {
    rows.sort_by_key(|(_, rows)| rows.start);
    let (owners, rows): (Vec<usize>, Vec<Range<usize>>) = rows.into_iter().unzip();
    let mut list = Exchange {
        sends: Vec::new(),
        receives: Vec::new(),
    };
    for (owner, part) in owners.into_iter().zip(sums.disjoint_rows(&rows)) {
        if owner != rank.number {
            list.receives.push((owner, part));
            continue;
        }
        let part = part.into_in();
        let others = (0..rank.of).filter(|other| *other != rank.number);
        list.sends.extend(others.map(|other| (other, part)));
    }
    list
}
