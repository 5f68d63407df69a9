//! What ranks tell one another where no MPI carries it: by NCCL, through page-locked memory.

use super::communicator::Communicator;
use super::context::Context;
use crate::{GroupError, Incoming, Outgoing, pieces};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two looks at the stream.
const SLEEP: Duration = Duration::from_micros(50);

/// What pieces are aligned to.
const ALIGNMENT: usize = 16;

/// A communicator of its own, so that shares meet no exchange.
pub(super) struct Shares {
    pub(super) communicator: Communicator,
    rank: usize,
    size: usize,
    timeout: Duration,
    room: Mutex<Room>,
}

struct Room {
    stream: *mut c_void,
    memory: *mut u8,
    bytes: usize,
}

// SAFETY: the driver lets any thread use streams and page-locked memory; the lock around it keeps threads apart.
unsafe impl Send for Room {}

impl Shares {
    pub(super) fn new(
        communicator: Communicator,
        context: &Context,
        [rank, size]: [usize; 2],
        timeout: Duration,
    ) -> Result<Shares, GroupError> {
        let room = Room {
            stream: context.stream()?,
            memory: std::ptr::null_mut(),
            bytes: 0,
        };
        Ok(Shares {
            communicator,
            rank,
            size,
            timeout,
            room: Mutex::new(room),
        })
    }

    pub(super) fn share(
        &self,
        context: &Context,
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>, GroupError> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        context.enter()?;
        pieces::share(self.rank, self.size, bytes, |sends, receives| {
            self.transfer(context, &mut room, sends, receives)
        })
    }

    fn transfer(
        &self,
        context: &Context,
        room: &mut Room,
        sends: &[Outgoing],
        receives: &[Incoming],
    ) -> Result<(), GroupError> {
        let lengths = sends
            .iter()
            .map(|piece| piece.bytes)
            .chain(receives.iter().map(|piece| piece.bytes));
        let mut end = 0;
        let places: Vec<usize> = lengths
            .map(|bytes| {
                let place = end;
                end += bytes.next_multiple_of(ALIGNMENT);
                place
            })
            .collect();
        room.grow(context, end)?;
        let (here, there) = places.split_at(sends.len());
        // SAFETY: the room has as many bytes, and nothing else uses it: the stream is done.
        let at = |place: &usize| unsafe { room.memory.add(*place) };
        let mut outgoing = sends.to_vec();
        for (piece, place) in outgoing.iter_mut().zip(here) {
            // SAFETY: the piece is alive while it is shared, and its place apart from it.
            unsafe { std::ptr::copy_nonoverlapping(piece.pointer, at(place), piece.bytes) };
            piece.pointer = at(place);
        }
        let mut incoming = receives.to_vec();
        for (piece, place) in incoming.iter_mut().zip(there) {
            piece.pointer = at(place);
        }
        // SAFETY: the room stays as it is until the stream is done.
        unsafe {
            self.communicator
                .enqueue(room.stream, &outgoing, &incoming)?
        };
        self.wait(context, room.stream)?;
        for (piece, place) in receives.iter().zip(there) {
            // SAFETY: as above; the stream has written it.
            unsafe { std::ptr::copy_nonoverlapping(at(place), piece.pointer, piece.bytes) };
        }
        Ok(())
    }

    fn wait(&self, context: &Context, stream: *mut c_void) -> Result<(), GroupError> {
        let begun = Instant::now();
        while !context.is_done(stream)? {
            self.communicator.check()?;
            if begun.elapsed() > self.timeout {
                let others = (0..self.size).filter(|rank| *rank != self.rank);
                return Err(pieces::late(self.rank, "a share", self.timeout, others));
            }
            std::thread::sleep(SLEEP);
        }
        Ok(())
    }

    /// Gives back what it holds of the device, at the good end.
    pub(super) fn give_back(&self, context: &Context) {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: every share has waited for the stream.
        unsafe { context.give_back(room.memory, room.stream) };
        (room.memory, room.stream, room.bytes) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
    }
}

impl Room {
    fn grow(&mut self, context: &Context, bytes: usize) -> Result<(), GroupError> {
        if bytes > self.bytes {
            let bytes = bytes.next_power_of_two().max(1 << 16);
            let memory = context.memory(bytes)?;
            // SAFETY: every share has waited for the stream.
            unsafe { context.give_back(self.memory, std::ptr::null_mut()) };
            (self.memory, self.bytes) = (memory, bytes);
        }
        Ok(())
    }
}
