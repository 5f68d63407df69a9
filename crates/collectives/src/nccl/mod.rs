//! NCCL, loaded at run time: bytes between GPUs, in device memory. NCCL's id, and what ranks share, go over MPI if MPI
//! started the ranks. Under torchrun they go over sockets, which meet on the port after `MASTER_PORT` or at
//! `NCCL_COMM_ID`. So one communicator is enough; two in use at once may deadlock.

mod communicator;
mod context;
mod gathering;
mod library;
mod rehearsal;

use crate::launch::Launch;
use crate::mpi::Mpi;
use crate::sockets::Sockets;
use crate::{DeviceGroup, Group, GroupError, Incoming, Outgoing, Patience, Result, pieces};
use communicator::Communicator;
use context::Context;
pub use library::NCCL_CHANNELS;
use library::{NcclLibrary, UniqueId};
use rehearsal::rehearse;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long ending or aborting a communicator may take: both are known to hang.
const END: Duration = Duration::from_secs(5);

/// The variable that says where ranks meet without MPI. It is removed from the environment, or NCCL would listen there
/// too.
const MEETING: &str = "NCCL_COMM_ID";

/// The ranks of a job, each on its GPU.
pub(crate) struct Nccl {
    launch: Launch,
    engine: String,
    patience: Patience,
    parts: Arc<Parts>,
    device_bytes: u64,
    /// The first error, after which every call fails.
    over: OnceLock<GroupError>,
    sent_bytes: AtomicU64,
}

/// Handles that the thread needs to end the communicator.
struct Parts {
    exchanges: Communicator,
    carrier: Carrier,
    context: Context,
}

/// How shared bytes travel.
enum Carrier {
    Mpi(Mpi),
    Sockets(Sockets),
}

impl Carrier {
    /// Meets the other ranks, over MPI if there is one.
    fn start(launch: &Launch, patience: Patience) -> Result<Carrier> {
        if launch.launcher.has_mpi() {
            return Mpi::start(launch, patience).map(Carrier::Mpi);
        }
        let Some(place) = &launch.meeting else {
            return Err(GroupError::Launch(format!(
                "rank {} of {} does not know where to meet the others: MASTER_ADDR and MASTER_PORT are not set, as torchrun \
                 sets them, nor is {MEETING}",
                launch.rank, launch.size
            )));
        };
        // SAFETY: `start` requires that no other thread reads the environment yet.
        unsafe { std::env::remove_var(MEETING) };
        Sockets::meet(place, [launch.rank, launch.size], patience).map(Carrier::Sockets)
    }

    fn share(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        match self {
            Carrier::Mpi(mpi) => mpi.share(bytes),
            Carrier::Sockets(sockets) => sockets.share(bytes),
        }
    }

    /// The id that rank 0 makes.
    fn id(&self, library: &NcclLibrary, rank: usize) -> Result<UniqueId> {
        let made = match rank {
            0 => unique_id(library).map(|id| id.0.to_vec()),
            _ => Ok(Vec::new()),
        };
        // The others wait for the id, so they are told that there is none.
        let shared = self.share(made.as_deref().unwrap_or_default())?;
        made?;
        let id = shared[0].as_slice().try_into().map_err(|_| {
            GroupError::Failed(
                "rank 0 could not make an id for NCCL's ranks: its message says why".into(),
            )
        })?;
        Ok(UniqueId(id))
    }

    /// The largest of all ranks' numbers.
    fn most(&self, own: u64) -> Result<u64> {
        let all = self.share(&own.to_le_bytes())?.into_iter();
        let numbers = all.filter_map(|bytes| Some(u64::from_le_bytes(*bytes.as_array()?)));
        Ok(numbers.max().unwrap_or(own))
    }
}

impl Nccl {
    /// Loads NCCL, meets the other ranks, and makes NCCL allocate its GPU memory.
    pub(crate) fn start(
        launch: &Launch,
        ordinal: usize,
        patience: Patience,
        gathered_bytes: usize,
    ) -> Result<Nccl> {
        let library = NcclLibrary::load()?;
        let mut engine = library.version.clone();
        let carrier = Carrier::start(launch, patience.clone())?;
        if let Carrier::Mpi(mpi) = &carrier {
            engine = format!("{engine}, {}", mpi.engine());
        }
        let context = Context::of(ordinal)?;
        let ranks = [launch.rank, launch.size];
        let id = carrier.id(library, launch.rank)?;
        let free = context.free_bytes()?;
        let exchanges = Communicator::new(library, id, ranks, &patience)?;
        rehearse(&exchanges, &context, ranks, &patience, gathered_bytes)?;
        let taken = free.saturating_sub(context.free_bytes()?);
        let device_bytes = carrier.most(taken)?;
        Ok(Nccl {
            launch: launch.clone(),
            engine,
            patience,
            device_bytes,
            parts: Arc::new(Parts {
                exchanges,
                carrier,
                context,
            }),
            over: OnceLock::new(),
            sent_bytes: AtomicU64::new(0),
        })
    }

    /// Makes a call unless an earlier one failed; after the first error every call returns it.
    fn unless_over<T>(&self, ask: impl FnOnce(&Parts) -> Result<T>) -> Result<T> {
        if let Some(error) = self.over.get() {
            return Err(error.clone());
        }
        ask(&self.parts).inspect_err(|error| {
            // Keep the first reason.
            let _ = self.over.set(error.clone());
        })
    }

    /// Runs `end` in another thread, and waits for it no longer than an end may take.
    fn within_bounds(&self, end: impl FnOnce(&Parts) + Send + 'static) {
        let (done, ended) = channel();
        let parts = Arc::clone(&self.parts);
        std::thread::spawn(move || {
            end(&parts);
            // The receiver may have timed out; ignore the error.
            let _ = done.send(());
        });
        let _ = ended.recv_timeout(END);
    }
}

fn unique_id(library: &NcclLibrary) -> Result<UniqueId> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: the id is written before it returns.
    let code = unsafe { (library.functions.get_unique_id)(&mut id) };
    library.checked(std::ptr::null_mut(), "ncclGetUniqueId", code)?;
    Ok(id)
}

impl Group for Nccl {
    fn rank(&self) -> usize {
        self.launch.rank
    }

    fn size(&self) -> usize {
        self.launch.size
    }

    fn engine(&self) -> String {
        self.engine.clone()
    }

    unsafe fn exchange(&self, _: &[Outgoing], _: &[Incoming]) -> Result {
        Err(GroupError::Failed(
            "NCCL moves device memory, in a stream, and was asked to move host memory".into(),
        ))
    }

    fn share(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.unless_over(|parts| parts.carrier.share(bytes))
    }

    fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    fn raise_timeout(&self, timeout: Duration) {
        self.patience.raise_to(timeout);
    }

    fn leave(&self) {
        let left = GroupError::Failed("the group of ranks was left before".into());
        if self.over.set(left).is_err() {
            return;
        }
        self.within_bounds(|parts| {
            // A communicator that cannot end in order is left as it is, since the process ends.
            let _ = parts.context.enter();
            let _ = parts.exchanges.end();
        });
        if let Carrier::Mpi(mpi) = &self.parts.carrier {
            mpi.leave();
        }
    }

    fn abort(&self, code: i32) {
        self.within_bounds(|parts| {
            let _ = parts.context.enter();
            parts.exchanges.abort();
        });
        if let Carrier::Mpi(mpi) = &self.parts.carrier {
            mpi.abort(code);
        }
        // SAFETY: ends the process at once, without running destructors or exit handlers, as intended here.
        unsafe { libc::_exit(code) }
    }

    fn on_device(&self) -> Option<&dyn DeviceGroup> {
        Some(self)
    }
}

impl DeviceGroup for Nccl {
    unsafe fn enqueue(
        &self,
        stream: *mut c_void,
        sends: &[Outgoing],
        receives: &[Incoming],
    ) -> Result {
        pieces::check(self.launch.size, sends, receives)?;
        // SAFETY: the caller's promise.
        let sent =
            self.unless_over(|parts| unsafe { parts.exchanges.enqueue(stream, sends, receives) })?;
        self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        Ok(())
    }

    fn check(&self) -> Result {
        self.unless_over(|parts| parts.exchanges.check())
    }

    fn timeout(&self) -> Duration {
        self.patience.timeout()
    }

    fn give_up(&self) {
        let late = GroupError::Late("exchanges were given up, since other ranks are late".into());
        let _ = self.over.set(late);
        self.within_bounds(|parts| {
            let _ = parts.context.enter();
            parts.exchanges.abort();
        });
    }

    fn device_bytes(&self) -> u64 {
        self.device_bytes
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.leave();
    }
}
