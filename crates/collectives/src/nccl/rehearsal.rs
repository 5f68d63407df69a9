//! Makes NCCL allocate its GPU memory before anything else does. NCCL makes its buffers when ranks first send each
//! other something, and an algorithm's buffers at the first message of a size for which it takes that algorithm.

use super::communicator::Communicator;
use super::context::Context;
use crate::{Incoming, Outgoing, Patience, Result};
use std::time::{Duration, Instant};

/// Pause between two polls of the stream.
const SLEEP: Duration = Duration::from_micros(50);

/// Bytes that a rank receives: first few, then many, since NCCL may use other protocols and buffers for many.
const BYTES: [usize; 2] = [1 << 12, 16 << 20];

/// Makes an exchange and a gathering between all ranks in each size, as steps do, and a gathering of `gathered_bytes`, the most that
/// steps gather at a time, in memory of the GPU as there. Waits for them.
pub(super) fn rehearse(
    communicator: &Communicator,
    context: &Context,
    [rank, size]: [usize; 2],
    patience: &Patience,
    gathered_bytes: usize,
) -> Result {
    let (stream, goes) = (context.stream()?, context.memory(2 * BYTES[1])?);
    // SAFETY: there is room for what is received.
    let comes = unsafe { goes.add(BYTES[1]) };
    let largest = match gathered_bytes > BYTES[1] {
        true => Some(context.device_memory(gathered_bytes)?),
        false => None,
    };
    let begun = Instant::now();
    let small = BYTES.map(|bytes| (bytes, Some(goes), comes));
    let large = largest.map(|memory| (gathered_bytes, None, memory));
    for (whole, goes, comes) in small.into_iter().chain(large) {
        let bytes = (whole / size).max(1);
        // SAFETY: there is room for a piece of every rank.
        let of = |start: *mut u8, rank: usize| unsafe { start.add(rank * bytes) };
        let outgoing = |to, pointer: *mut u8| Outgoing { to, pointer, bytes };
        let receives: Vec<Incoming> = (0..size)
            .map(|from| Incoming {
                from,
                pointer: of(comes, from),
                bytes,
            })
            .collect();
        let to_all: Vec<Outgoing> = (0..size).map(|to| outgoing(to, of(comes, rank))).collect();
        let to_each = goes.map(|goes| (0..size).map(|to| outgoing(to, of(goes, to))).collect());
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
    unsafe {
        context.give_back(goes, stream);
        if let Some(memory) = largest {
            context.give_back_device_memory(memory);
        }
    }
    Ok(())
}
