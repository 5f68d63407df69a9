//! Updates of tensors that are here, and of whole matrices of which ranks have pieces: one rank makes each.

use crate::form::{Form, StateViews};
use crate::numbers::{Numbers, Operands};
use crate::resident::Resident;
use crate::rule::{Asking, ByMatrix, Rule, WholeTensor};
use crate::segment::{Segment, tensors_of};
use crate::sums::{self, SummedSources};
use kernels::{Exchange, ExchangeBytes, KernelError, Kernels, Queue};
use memory::{DType, GRANULARITY_BYTES, In, Layout, Out, Rank};
use std::cmp::Reverse;
use std::ops::Range;
use std::rc::Rc;
use units::{Gradients, Weights};

const STAGED: &str = "what a rank has of a matrix is complete before it is sent";
const CAME: &str = "what was sent of a matrix has come before it is used";

/// The rule of a matrix.
fn rule<'a>(form: &'a Form, segment: &'a Segment) -> (&'a dyn ByMatrix, &'a WholeTensor) {
    let group = &form.groups()[segment.group];
    match (&group.rule, &segment.whole) {
        (Rule::Matrices(rule), Some(matrix)) => (&**rule, matrix),
        _ => unreachable!("matrices have rules that update them as a whole"),
    }
}

/// Bytes of room for the update of a tensor that is here as a whole.
fn room_here(form: &Form, segment: &Segment) -> usize {
    match form.groups()[segment.group].rule {
        Rule::Sums(_) => sums::room_bytes(form, segment, 1),
        _ => room(form, segment).iter().sum(),
    }
}

/// Bytes of a matrix's direction, and of the scratch for its update.
fn room(form: &Form, segment: &Segment) -> [usize; 2] {
    let (rule, matrix) = rule(form, segment);
    let direction = segment.own().len() * rule.dtype().size_in_bytes();
    let aligned = direction.next_multiple_of(GRANULARITY_BYTES as usize);
    [aligned, rule.scratch_bytes(matrix.shape)]
}

/// Bytes that the updates of those segments need that are matrices, one after the other.
pub(crate) fn room_bytes<'a>(
    form: &Form,
    segments: impl IntoIterator<Item = &'a Segment>,
) -> usize {
    let segments = segments.into_iter();
    let matrices = segments.filter(|segment| segment.whole.is_some());
    let bytes = matrices.map(|matrix| room_here(form, matrix));
    bytes.max().unwrap_or(0)
}

/// The first elements of some bytes.
fn first(bytes: Out<'_>, dtype: DType, elements: usize) -> Out<'_> {
    bytes.rows(0..elements * dtype.size_in_bytes()).cast(dtype)
}

/// Asks for the update of a segment that is here. `operands` are without padding; `room` (u8) is for those that are tensors
/// which are updated as a whole.
pub(crate) fn update_segment(
    on: &Asking,
    sources: SummedSources,
    segment: &Segment,
    operands: Operands,
    room: Option<Out>,
) -> Result<(), KernelError> {
    let (form, numbers) = (sources.form, sources.numbers);
    match (&form.groups()[segment.group].rule, room) {
        (Rule::Ranges(rule), _) => rule.update(on, numbers.update(segment, operands)),
        (Rule::Matrices(_), Some(room)) => {
            update_whole(on, (form, numbers), segment, operands, room)
        }
        (Rule::Sums(_), Some(room)) => sums::update_here(on, sources, segment, operands, room),
        (_, None) => unreachable!("what is updated as a whole has room"),
    }
}

fn update_whole(
    on: &Asking,
    (form, numbers): (&Form, &Numbers),
    segment: &Segment,
    operands: Operands,
    scratch: Out,
) -> Result<(), KernelError> {
    let (rule, matrix) = rule(form, segment);
    let (direction, scratch) = scratch.split_at(room(form, segment)[0]);
    let mut direction = first(direction, rule.dtype(), segment.own().len());
    let mut update = numbers.update(segment, operands);
    rule.direct(on, &mut update, direction.reborrow())?;
    rule.transform(
        on,
        matrix.shape,
        direction.reborrow(),
        scratch,
        update.rates,
    )?;
    rule.apply(on, update, matrix, direction.as_in())
}

/// Matrices of which every rank has pieces. They are dealt in rounds, the largest first, a matrix to each rank, so that the
/// ranks have about as much to do.
pub(crate) struct Dealt {
    layout: Rc<Layout>,
    rank: Rank,
    rounds: Vec<Vec<Segment>>,
    /// Bytes for a direction, and for what there is besides.
    room: [usize; 2],
}

/// What updates of this rank's pieces read and write, all of it on the device.
pub(crate) struct DeviceSources<'a> {
    pub(crate) kernels: &'a dyn Kernels,
    pub(crate) form: &'a Form,
    pub(crate) numbers: &'a Numbers,
    pub(crate) resident: &'a mut Resident,
    pub(crate) weights: &'a mut Weights,
    pub(crate) gradients: &'a Gradients,
}

impl DeviceSources<'_> {
    pub(crate) fn operands(&mut self, range: &Range<usize>) -> Operands<'_> {
        let states: StateViews = self.resident.views(range);
        Operands {
            weights: self.weights.flat_mut(range.clone()),
            gradients: self.gradients.flat(range),
            states,
            clip: self.numbers.clip.view(),
        }
    }
}

impl Dealt {
    /// The matrices of all groups, of a rank's layout.
    pub(crate) fn new(layout: &Rc<Layout>, form: &Form, rank: Rank) -> Dealt {
        let groups = form.groups().iter().enumerate();
        let all = groups
            .filter(|(_, group)| matches!(group.rule, Rule::Matrices(_)))
            .flat_map(|(number, group)| tensors_of(layout, group, &layout.trained(), number));
        let mut all: Vec<Segment> = all.collect();
        all.sort_by_key(|segment| Reverse(segment.own().len()));
        let mut dealt = Dealt {
            layout: layout.clone(),
            rank,
            rounds: all.chunks(rank.of).map(<[Segment]>::to_vec).collect(),
            room: [0; 2],
        };
        // What is staged and the scratch of an iteration are never there at once.
        for round in &dealt.rounds {
            let staged = round.iter().map(|segment| {
                let size = rule(form, segment).0.dtype().size_in_bytes();
                size * elements_of(&pieces(layout, segment, rank))
            });
            let staged = staged.max().unwrap_or(0);
            let [direction, scratch] = round.get(rank.number).map_or([0; 2], |own| room(form, own));
            let [most, besides] = dealt.room;
            dealt.room = [most.max(direction), besides.max(scratch).max(staged)];
        }
        dealt
    }

    /// Bytes of room for [`Dealt::update`].
    pub(crate) fn room_bytes(&self) -> usize {
        self.room.iter().sum()
    }

    /// Updates this rank's pieces of all matrices, in `room` (u8).
    pub(crate) fn update(&self, sources: &mut DeviceSources, room: Out) -> Result<(), KernelError> {
        let (mut direction, mut rest) = room.split_at(self.room[0]);
        for round in &self.rounds {
            for (owner, segment) in round.iter().enumerate() {
                self.direct(sources, segment, rest.reborrow())?;
                let (whole, staged) = (direction.reborrow(), rest.as_in());
                self.gather(sources, (segment, owner), whole, staged)?;
            }
            if let Some(segment) = round.get(self.rank.number) {
                let (rule, matrix) = rule(sources.form, segment);
                let whole = first(direction.reborrow(), rule.dtype(), segment.own().len());
                let rates = sources.numbers.rates(segment.group);
                let scratch = rest.reborrow();
                rule.transform(
                    &Asking::in_computation(sources.kernels),
                    matrix.shape,
                    whole,
                    scratch,
                    rates,
                )?;
            }
            for (owner, segment) in round.iter().enumerate() {
                let (whole, staged) = (direction.as_in(), rest.reborrow());
                self.scatter(sources, (segment, owner), whole, staged)?;
                self.apply(sources, segment, rest.as_in())?;
            }
        }
        Ok(())
    }

    /// Stages the directions of this rank's pieces of a matrix, one behind the other.
    fn direct(
        &self,
        sources: &mut DeviceSources,
        segment: &Segment,
        staged: Out,
    ) -> Result<(), KernelError> {
        let rule = rule(sources.form, segment).0;
        let pieces = pieces(&self.layout, segment, self.rank);
        let mut rest = first(staged, rule.dtype(), elements_of(&pieces));
        for range in pieces {
            let (out, after) = rest.split_at(range.len());
            rest = after;
            let (numbers, kernels) = (sources.numbers, sources.kernels);
            let mut update = numbers.update(
                &segment.part(&range, &self.layout),
                sources.operands(&range),
            );
            rule.direct(&Asking::in_computation(kernels), &mut update, out)?;
        }
        Ok(())
    }

    /// Updates this rank's pieces of a matrix by their staged directions.
    fn apply(
        &self,
        sources: &mut DeviceSources,
        segment: &Segment,
        staged: In,
    ) -> Result<(), KernelError> {
        let (rule, matrix) = rule(sources.form, segment);
        let size = rule.dtype().size_in_bytes();
        let mut start = 0;
        for range in pieces(&self.layout, segment, self.rank) {
            let bytes = start..start + size * range.len();
            start = bytes.end;
            let direction = staged.rows(bytes).cast(rule.dtype());
            let (numbers, kernels) = (sources.numbers, sources.kernels);
            let update = numbers.update(
                &segment.part(&range, &self.layout),
                sources.operands(&range),
            );
            let on = Asking::in_computation(kernels);
            rule.apply(&on, update, matrix, direction)?;
        }
        Ok(())
    }

    /// The owner of a matrix gets its direction from all ranks.
    fn gather(
        &self,
        sources: &DeviceSources,
        (segment, owner): (&Segment, usize),
        whole: Out,
        staged: In,
    ) -> Result<(), KernelError> {
        let bytes = self.bytes(sources.form, segment, owner);
        let list = || {
            let own = self.staged(sources.form, segment);
            let sends = own.into_iter().map(|bytes| (owner, staged.rows(bytes)));
            let (ranks, places) = self.places(sources.form, segment, owner);
            let receives = whole.disjoint_rows(&places);
            Exchange {
                sends: sends.collect(),
                receives: ranks.into_iter().zip(receives).collect(),
            }
        };
        let [other, own] = bytes;
        let bytes = ExchangeBytes {
            sent: own,
            received: other,
        };
        exchange(sources.kernels, bytes, list)
    }

    /// All ranks get from the owner of a matrix what its pieces move along.
    fn scatter(
        &self,
        sources: &DeviceSources,
        (segment, owner): (&Segment, usize),
        whole: In,
        staged: Out,
    ) -> Result<(), KernelError> {
        let [sent, received] = self.bytes(sources.form, segment, owner);
        let list = || {
            let (ranks, places) = self.places(sources.form, segment, owner);
            let pieces = places.into_iter().map(|bytes| whole.rows(bytes));
            let receives = staged.disjoint_rows(&self.staged(sources.form, segment));
            Exchange {
                sends: ranks.into_iter().zip(pieces).collect(),
                receives: receives.into_iter().map(|out| (owner, out)).collect(),
            }
        };
        exchange(sources.kernels, ExchangeBytes { sent, received }, list)
    }

    /// Where this rank's pieces of a matrix are staged, in bytes.
    fn staged(&self, form: &Form, segment: &Segment) -> Vec<Range<usize>> {
        let size = rule(form, segment).0.dtype().size_in_bytes();
        let mut start = 0;
        let place = |range: Range<usize>| {
            let first = start;
            start += size * range.len();
            first..start
        };
        let own = pieces(&self.layout, segment, self.rank).into_iter();
        own.map(place).collect()
    }

    /// Where the pieces of all ranks are in a direction, in bytes, each with its rank; none where another rank is its owner.
    fn places(
        &self,
        form: &Form,
        segment: &Segment,
        owner: usize,
    ) -> (Vec<usize>, Vec<Range<usize>>) {
        if owner != self.rank.number {
            return Default::default();
        }
        let size = rule(form, segment).0.dtype().size_in_bytes();
        let first = segment.range.start;
        let of = |rank: Rank| {
            let piece = pieces(&self.layout, segment, rank).into_iter();
            piece.map(move |range| {
                let bytes = size * (range.start - first)..size * (range.end - first);
                (rank.number, bytes)
            })
        };
        let mut places: Vec<(usize, Range<usize>)> = Rank::all(self.rank.of).flat_map(of).collect();
        places.sort_by_key(|(_, bytes)| bytes.start);
        places.into_iter().unzip()
    }

    /// Bytes between this rank and others, for a matrix: of others' pieces where this rank is the owner, and of its own where it
    /// is not.
    fn bytes(&self, form: &Form, segment: &Segment, owner: usize) -> [u64; 2] {
        let size = rule(form, segment).0.dtype().size_in_bytes();
        let own = elements_of(&pieces(&self.layout, segment, self.rank));
        let [others, own] = match owner == self.rank.number {
            true => [segment.own().len() - own, 0],
            false => [0, own],
        };
        [others, own].map(|elements| (elements * size) as u64)
    }
}

fn elements_of(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// What a rank has of a tensor, without padding.
pub(crate) fn pieces(layout: &Layout, segment: &Segment, rank: Rank) -> Vec<Range<usize>> {
    let tensor = segment.whole.as_ref().expect("it is a tensor");
    let bundle = match layout.unit_of(tensor.entry) {
        Some(unit) => layout.units()[unit].trained.clone(),
        None => layout.trained().within(&layout.vectors()),
    };
    let piece = bundle.piece(rank).within(&segment.own());
    piece.ranges().to_vec()
}

/// Asks for an exchange, after the computation so far and before what follows.
pub(crate) fn exchange<'a>(
    kernels: &dyn Kernels,
    bytes: ExchangeBytes,
    list: impl FnOnce() -> Exchange<'a> + 'a,
) -> Result<(), KernelError> {
    kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, STAGED)?;
    // SAFETY: the computation, which alone reads and writes the pieces, waits for them, and their memory lives as long.
    unsafe { kernels.start_exchange_of(bytes, Box::new(list)) }?;
    kernels.wait(Queue::Compute, kernels.record(Queue::Collective)?, CAME)
}
