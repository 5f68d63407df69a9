//! MPI, loaded at run time: bytes between processes, in host memory. One thread makes all calls of the library, which
//! every library allows (`MPI_THREAD_FUNNELED`). It serves all transfers that are underway, so that one thread can
//! share while another exchanges.

mod calls;
mod interface;
mod library;
mod worker;

use crate::launch::Launch;
use crate::{Group, GroupError, Incoming, Outgoing, Patience, Result, pieces};
use calls::MpiCalls;
use interface::AnyCalls;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use worker::{Job, Lane, Transfer, Worker};

/// How long a launcher has to forward what a rank has just written.
const FORWARDING: Duration = Duration::from_millis(500);

/// How long leaving or aborting a group may take: libraries are known to hang there.
const END: Duration = Duration::from_secs(5);

/// How much longer than the thread's own deadline callers wait for its answer. After that, the thread hangs in the
/// library.
const SLACK: Duration = Duration::from_secs(5);

/// The ranks of an MPI job.
pub(crate) struct Mpi {
    launch: Launch,
    engine: String,
    patience: Patience,
    jobs: Sender<Job>,
    /// One share at a time.
    sharing: Mutex<()>,
    sent_bytes: Arc<AtomicU64>,
}

impl Mpi {
    /// Loads the launcher's library, and starts it.
    pub(crate) fn start(launch: &Launch, patience: Patience) -> Result<Mpi> {
        let (jobs, asked) = channel();
        let (tell, started) = channel();
        let sent_bytes = Arc::new(AtomicU64::new(0));
        let (theirs, counted) = (launch.clone(), Arc::clone(&sent_bytes));
        let waits = patience.clone();
        let thread = std::thread::Builder::new()
            .name("mpi".into())
            .spawn(move || {
                let calls = library::load(theirs.launcher).and_then(|library| {
                    // SAFETY: `load` found it under the name of an MPI library.
                    let calls = unsafe { AnyCalls::of(library) };
                    calls.map_err(|reason| {
                        GroupError::Missing(format!("the MPI library lacks a function: {reason}"))
                    })
                });
                match calls {
                    Ok(AnyCalls::Addresses(calls)) => {
                        work(calls, &theirs, waits, counted, &tell, &asked)
                    }
                    Ok(AnyCalls::Numbers(calls)) => {
                        work(calls, &theirs, waits, counted, &tell, &asked)
                    }
                    // Who started this thread waits for it, or is gone.
                    Err(error) => drop(tell.send(Err(error))),
                }
            });
        thread.map_err(|error| GroupError::Failed(format!("no thread for MPI: {error}")))?;
        let engine = started
            .recv_timeout(patience.timeout())
            .unwrap_or_else(|error| {
                Err(match error {
                    RecvTimeoutError::Timeout => GroupError::Late(format!(
                        "MPI did not start within {} s on rank {}: the other ranks did not arrive",
                        patience.timeout().as_secs_f64(),
                        launch.rank
                    )),
                    RecvTimeoutError::Disconnected => {
                        GroupError::Failed("MPI did not start".into())
                    }
                })
            })?;
        Ok(Mpi {
            launch: launch.clone(),
            engine,
            patience,
            jobs,
            sharing: Mutex::new(()),
            sent_bytes,
        })
    }

    fn transfer(&self, lane: Lane, sends: &[Outgoing], receives: &[Incoming]) -> Result {
        let rank = self.launch.rank;
        let (answer, answered) = channel();
        let transfer = Transfer {
            lane,
            sends: sends
                .iter()
                .filter(|piece| piece.to != rank)
                .copied()
                .collect(),
            receives: receives
                .iter()
                .filter(|piece| piece.from != rank)
                .copied()
                .collect(),
            answer,
        };
        let left = || GroupError::Failed("the group of ranks was left before".into());
        self.jobs
            .send(Job::Transfer(transfer))
            .map_err(|_| left())?;
        match answered.recv_timeout(self.patience.timeout() + SLACK) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(left()),
            Err(RecvTimeoutError::Timeout) => Err(GroupError::Late(format!(
                "{} hangs on rank {rank}",
                self.engine
            ))),
        }
    }
}

/// The body of the thread.
fn work<H: Copy>(
    calls: MpiCalls<H>,
    launch: &Launch,
    patience: Patience,
    sent_bytes: Arc<AtomicU64>,
    tell: &Sender<Result<String>>,
    asked: &Receiver<Job>,
) {
    let engine = calls.version();
    let worker = calls.init().and_then(|()| {
        let seen = calls.rank_and_size()?;
        if seen != (launch.rank, launch.size) {
            return Err(GroupError::Launch(format!(
                "{engine} sees rank {} of {}, but {} started rank {} of {}: the library belongs to another launcher; start with \
                 its own mpirun, or name the launcher's library in TRAINER_MPI",
                seen.0, seen.1, launch.launcher, launch.rank, launch.size
            )));
        }
        Worker::new(calls, launch.rank, patience, sent_bytes)
    });
    // Who started this thread waits for it, or is gone.
    match worker {
        Ok(worker) => {
            let _ = tell.send(Ok(engine));
            worker.run(asked);
        }
        Err(error) => drop(tell.send(Err(error))),
    }
}

impl Group for Mpi {
    fn rank(&self) -> usize {
        self.launch.rank
    }

    fn size(&self) -> usize {
        self.launch.size
    }

    fn engine(&self) -> String {
        self.engine.clone()
    }

    unsafe fn exchange(&self, sends: &[Outgoing], receives: &[Incoming]) -> Result {
        pieces::check(self.launch.size, sends, receives)?;
        // SAFETY: the caller's promise.
        unsafe { pieces::copy_own(self.launch.rank, sends, receives)? };
        self.transfer(Lane::Exchanges, sends, receives)
    }

    fn share(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let _turn = self.sharing.lock().unwrap_or_else(PoisonError::into_inner);
        pieces::share(
            self.launch.rank,
            self.launch.size,
            bytes,
            |sends, receives| self.transfer(Lane::Shares, sends, receives),
        )
    }

    fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    fn raise_timeout(&self, timeout: Duration) {
        self.patience.raise_to(timeout);
    }

    fn leave(&self) {
        let (left, leaving) = channel();
        if self.jobs.send(Job::Leave(left)).is_ok() {
            // The thread drops the sender when it is done; after the timeout, do not wait longer.
            let _ = leaving.recv_timeout(END);
        }
    }

    fn abort(&self, code: i32) {
        // A launcher drops what it has not yet forwarded of a rank's output when that rank aborts: the reason would be lost.
        std::thread::sleep(FORWARDING);
        // If the thread hangs or is gone, it does not abort. Then this process ends itself, and the launcher ends the
        // others.
        let _ = self.jobs.send(Job::Abort(code));
        std::thread::sleep(END);
        // SAFETY: ends the process at once, without running destructors or exit handlers, as intended here.
        unsafe { libc::_exit(code) }
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        self.leave();
    }
}
