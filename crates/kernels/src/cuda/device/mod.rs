//! A GPU through CUDA's driver interface and cuBLASLt, both loaded when the first device is opened.
//!
//! [`CudaDevice`] is the GPU itself: its context, its streams, its memory. [`CudaDriver`] runs kernels and products on
//! it. Each queue has a stream: computation, which also orders small uploads and blocks of memory, copies each way, and
//! exchanges with other ranks. Threads read and write files. The host waits only for a download, for the end of an
//! event, and for an upload if all staging buffers are in use.

mod algorithms;
mod block;
mod blocks;
mod calls;
mod choices;
mod driver;
mod error;
mod facts;
mod graphs;
mod handles;
mod image;
mod library;
mod loading;
mod measuring;
mod modules;
mod numa;
mod other_streams;
mod problem;
mod products;
mod random_data;
mod rehearsal;
mod staging;
mod streams;
mod survey;
mod timing;
mod tuning;

pub use algorithms::{Algorithms, TunedProduct};
pub use driver::CudaDriver;
pub use facts::{DeviceFacts, device_count, device_facts, pci_bus_id};
pub use library::LoadedLibrary;
pub use measuring::Occupancy;
pub use modules::{carried, images};
pub use modules::{ptx, ptx_on_hopper};
pub use rehearsal::Rehearsal;
pub use streams::separate_connections;
pub use survey::CopyRates;

use crate::{KernelError, Queue, Result};
use blocks::Pool;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use memory::DeviceBytes;
use modules::Modules;
use products::Products;
use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::time::Duration;
use streams::Streams;
use timing::Stamps;

/// A GPU, with a context, a stream and its own pool of memory.
///
/// It belongs to the thread that opened it, whose current context it stays. A thread opens one GPU at a time.
pub struct CudaDevice {
    device: sys::CUdevice,
    facts: DeviceFacts,
    /// The stream of computation.
    stream: sys::CUstream,
    /// Whether places are shown to profilers.
    ranges: Cell<bool>,
    /// The algorithms that products use instead of the heuristic's first choice, once they are set.
    algorithms: OnceCell<Rc<Algorithms>>,
    /// Whether calls of a section are kept back. Work put into the stream meanwhile would run before them.
    keeps_back: Cell<bool>,
    // Dropped in this order: running work before the code that it runs.
    stamps: Stamps,
    pool: Pool,
    streams: Streams,
    modules: Modules,
}

/// Looks for cuBLASLt, without a GPU.
///
/// # Errors
/// [`KernelError`], with where to find it, if it cannot be loaded.
pub fn look_for_library() -> Result {
    Products::look_for_library()
}

impl CudaDevice {
    /// Opens a GPU.
    ///
    /// # Errors
    /// [`KernelError`] if there is no such GPU, it or its driver is too old, cuBLASLt is missing or too new for the
    /// driver, or the driver refuses.
    pub fn open(index: usize) -> Result<Rc<CudaDevice>> {
        let count = device_count()?;
        if index >= count {
            return Err(KernelError::device(
                "cuda",
                format!("there is no GPU {index}: the driver finds {count}, numbered from 0"),
            ));
        }
        let refused = error::of_driver("cuda");
        let device = result::device::get(index as i32).map_err(refused)?;
        let facts = DeviceFacts::ask(device, index).map_err(refused)?;
        facts.check(
            modules::code_for(facts.capability),
            modules::toolkit_version(),
        )?;
        Products::look_for_library()?;
        LoadedLibrary::look_up().check(facts.driver_version)?;
        handles::enter_primary_context(device).map_err(refused)?;
        let streams = Streams::new().map_err(refused)?;
        let pool = Pool::new(device, streams.of(Queue::Compute)).map_err(refused)?;
        let modules = Modules::new(facts.capability);
        Ok(Rc::new(CudaDevice {
            device,
            facts,
            stream: streams.of(Queue::Compute),
            ranges: Cell::new(false),
            algorithms: OnceCell::new(),
            keeps_back: Cell::new(false),
            stamps: Stamps::default(),
            pool,
            streams,
            modules,
        }))
    }

    /// The cuBLASLt that computes its products.
    pub fn library(&self) -> LoadedLibrary {
        LoadedLibrary::look_up()
    }

    /// What it is.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Its memory, as used by all processes.
    ///
    /// # Errors
    /// [`KernelError`] if the driver refuses, or earlier work failed.
    pub fn memory_bytes(&self) -> Result<DeviceBytes> {
        self.device_bytes().map_err(error::of_driver("cuda"))
    }

    /// Loads all kernels, for a rehearsal. It takes milliseconds if the binary has machine code for the GPU, and a
    /// minute if the driver has to compile it.
    ///
    /// # Errors
    /// [`KernelError`] if the driver refuses one of them, or memory is short.
    pub fn load_kernels(&self) -> Result {
        self.modules.load_all()
    }

    /// Shows profilers where a step is: phases and layers become NVTX ranges. Call it before the first place is
    /// entered.
    pub fn show_ranges(&self) {
        self.ranges.set(true);
    }

    /// Page-locked host memory that a driver of this device takes outside the ledger.
    pub fn untracked_host_bytes() -> u64 {
        staging::STAGING_BYTES + handles::Counters::bytes(Queue::ALL.len()) as u64
    }

    /// The algorithms that products of this device's drivers use, once they are set.
    pub fn algorithms(&self) -> Option<&Algorithms> {
        self.algorithms.get().map(Rc::as_ref)
    }

    /// Sets the algorithms for products of all drivers made later. Products without one use the heuristic's first
    /// choice. Only the first call counts, so products do not change during a run.
    ///
    /// # Errors
    /// Says why they are not for this device or its library.
    pub fn use_algorithms(&self, algorithms: Algorithms) -> Result<(), String> {
        algorithms.check(self)?;
        self.algorithms.get_or_init(|| Rc::new(algorithms));
        Ok(())
    }

    /// How long the host waits for work of this device before it counts as never ending: a minute at first.
    pub fn patience(&self) -> &Cell<Duration> {
        &self.streams.patience
    }

    /// Waits for all computation enqueued so far.
    fn synchronize(&self) -> Result<(), DriverError> {
        self.streams.synchronize(Queue::Compute)
    }

    /// Waits for all work enqueued so far in any queue.
    fn synchronize_all(&self) -> Result<(), DriverError> {
        let waited = Queue::ALL.map(|queue| self.streams.synchronize(queue));
        waited.into_iter().collect()
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // A failure here is one of earlier work, which reported it.
        let _ = self.synchronize_all();
        if self.streams.has_failed() {
            // Unloading would wait for the work.
            self.modules.stay();
        }
    }
}
