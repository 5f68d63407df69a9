//! The one thread that calls MPI.

use super::calls::MpiCalls;
use crate::{GroupError, Incoming, Outgoing, Patience, Result, pieces};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

/// Most bytes of one message, since MPI counts them in an `int`.
const MESSAGE_BYTES: usize = 1 << 30;

/// How often the thread polls messages before it begins to sleep in between. A wait within MPI would spin, and take a
/// core from the computation.
const LOOKS: u32 = 200;

/// How long it sleeps between polls.
const SLEEP: Duration = Duration::from_micros(20);

/// The communicator of a message. Exchanges and shares run at the same time, so each has its own, or their messages
/// might be mixed up.
#[derive(Clone, Copy)]
pub(super) enum Lane {
    Exchanges,
    Shares,
}

/// What the thread is asked to do.
pub(super) enum Job {
    Transfer(Transfer),
    Abort(i32),
    /// Ends MPI and the thread, which drops the sender when it is done.
    Leave(Sender<()>),
}

/// Pieces to and from other ranks, alive until the answer.
pub(super) struct Transfer {
    pub lane: Lane,
    pub sends: Vec<Outgoing>,
    pub receives: Vec<Incoming>,
    pub answer: Sender<Result>,
}

/// The thread's state.
pub(super) struct Worker<H> {
    calls: MpiCalls<H>,
    rank: usize,
    exchanges: H,
    shares: H,
    patience: Patience,
    sent_bytes: Arc<AtomicU64>,
    underway: Vec<Underway<H>>,
    failed: Option<GroupError>,
}

/// A transfer whose messages are not all done.
struct Underway<H> {
    lane: Lane,
    messages: Vec<Message<H>>,
    since: Instant,
    answer: Sender<Result>,
}

struct Message<H> {
    request: H,
    peer: usize,
    /// The number of bytes to receive; none for a message that is sent.
    expected: Option<c_int>,
}

impl<H: Copy> Worker<H> {
    pub(super) fn new(
        calls: MpiCalls<H>,
        rank: usize,
        patience: Patience,
        sent_bytes: Arc<AtomicU64>,
    ) -> Result<Self> {
        Ok(Worker {
            exchanges: calls.communicator()?,
            shares: calls.communicator()?,
            calls,
            rank,
            patience,
            sent_bytes,
            underway: Vec::new(),
            failed: None,
        })
    }

    /// Works until it is told to leave, or all senders of jobs are dropped.
    pub(super) fn run(mut self, jobs: &Receiver<Job>) {
        let mut idle = 0;
        loop {
            let job = if self.underway.is_empty() {
                jobs.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                jobs.try_recv()
            };
            match job {
                Ok(Job::Transfer(transfer)) => self.begin(transfer),
                Ok(Job::Abort(code)) => self.calls.abort(code),
                Ok(Job::Leave(_left)) => return self.leave(),
                Err(TryRecvError::Disconnected) => return self.leave(),
                Err(TryRecvError::Empty) => {}
            }
            idle = if self.look() { 0 } else { idle + 1 };
            match idle {
                0..LOOKS => std::thread::yield_now(),
                _ => std::thread::sleep(SLEEP),
            }
        }
    }

    /// A group that failed cannot end in order: its owner aborts it.
    fn leave(&self) {
        if self.failed.is_none() && self.underway.is_empty() {
            self.calls.finalize();
        }
    }

    fn begin(&mut self, transfer: Transfer) {
        let messages = match &self.failed {
            Some(error) => Err(error.clone()),
            // SAFETY: the caller keeps the pieces alive until the answer.
            None => unsafe { self.messages(&transfer) },
        };
        match messages {
            Ok(messages) => self.underway.push(Underway {
                lane: transfer.lane,
                messages,
                since: Instant::now(),
                answer: transfer.answer,
            }),
            Err(error) => {
                // The receiver may have timed out; ignore the error.
                let _ = transfer.answer.send(Err(error.clone()));
                self.fail(error);
            }
        }
    }

    /// Begins all messages. Receives come first, so that arriving bytes need no buffer.
    ///
    /// # Safety
    /// The pieces are alive until the messages are done.
    unsafe fn messages(&self, transfer: &Transfer) -> Result<Vec<Message<H>>> {
        let communicator = match transfer.lane {
            Lane::Exchanges => self.exchanges,
            Lane::Shares => self.shares,
        };
        let mut messages = Vec::new();
        for piece in &transfer.receives {
            for (offset, count) in parts(piece.bytes, MESSAGE_BYTES) {
                // SAFETY: the caller's promise; the part lies within the piece.
                let request = unsafe {
                    let to = piece.pointer.add(offset);
                    self.calls.receive(to, count, piece.from, communicator)?
                };
                messages.push(Message {
                    request,
                    peer: piece.from,
                    expected: Some(count),
                });
            }
        }
        for piece in &transfer.sends {
            for (offset, count) in parts(piece.bytes, MESSAGE_BYTES) {
                // SAFETY: as above.
                let request = unsafe {
                    let from = piece.pointer.add(offset);
                    self.calls.send(from, count, piece.to, communicator)?
                };
                if let Lane::Exchanges = transfer.lane {
                    self.sent_bytes.fetch_add(count as u64, Ordering::Relaxed);
                }
                messages.push(Message {
                    request,
                    peer: piece.to,
                    expected: None,
                });
            }
        }
        Ok(messages)
    }

    /// Polls all messages once, answers callers whose transfers are done, and says whether any was.
    fn look(&mut self) -> bool {
        let mut moved = false;
        let mut failure = None;
        for transfer in &mut self.underway {
            let before = transfer.messages.len();
            if let Err(error) = transfer.look(&self.calls, self.rank, &self.patience) {
                failure = Some(error);
                break;
            }
            moved |= transfer.messages.len() < before;
        }
        if let Some(error) = failure {
            self.fail(error);
        }
        self.underway.retain(|transfer| {
            let done = transfer.messages.is_empty();
            if done {
                // The receiver may have timed out; ignore the error.
                let _ = transfer.answer.send(Ok(()));
            }
            !done
        });
        moved
    }

    /// Refuses everything from now on with this reason, and calls MPI only to end it: callers may now free memory that
    /// messages underway still use.
    fn fail(&mut self, error: GroupError) {
        for transfer in self.underway.drain(..) {
            let _ = transfer.answer.send(Err(error.clone()));
        }
        self.failed.get_or_insert(error);
    }
}

impl<H: Copy> Underway<H> {
    /// Removes the messages that are done.
    fn look(&mut self, calls: &MpiCalls<H>, rank: usize, patience: &Patience) -> Result {
        let mut failure = Ok(());
        self.messages.retain_mut(|message| {
            if failure.is_err() {
                return true;
            }
            let looked = calls
                .done(&mut message.request)
                .and_then(|done| match done {
                    None => Ok(true),
                    Some(came) => message
                        .expected
                        .map_or(Ok(()), |expected| {
                            pieces::fits(message.peer, rank, came as usize, Some(expected as usize))
                        })
                        .map(|()| false),
                });
            looked.unwrap_or_else(|error| {
                failure = Err(named(error, [rank, message.peer], patience));
                true
            })
        });
        failure?;
        if self.since.elapsed() > patience.timeout() && !self.messages.is_empty() {
            let what = match self.lane {
                Lane::Exchanges => "an exchange",
                Lane::Shares => "a share",
            };
            let missing = self.messages.iter().map(|message| message.peer);
            return Err(patience.late(rank, what, missing));
        }
        Ok(())
    }
}

/// A library's error with the ranks between which it happened.
fn named(error: GroupError, ranks: [usize; 2], patience: &Patience) -> GroupError {
    let [rank, peer] = ranks.map(|rank| patience.name(rank));
    GroupError::Failed(format!("between ranks {rank} and {peer}: {error}"))
}

/// Cuts a piece into parts of at most `most` bytes: where each begins, and its bytes. An empty piece is one empty part.
fn parts(bytes: usize, most: usize) -> impl Iterator<Item = (usize, c_int)> {
    let count = bytes.div_ceil(most).max(1);
    (0..count).map(move |part| {
        let offset = part * most;
        let count = c_int::try_from((bytes - offset).min(most));
        (offset, count.expect("a part has at most MESSAGE_BYTES"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_beyond_the_counts_of_mpi_goes_in_parts() {
        let all = |bytes| parts(bytes, 4).collect::<Vec<_>>();
        assert_eq!(all(0), [(0, 0)]);
        assert_eq!(all(4), [(0, 4)]);
        assert_eq!(all(9), [(0, 4), (4, 4), (8, 1)]);
        let large = parts(5 << 30, MESSAGE_BYTES);
        assert_eq!(
            large.map(|(_, count)| count as usize).sum::<usize>(),
            5 << 30
        );
    }
}
