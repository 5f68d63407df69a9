//! Makes NCCL allocate its GPU memory before anything else does. NCCL makes its buffers when ranks first send each
//! other something, and those of an algorithm when it first chooses that, which it does by size.

use super::communicator::Communicator;
use super::context::Context;
use crate::{GroupError, Incoming, Outgoing, Patience};
use std::time::{Duration, Instant};

/// Pause between two polls of the stream.
const SLEEP: Duration = Duration::from_micros(50);

/// Bytes that a rank receives: first few, then many, since NCCL may use other protocols and buffers for many.
const BYTES: [usize; 2] = [1 << 12, 16 << 20];

/// Makes an exchange and a gathering between all ranks in each size, as steps do, and a gathering of `gathered_bytes`, the most that
/// steps gather at a time. Waits for them.
pub(super) fn rehearse(
    communicator: &Communicator,
    context: &Context,
    [rank, size]: [usize; 2],
    patience: &Patience,
    gathered_bytes: usize,
) -> Result<(), GroupError> {
    let largest = BYTES[1].max(gathered_bytes);
    let (stream, memory) = (context.stream()?, context.memory(BYTES[1] + largest)?);
    // SAFETY: there is room for what is received.
    let comes = unsafe { memory.add(BYTES[1]) };
    let begun = Instant::now();
    let more = (largest > BYTES[1]).then_some(largest);
    for whole in BYTES.into_iter().chain(more) {
        let bytes = (whole / size).max(1);
        // SAFETY: there is room for a piece of every rank.
        let of = |start: *mut u8, rank: usize| unsafe { start.add(rank * bytes) };
        let goes = |to, pointer: *mut u8| Outgoing { to, pointer, bytes };
        let receives: Vec<Incoming> = (0..size)
            .map(|from| Incoming {
                from,
                pointer: of(comes, from),
                bytes,
            })
            .collect();
        let to_each = (0..size).map(|to| goes(to, of(memory, to))).collect();
        let to_all: Vec<Outgoing> = (0..size).map(|to| goes(to, of(comes, rank))).collect();
        let to_each: Option<Vec<Outgoing>> = (whole <= BYTES[1]).then_some(to_each);
        for sends in to_each.into_iter().chain([to_all]) {
            // SAFETY: the memory lives until the stream is done, and nothing else uses it; what is gathered is in its place.
            unsafe { communicator.enqueue(stream, &sends, &receives)? };
        }
    }
    while !context.is_done(stream)? {
        communicator.check()?;
        if begun.elapsed() > patience.timeout() {
            let others = (0..size).filter(|other| *other != rank);
            return Err(patience.late(rank, "the rehearsal of an exchange", others));
        }
        std::thread::sleep(SLEEP);
    }
    // SAFETY: the stream is done.
    unsafe { context.give_back(memory, stream) };
    Ok(())
}
