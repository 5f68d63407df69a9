//! Adds up gradients over ranks. A rank's own gradients of one micro-batch lie in its arena, or in a unit's lease; where it has several
//! parts of each sequence, those of each part by themselves. A bundle is exchanged in buckets: each rank receives all ranks' gradients of
//! a range of its piece into a slot, and adds them in the order of ranks and of parts. The next micro-batch is added to the same sum. So the sum has the same bits for any
//! engine, size of buckets and number of ranks.

use crate::gather::{GatheredParts, exchange_ranges_of_stages, gather_bundle};
use crate::gradient_buckets::GradientBuckets;
use crate::grains::Grains;
use crate::stream::{OnDevice, UnitsOnDevice};
use crate::{Ranks, UnitError};
use kernels::{Account, Event, Exchange, ExchangeBytes, Init, Kernels, Queue, Result, SumInOrder};
use memory::{
    Arena, ArenaLease, ArenaPlace, Buffer, Category, Cover, DType, Home, In, Layout, Memory,
    OutOfMemory, PARAMETER_PADDING, Rank,
};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

const COMPUTED: &str = "a bundle's gradients are computed before they are sent";
const SENT: &str = "own gradients have been sent before others are written over them";
const EMPTIED: &str = "what a slot received is added up before more comes into it";
const RECEIVED: &str = "gradients of other ranks have come before they are added up";
const SUMMED: &str = "gradients are added up over ranks before they are read";
const SUMS_CAME: &str = "sums have come from the host before more is added to them";
const ADDED_UP: &str = "gradients are added up before their sums go to the host";

/// The sums of a step, and the buckets under way.
pub(crate) struct Reducing {
    pub(crate) ranks: Ranks,
    buckets: GradientBuckets,
    /// The sums of this rank's pieces; none if the sums overwrite this rank's own gradients in the arena.
    sums: Option<Arena>,
    /// Those of matrices, if they live on the host: `sums` has only vectors then. The sums of a unit are on the device while the backward
    /// pass computes what is added to them, and until they have been sent back.
    pub(crate) on_host: Option<UnitsOnDevice>,
    slots: Vec<Slot>,
    /// Buckets that were exchanged since the run began.
    asked: usize,
    in_flight: VecDeque<BucketInFlight>,
    /// Whether this step has begun the sum of each bundle.
    begun: Vec<bool>,
    /// For each bundle, when the arena's own gradients of it have been sent.
    sent: Vec<Option<Event>>,
    /// When the last sum that was started is complete.
    summed: Event,
}

/// Room for a bucket: the gradients of the same elements of all ranks' parts.
struct Slot {
    place: Buffer,
    emptied: Event,
}

/// A bucket on its way into a slot.
struct BucketInFlight {
    came: Event,
    /// Its bundle, and its number among that one's buckets. For each of its ranges, the slot has the gradients of all ranks' parts, one
    /// after the other.
    of: (usize, usize),
    is_first: bool,
    /// Whether it is of the step's last micro-batch.
    is_last: bool,
}

impl Reducing {
    pub(crate) fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        (dtype, home): (DType, &Home),
        (ranks, accum): (&Ranks, usize),
    ) -> Result<Reducing, OutOfMemory> {
        let of = ranks.rank.of;
        let added = of * ranks.parts_each;
        let rows = ranks.bucket_bytes / (added * dtype.size_in_bytes());
        let rows = (rows / PARAMETER_PADDING).max(1) * PARAMETER_PADDING;
        let buckets = GradientBuckets::new(layout, ranks.rank, rows);
        let category = Category::Gradient;
        let slot = |_| {
            let dims = [added * buckets.rows];
            Ok(Slot {
                place: memory.lease_persistent(category, "receive_slot", dims, dtype)?,
                emptied: Event::PAST,
            })
        };
        let slots = (0..1 + usize::from(ranks.overlap_grad_reduce)).map(slot);
        // Own gradients must not be overwritten by sums if several micro-batches are added up over ranks, or if units
        // come and go.
        let are_on_host = *home == Home::Pinned;
        let are_apart = are_on_host
            || ranks.leases_gradients()
            || (ranks.adds_every_micro_batch() && accum > 1);
        let own = layout.own_trained(ranks.rank);
        let [matrices, vectors] =
            [layout.matrices(), layout.vectors()].map(|range| own.within(&range));
        let lease = |place, name, held: &Cover| {
            let lease = ArenaLease::new(place, category, name);
            Arena::lease(memory, lease, layout, dtype, held.clone())
        };
        let held = if are_on_host { &vectors } else { &own };
        let sums = are_apart.then(|| lease(ArenaPlace::Device, "reduced_gradients", held));
        let on_host = are_on_host.then(|| {
            let host = lease(ArenaPlace::Host, "offloaded_gradients", &matrices);
            host.map(|host| UnitsOnDevice::new(memory, layout, (category, "unit_sums"), Some(host)))
        });
        Ok(Reducing {
            ranks: ranks.clone(),
            begun: vec![false; buckets.count()],
            sent: vec![None; buckets.count()],
            sums: sums.transpose()?,
            on_host: on_host.transpose()?,
            slots: slots.collect::<Result<_, OutOfMemory>>()?,
            buckets,
            asked: 0,
            in_flight: VecDeque::new(),
            summed: Event::PAST,
        })
    }

    /// Bytes that live across steps.
    pub(crate) fn bytes(&self) -> u64 {
        let slots = self.slots.iter().map(|slot| slot.place.bytes());
        slots.chain(self.sums.iter().map(Arena::bytes)).sum()
    }

    /// The number of the bundle of a virtual stage's vectors, counted over the whole pipeline.
    pub(crate) fn vectors_of(&self, virtual_stage: usize) -> usize {
        self.buckets.first_of_vectors() + virtual_stage / self.ranks.stage.of
    }

    /// Forgets what is under way after a pass that ended early.
    pub(crate) fn abandon(&mut self) {
        self.in_flight.clear();
        if let Some(sums) = &mut self.on_host {
            sums.abandon(true);
        }
    }

    /// Lets the sums of a unit be added to, which the backward pass opens.
    pub(crate) fn open(
        &mut self,
        kernels: &Kernels,
        unit: usize,
        (like, grains): (&Arena, &mut Grains),
    ) -> Result<(), UnitError> {
        self.give_back(kernels, grains)?;
        let Some(sums) = self.on_host.as_mut().filter(|sums| !sums.has((unit, 0))) else {
            return Ok(());
        };
        let layout = like.layout();
        let own = layout.piece(&layout.units()[unit].trained, self.ranks.rank);
        let (here, host) = sums.lease((unit, 0), own.clone(), like.types().clone())?;
        match host.filter(|_| self.begun[unit]) {
            Some(host) => here.fetch(kernels, &[(host, own)])?,
            None => here.free(kernels, Queue::Update)?,
        }
        Ok(())
    }

    /// Ends the leases of all sums that were sent to the host. The squares of complete ones are summed first.
    fn give_back(&mut self, kernels: &Kernels, grains: &mut Grains) -> Result {
        let Some(sums) = &mut self.on_host else {
            return Ok(());
        };
        while let Some(sent) = sums.take_sent(kernels, None)? {
            if sent.is_complete {
                grains.sum(kernels, sent.arena.held(), |range| sent.flat(&range))?;
            }
        }
        Ok(())
    }

    pub(crate) fn begin_step(&mut self) {
        self.begun.fill(false);
    }

    /// The sum of a range, once the step's gradients are complete.
    pub(crate) fn sum<'a>(&'a self, arena: &'a Arena, range: Range<usize>) -> In<'a> {
        match &self.sums {
            Some(sums) if !self.ranks.shares_sums() => sums.flat(range),
            _ => arena.flat(range),
        }
    }

    /// Makes the computation wait until own gradients of a bundle have been sent, so that they may be overwritten.
    pub(crate) fn wait_until_sent(&mut self, kernels: &Kernels, bundle: usize) -> Result {
        let sent = self.sent[bundle].take();
        sent.map_or(Ok(()), |sent| kernels.wait(Queue::Compute, sent, SENT))
    }

    /// Starts adding up a bundle, whose own gradients are in leases of a unit or in the arena and those of other parts. Returns the
    /// event after which they are no longer read.
    pub(crate) fn add(
        &mut self,
        kernels: &Kernels,
        (bundle, is_last): (usize, bool),
        (arena, others, units): (&mut Arena, &[Arena], &[&OnDevice]),
    ) -> Result<Event> {
        let computed = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Collective, computed, COMPUTED)?;
        for number in 0..self.buckets.of(bundle).len() {
            if self.in_flight.len() == self.slots.len() {
                self.sum_oldest(kernels, arena)?;
            }
            let own = |range: &Range<usize>, part: usize| match (units, part.checked_sub(1)) {
                ([], None) => arena.flat(range.clone()),
                ([], Some(other)) => others[other].flat(range.clone()),
                (units, _) => units[part].flat(range),
            };
            self.exchange(kernels, ((bundle, number), is_last), own)?;
        }
        self.begun[bundle] = true;
        let sent = kernels.record(Queue::Collective)?;
        if units.is_empty() {
            self.sent[bundle] = Some(sent);
        }
        if !self.ranks.overlap_grad_reduce {
            self.finish(kernels, arena)?;
        }
        Ok(sent)
    }

    /// How many gradients of each element are added up for a micro-batch of each group of ranks: those of all parts.
    fn added(&self) -> usize {
        self.ranks.rank.of * self.ranks.parts_each
    }

    /// Starts to exchange a bucket: sends each rank this rank's own gradients of that rank's piece, and receives all ranks' of this
    /// rank's.
    fn exchange<'a>(
        &mut self,
        kernels: &Kernels,
        ((bundle, number), is_last): ((usize, usize), bool),
        own: impl Fn(&Range<usize>, usize) -> In<'a>,
    ) -> Result {
        let buckets = self.buckets.of(bundle);
        let bucket = &buckets[number];
        let count = self.slots.len();
        let slot = &mut self.slots[self.asked % count];
        kernels.wait(Queue::Collective, slot.emptied, EMPTIED)?;
        let (rank, parts) = (self.ranks.rank, self.ranks.parts_each);
        let bytes_each = (parts * slot.place.dtype().size_in_bytes()) as u64;
        let own_elements: usize = bucket.own.iter().map(Range::len).sum();
        let bytes = ExchangeBytes::new(
            bytes_each * bucket.of_others as u64,
            bytes_each * ((rank.of - 1) * own_elements) as u64,
        );
        let mut room = slot.place.view_mut();
        let list = || {
            let to = Rank::all(rank.of);
            let to = to.map(|rank| (rank.number, self.buckets.of_rank(bundle, bucket, rank)));
            let sends = to.flat_map(|(rank, cover)| {
                let of_parts = |range| (0..parts).map(move |part| (range, part));
                let pieces = cover.ranges().iter().flat_map(of_parts);
                let pieces: Vec<In> = pieces.map(|(range, part)| own(range, part)).collect();
                pieces.into_iter().map(move |piece| (rank, piece))
            });
            let mut receives = Vec::new();
            for range in &bucket.own {
                for added in 0..rank.of * parts {
                    let (place, rest) = room.split_at(range.len());
                    receives.push((added / parts, place));
                    room = rest;
                }
            }
            Exchange {
                sends: sends.collect(),
                receives,
            }
        };
        let _account = kernels.count_to(Account::Gradients);
        // SAFETY: own gradients stay until the computation has waited for an event after this (`wait_until_sent`, or
        // the end of a unit's lease). The slot stays until the sum has read it. Both live as long as kernels have work.
        unsafe { kernels.start_exchange_of(bytes, Box::new(list)) }?;
        self.asked += 1;
        self.in_flight.push_back(BucketInFlight {
            came: kernels.record(Queue::Collective)?,
            of: (bundle, number),
            is_first: !self.begun[bundle],
            is_last,
        });
        Ok(())
    }

    /// Adds up the bucket that was exchanged first.
    fn sum_oldest(&mut self, kernels: &Kernels, arena: &mut Arena) -> Result {
        let number = (self.asked - self.in_flight.len()) % self.slots.len();
        let Some(in_flight) = self.in_flight.pop_front() else {
            return Ok(());
        };
        kernels.wait(Queue::Update, in_flight.came, RECEIVED)?;
        let (bundle, of_bundle) = in_flight.of;
        let buckets = self.buckets.of(bundle);
        let added = self.added();
        let slot = &mut self.slots[number];
        let unit = self.buckets.is_unit(bundle).then_some(bundle);
        let mut on_host = self.on_host.as_mut().zip(unit);
        let sums = match &mut on_host {
            Some((sums, unit)) => {
                let here = sums.open(kernels, Queue::Update, (*unit, 0), SUMS_CAME)?;
                &mut here.arena
            }
            None => self.sums.as_mut().unwrap_or(arena),
        };
        let mut first = 0;
        for range in buckets[of_bundle].own.iter().cloned() {
            let elements = added * range.len();
            let x = slot.place.view().rows(first..first + elements);
            let sum = SumInOrder {
                x: x.reshape([added, range.len()]),
                out: sums.flat_mut(range),
                init: match in_flight.is_first {
                    true => Init::Overwrite,
                    false => Init::Accumulate,
                },
            };
            // SAFETY: the slot is written again only after `emptied`, and sums are read after the computation has
            // waited for `summed`. Both live as long as kernels have work.
            unsafe { kernels.start(Queue::Update, sum) }?;
            first += elements;
        }
        slot.emptied = kernels.record(Queue::Update)?;
        self.summed = slot.emptied;
        match on_host.filter(|_| of_bundle + 1 == buckets.len()) {
            Some((sums, unit)) => {
                sums.get_mut((unit, 0)).is_complete = in_flight.is_last;
                sums.send(kernels, Queue::Update, (unit, 0), ADDED_UP)
            }
            None => Ok(()),
        }
    }

    /// Makes the computation wait for all sums that were started.
    fn finish(&mut self, kernels: &Kernels, arena: &mut Arena) -> Result {
        while !self.in_flight.is_empty() {
            self.sum_oldest(kernels, arena)?;
        }
        kernels.wait(Queue::Compute, self.summed, SUMMED)
    }

    /// Ends a pass. If it was the step's last, the computation waits for all sums. So it does if they live on the host: they go there with
    /// every pass, so that all micro-batches need the same memory.
    pub(crate) fn end_pass(
        &mut self,
        kernels: &Kernels,
        is_complete: bool,
        (arena, grains): (&mut Arena, &mut Grains),
    ) -> Result {
        if is_complete || self.on_host.is_some() {
            self.finish(kernels, arena)?;
        }
        self.give_back(kernels, grains)
    }

    /// Gives the other stages of a pipeline the sums of this rank's piece of the vectors of this stage, and gets theirs: every stage
    /// updates all vectors. The sums must be complete, and the computation must already wait for them.
    pub(crate) fn share_vectors(&mut self, kernels: &Kernels, arena: &mut Arena) -> Result {
        let sums = self.sums.as_mut().unwrap_or(arena);
        let piece = sums
            .layout()
            .piece(self.buckets.all_vectors(), self.ranks.rank);
        let (layout, types) = (sums.layout().clone(), sums.types().clone());
        let of_stage = |stage| layout.vectors_of_stage(stage).within_all(&piece);
        let own = (0..self.ranks.stage.of).map(|stage| of_stage(stage).ranges().to_vec());
        let bytes_of = |range: &Range<usize>| types.bytes(&Cover::new([range.clone()]));
        let _account = kernels.count_to(Account::Gradients);
        // SAFETY: the caller waits for this before the sums are read or written, and they live as long as kernels have work.
        unsafe {
            exchange_ranges_of_stages(kernels, &self.ranks, own.collect(), bytes_of, |ranges| {
                sums.disjoint_raw_mut(ranges)
            })
        }
    }

    /// Gives the step's sums to all ranks of this stage. They must be complete, and the computation must already wait for them.
    pub(crate) fn share(&mut self, kernels: &Kernels, arena: &mut Arena) -> Result {
        let _account = kernels.count_to(Account::Gradients);
        for bundle in self.buckets.divided() {
            let pieces = (bundle, self.ranks.rank, GatheredParts::Pieces);
            // SAFETY: the caller waits for this before the arena is read or written. The arena and the sums live as
            // long as kernels have work, and the sums are written again only after the next backward pass.
            unsafe { gather_bundle(kernels, pieces, self.sums.as_ref(), arena) }?;
        }
        Ok(())
    }
}
