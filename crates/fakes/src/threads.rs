//! Ranks that are threads of one process, for tests.

use collectives::{Group, GroupError, Incoming, Outgoing, Patience, pieces};
use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Makes groups whose ranks are threads.
pub struct Threads;

impl Threads {
    /// A handle for every rank, in their order; each waits a minute for the others.
    pub fn group(size: usize) -> Vec<Arc<dyn Group>> {
        Threads::with_deadline(size, Duration::from_secs(60))
    }

    /// The same with another deadline.
    pub fn with_deadline(size: usize, deadline: Duration) -> Vec<Arc<dyn Group>> {
        let meeting = Arc::new(Meeting {
            size,
            patience: Patience::new(deadline),
            state: Mutex::new(State {
                boxes: (0..size * size).map(|_| VecDeque::new()).collect(),
                ..State::default()
            }),
            changed: Condvar::new(),
        });
        let rank = |rank| -> Arc<dyn Group> {
            Arc::new(Rank {
                rank,
                meeting: Arc::clone(&meeting),
                exchanging: Mutex::new(()),
                shares: Mutex::new(0),
                sent_bytes: AtomicU64::new(0),
            })
        };
        (0..size).map(rank).collect()
    }
}

/// Where the ranks meet.
struct Meeting {
    size: usize,
    patience: Patience,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// What was sent and not yet taken; box `from * size + to`.
    boxes: Vec<VecDeque<Outgoing>>,
    /// What ranks share, by how many times they have shared before.
    rounds: HashMap<u64, Round>,
    /// Why no rank can go on.
    failed: Option<String>,
}

#[derive(Default)]
struct Round {
    bytes: HashMap<usize, Vec<u8>>,
    readers: usize,
}

impl Meeting {
    fn state(&self) -> MutexGuard<'_, State> {
        // A test that panicked elsewhere leaves the state whole: nothing in this file panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries until it is done, the group has failed, or it is too late. An attempt that has to wait says for which ranks.
    fn until<T>(
        &self,
        rank: usize,
        what: &str,
        mut attempt: impl FnMut(&mut State) -> Result<ControlFlow<T, Vec<usize>>, GroupError>,
    ) -> Result<T, GroupError> {
        let end = Instant::now() + self.patience.timeout();
        let mut state = self.state();
        loop {
            if let Some(reason) = &state.failed {
                return Err(GroupError::Failed(reason.clone()));
            }
            let error = match attempt(&mut state) {
                Ok(ControlFlow::Break(done)) => return Ok(done),
                Ok(ControlFlow::Continue(missing)) => {
                    if let Some(left) = end.checked_duration_since(Instant::now()) {
                        let waited = self.changed.wait_timeout(state, left);
                        state = waited.unwrap_or_else(PoisonError::into_inner).0;
                        continue;
                    }
                    self.patience.late(rank, what, missing)
                }
                Err(error) => error,
            };
            state.failed = Some(error.to_string());
            self.changed.notify_all();
            return Err(error);
        }
    }
}

/// One rank of threads.
struct Rank {
    rank: usize,
    meeting: Arc<Meeting>,
    exchanging: Mutex<()>,
    /// How many times this rank has shared.
    shares: Mutex<u64>,
    sent_bytes: AtomicU64,
}

impl Rank {
    fn outbox(&self, to: usize) -> usize {
        self.rank * self.meeting.size + to
    }

    /// Takes what has come; then says for which ranks this one waits, to give or to take.
    ///
    /// # Safety
    /// What is in the boxes and in `waiting` is alive.
    unsafe fn take(
        &self,
        state: &mut State,
        waiting: &mut Vec<Incoming>,
    ) -> Result<ControlFlow<(), Vec<usize>>, GroupError> {
        let before = waiting.len();
        let mut misfit = Ok(());
        waiting.retain(|comes| {
            let inbox = &mut state.boxes[comes.from * self.meeting.size + self.rank];
            let Some(goes) = inbox.pop_front() else {
                return true;
            };
            let fits = pieces::fits(comes.from, self.rank, goes.bytes, Some(comes.bytes));
            if fits.is_ok() {
                // SAFETY: the caller's promise; both have that length, and lie apart, since they are of two ranks.
                unsafe {
                    std::ptr::copy_nonoverlapping(goes.pointer, comes.pointer, goes.bytes);
                }
            }
            misfit = std::mem::replace(&mut misfit, Ok(())).and(fits);
            false
        });
        if waiting.len() < before {
            self.meeting.changed.notify_all();
        }
        misfit?;
        let to = (0..self.meeting.size).filter(|to| !state.boxes[self.outbox(*to)].is_empty());
        let missing: Vec<usize> = to.chain(waiting.iter().map(|piece| piece.from)).collect();
        Ok(match missing.is_empty() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(missing),
        })
    }
}

impl Group for Rank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.meeting.size
    }

    fn engine(&self) -> String {
        "threads".into()
    }

    unsafe fn exchange(&self, sends: &[Outgoing], receives: &[Incoming]) -> Result<(), GroupError> {
        let _turn = self
            .exchanging
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        pieces::check(self.meeting.size, sends, receives)?;
        // SAFETY: the caller's promise.
        unsafe { pieces::copy_own(self.rank, sends, receives)? };
        let mut state = self.meeting.state();
        for piece in sends.iter().filter(|piece| piece.to != self.rank) {
            state.boxes[self.outbox(piece.to)].push_back(*piece);
        }
        drop(state);
        self.meeting.changed.notify_all();
        let sent = pieces::sent_to_others(self.rank, sends);
        self.sent_bytes.fetch_add(sent, Ordering::Relaxed);

        let others = receives.iter().filter(|piece| piece.from != self.rank);
        let mut waiting: Vec<Incoming> = others.copied().collect();
        let done = self.meeting.until(self.rank, "an exchange", |state| {
            // SAFETY: this rank's pieces are alive by the caller's promise, those in the boxes by that of their senders,
            // who take them out before they return.
            unsafe { self.take(state, &mut waiting) }
        });
        if done.is_err() {
            let mut state = self.meeting.state();
            for to in 0..self.meeting.size {
                state.boxes[self.outbox(to)].clear();
            }
        }
        done
    }

    fn share(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let size = self.meeting.size;
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let number = *shares;
        *shares += 1;
        let mut state = self.meeting.state();
        let round = state.rounds.entry(number).or_default();
        round.bytes.insert(self.rank, bytes.to_vec());
        drop(state);
        self.meeting.changed.notify_all();
        self.meeting.until(self.rank, "a share", |state| {
            let round = state.rounds.entry(number).or_default();
            if round.bytes.len() < size {
                let missing = (0..size).filter(|rank| !round.bytes.contains_key(rank));
                return Ok(ControlFlow::Continue(missing.collect()));
            }
            let all = (0..size).map(|rank| round.bytes[&rank].clone()).collect();
            round.readers += 1;
            if round.readers == size {
                state.rounds.remove(&number);
            }
            Ok(ControlFlow::Break(all))
        })
    }

    fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    fn abort(&self, code: i32) {
        let mut state = self.meeting.state();
        let reason = || format!("rank {} ended the job with code {code}", self.rank);
        state.failed.get_or_insert_with(reason);
        drop(state);
        self.meeting.changed.notify_all();
    }
}
