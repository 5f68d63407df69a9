//! A step of ranks that each have their own piece: reduced, summed and gathered, as a trainer does it.

use collectives::Group;
use kernels::{AddBias, Exchange, Fill, Init, KernelError, Kernels, Queue, SumInOrder};
use memory::{Buffer, Category, DType, Memory};
use std::ops::Range;
use std::sync::Arc;

pub const ROUNDS: usize = 20;

/// Elements of a step, and where those of each rank end: pieces of uneven sizes, the second of which is empty.
pub const SIZE: usize = 4096;
pub const ENDS: [usize; 3] = [1000, 1000, SIZE];

pub fn piece(rank: usize) -> Range<usize> {
    let start = rank.checked_sub(1).map_or(0, |before| ENDS[before]);
    start..ENDS[rank]
}

pub const REASONS: [&str; 4] = [
    "the numbers are computed",
    "the pieces have come",
    "the pieces are summed",
    "the sums are gathered",
];

pub fn lease(memory: &Memory, elements: usize) -> Buffer {
    let lease = memory.lease_persistent(Category::Temporary, "x", [elements], DType::F32);
    lease.unwrap()
}

/// What a rank has of a step.
pub struct Step {
    rank: usize,
    /// What it computes, by adding `more` each round.
    pub numbers: Buffer,
    more: Buffer,
    /// Everybody's numbers for its own piece, a row a rank; what they add up to; and the sums of all ranks.
    rows: Buffer,
    sums: Buffer,
    gathered: Buffer,
    /// Sums of what was gathered.
    seen: Buffer,
}

impl Step {
    pub fn new(kernels: &Kernels, memory: &Memory, rank: usize) -> Step {
        let own = piece(rank).len();
        let mut step = Step {
            rank,
            numbers: lease(memory, SIZE),
            more: lease(memory, SIZE),
            rows: lease(memory, ENDS.len() * own),
            sums: lease(memory, own),
            gathered: lease(memory, SIZE),
            seen: lease(memory, SIZE),
        };
        let (out, value) = (step.more.view_mut(), (1 + rank) as f32);
        kernels.run(Fill { out, value }).unwrap();
        step
    }

    /// Sends every rank its piece of the numbers.
    pub fn reduce(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let own = piece(self.rank).len();
        let numbers = self.numbers.view();
        let sends = (0..ENDS.len()).map(|to| (to, numbers.rows(piece(to))));
        let (mut receives, mut rest) = (Vec::new(), self.rows.view_mut());
        for from in 0..ENDS.len() {
            let (row, others) = rest.split_at(own);
            receives.push((from, row));
            rest = others;
        }
        let exchange = Exchange {
            sends: sends.collect(),
            receives,
        };
        // SAFETY: everything lives until all queues are done, and events order what is done with it.
        unsafe { kernels.start_exchange(exchange) }
    }

    /// Adds the pieces up.
    fn sum(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let sum = SumInOrder {
            x: self
                .rows
                .view()
                .reshape([ENDS.len(), piece(self.rank).len()]),
            out: self.sums.view_mut(),
            init: Init::Accumulate,
        };
        // SAFETY: as above.
        unsafe { kernels.start(Queue::Update, sum) }
    }

    /// Sends every rank the sums, and receives all.
    fn gather(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let sums = self.sums.view();
        let (mut receives, mut rest) = (Vec::new(), self.gathered.view_mut());
        for from in 0..ENDS.len() {
            let (row, others) = rest.split_at(piece(from).len());
            receives.push((from, row));
            rest = others;
        }
        let exchange = Exchange {
            sends: (0..ENDS.len()).map(|to| (to, sums)).collect(),
            receives,
        };
        // SAFETY: as above.
        unsafe { kernels.start_exchange(exchange) }
    }

    pub fn round(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let [computed, came, summed, gathered] = REASONS;
        let after = |queue, event, reason| kernels.wait(queue, kernels.record(event)?, reason);
        let add = |out: &mut Buffer, x: &Buffer| {
            let (out, bias) = (out.view_mut().reshape([1, SIZE]), x.view());
            let bias = bias.into();
            kernels.run(AddBias { out, bias })
        };
        add(&mut self.numbers, &self.more)?;
        after(Queue::Collective, Queue::Compute, computed)?;
        self.reduce(kernels)?;
        after(Queue::Update, Queue::Collective, came)?;
        self.sum(kernels)?;
        after(Queue::Collective, Queue::Update, summed)?;
        self.gather(kernels)?;
        after(Queue::Compute, Queue::Collective, gathered)?;
        add(&mut self.seen, &self.gathered)
    }
}

/// As a trainer does it: numbers are computed, exchanged, summed by their owners in the order of ranks, gathered and used.
/// Returns what was seen: [`SEEN`] everywhere, if nothing overtook anything.
pub fn rounds(kernels: &Kernels, memory: &Memory, rank: usize) -> Result<Vec<f32>, KernelError> {
    let mut step = Step::new(kernels, memory, rank);
    for _ in 0..ROUNDS {
        step.round(kernels)?;
    }
    for queue in Queue::ALL {
        kernels.finish(kernels.record(queue)?)?;
    }
    let mut seen = vec![0u8; SIZE * 4];
    kernels.download(&mut seen, step.seen.view())?;
    let numbers = seen.chunks_exact(4);
    Ok(numbers
        .map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap()))
        .collect())
}

/// In round i ranks have i, 2 i and 3 i; sums are kept, and seen, from round to round.
pub const SEEN: f32 = (6 * (ROUNDS * (ROUNDS + 1) * (ROUNDS + 2) / 6)) as f32;

/// What each rank gives back, each in a thread of its own.
pub fn on_ranks<T: Send>(
    groups: Vec<Arc<dyn Group>>,
    rank: impl Fn(Arc<dyn Group>) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks = groups.into_iter().map(|group| scope.spawn(|| rank(group)));
        let ranks: Vec<_> = ranks.collect();
        let ended = ranks.into_iter().map(|rank| rank.join());
        ended.map(|ended| ended.unwrap()).collect()
    })
}

/// Bytes that a rank sends to others in a round: the pieces of others, and its sums to each of them.
pub fn sent_bytes(rank: usize) -> u64 {
    let (own, others) = (piece(rank).len(), ENDS.len() - 1);
    (ROUNDS * 4 * (SIZE - own + others * own)) as u64
}
