//! Runs kernels, products and copies on a GPU.

use super::calls::Call;
use super::graphs::Sections;
use super::products::Products;
use super::staging::Staging;
use super::streams::is_worker;
use super::{CudaDevice, error};
use crate::backend::TimedWork;
use crate::cuda::{Driver, Gemm, Launch, Workspace};
use crate::{DiskCopy, Event, Exchange, Queue, Queues, Reading, Result, Section};
use collectives::Group;
use cudarc::driver::{result, sys};
use memory::{In, Out};
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Most parameters that a kernel has.
pub(super) const ARGUMENTS_MAX: usize = 25;

/// Runs kernels, products and copies on an open GPU.
///
/// Calls within a section are kept back until its end (`graphs.rs`). Every call here first asks whether it is kept
/// back, or releases the calls that were.
pub struct CudaDriver {
    // Dropped first, because graphs use the fields below.
    pub(super) sections: Sections,
    pub(super) products: Products,
    staging: Staging,
    pub(super) device: Rc<CudaDevice>,
}

impl CudaDriver {
    /// A driver of an open device.
    ///
    /// # Errors
    /// [`crate::KernelError`] if cuBLASLt does not start or page-locked memory is refused.
    pub fn new(device: &Rc<CudaDevice>) -> Result<CudaDriver> {
        Ok(CudaDriver {
            sections: Sections::default(),
            products: Products::new(device.algorithms.get().cloned(), device.facts())?,
            staging: Staging::new(device)?,
            device: device.clone(),
        })
    }

    /// As [`CudaDriver::new`], for a rank of a group that exchanges pieces.
    ///
    /// # Errors
    /// As for [`CudaDriver::new`].
    pub fn in_group(device: &Rc<CudaDevice>, group: Arc<dyn Group>) -> Result<CudaDriver> {
        device.streams.join(group);
        CudaDriver::new(device)
    }
}

impl CudaDriver {
    /// Launches a kernel at once, even in a section.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    pub(super) unsafe fn launch_now(&self, launch: &Launch) -> Result {
        let modules = &self.device.modules;
        let function = modules.function(launch.kernel, launch.shared_bytes)?;
        // Nothing is allocated here, because a step has thousands of launches.
        let mut addresses = [std::ptr::null_mut::<c_void>(); ARGUMENTS_MAX];
        let arguments = &mut addresses[..launch.arguments.len()];
        for (address, argument) in arguments.iter_mut().zip(launch.arguments) {
            *address = argument.address();
        }
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // SAFETY: the caller's promise: the arguments are the kernel's. The driver reads them before it returns.
        let launched = unsafe {
            result::launch_kernel(
                function.handle,
                (gx, gy, gz),
                (bx, by, bz),
                launch.shared_bytes,
                self.device.streams.of(launch.queue),
                arguments,
            )
        };
        launched.map_err(error::of_driver(launch.kernel.name))
    }

    /// Sets bytes to 0 at once, even in a section.
    ///
    /// # Safety
    /// As for [`Driver::clear`].
    pub(super) unsafe fn clear_now(&self, to: *mut u8, bytes: usize) -> Result {
        // SAFETY: the caller's promise.
        let set = unsafe { self.device.set(to, 0, bytes) };
        set.map_err(error::of_driver("clear"))
    }
}

impl Driver for CudaDriver {
    unsafe fn launch(&self, launch: &Launch) -> Result {
        if self.keeps_launch(launch)? {
            // Loads the code now, because none may be loaded while a stream captures.
            let modules = &self.device.modules;
            return modules
                .function(launch.kernel, launch.shared_bytes)
                .map(|_| ());
        }
        self.device.streams.make_room_for(launch.queue, 1)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch_now(launch) }
    }

    unsafe fn gemm(&self, gemm: &Gemm, workspace: Workspace) -> Result {
        if self.keeps_gemm(gemm, workspace)? {
            return Ok(());
        }
        self.device.streams.make_room_for(Queue::Compute, 1)?;
        // SAFETY: the caller's promise.
        unsafe { self.products.compute(gemm, workspace, self.device.stream) }
    }

    unsafe fn copy_to_device(&self, to: *mut u8, bytes: &[u8]) -> Result {
        self.let_go()?;
        // SAFETY: the caller's promise.
        unsafe { self.staging.copy(to, bytes) }
    }

    unsafe fn copy_to_host(&self, bytes: &mut [u8], from: *const u8) -> Result {
        if bytes.is_empty() {
            return Ok(());
        }
        self.let_go()?;
        // A copy to memory that is not page-locked blocks until its stream is done, without a deadline if other ranks
        // are gone. So this waits first, with a deadline.
        self.finish(self.record(Queue::Compute)?)?;
        let (to, stream) = (bytes.as_mut_ptr().cast(), self.device.stream);
        // SAFETY: the caller's promise; `bytes` is borrowed until the copy is done.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from as u64, bytes.len(), stream) };
        let done = copied.result().and_then(|()| self.device.synchronize());
        self.device.streams.check()?;
        done.map_err(error::of_driver("download"))
    }

    unsafe fn clear(&self, to: *mut u8, bytes: usize) -> Result {
        if self.keeps(Call::Clear { to, bytes })? {
            return Ok(());
        }
        self.device.streams.make_room_for(Queue::Compute, 1)?;
        // SAFETY: the caller's promise.
        unsafe { self.clear_now(to, bytes) }
    }

    unsafe fn start_copy(&self, queue: Queue, out: Out, x: In) -> Result {
        let (to, from, bytes) = (out.pointer(), x.pointer(), x.bytes());
        let call = Call::Copy {
            queue,
            to,
            from,
            bytes,
        };
        if self.keeps(call)? {
            return Ok(());
        }
        self.device.streams.make_room_for(queue, 1)?;
        // SAFETY: the caller's promise.
        unsafe { self.device.streams.copy(queue, to, from, bytes) }
    }

    unsafe fn start_disk(&self, copy: DiskCopy) -> Result {
        self.let_go()?;
        // SAFETY: the caller's promise.
        unsafe { self.device.streams.disk(copy) }
    }

    unsafe fn start_exchange(&self, exchange: Exchange) -> Result {
        self.let_go()?;
        // SAFETY: the caller's promise.
        unsafe { self.device.streams.exchange(exchange) }
    }

    unsafe fn start_read(&self, from: *const u8, bytes: usize) -> Result<Reading> {
        self.let_go()?;
        self.device.streams.make_room_for(Queue::Compute, 1)?;
        let to = self.staging.reading();
        let stream = self.device.stream;
        // SAFETY: the caller's promise; the place is in pinned memory and as large as a reading can be.
        let asked = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from as u64, bytes, stream) };
        asked.result().map_err(error::of_driver("start_read"))?;
        let event = self.device.streams.record(Queue::Compute)?;
        // SAFETY: the place is used again by the `READINGS_MAX`th reading from here.
        Ok(unsafe { Reading::after(event, to, bytes) })
    }
}

impl Queues for CudaDriver {
    fn rank(&self) -> usize {
        self.device.streams.rank()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        if is_worker(queue) {
            self.let_go()?;
        } else if let Some(event) = self.keeps_record(queue)? {
            return Ok(event);
        }
        self.device.streams.record(queue)
    }

    fn wait(&self, queue: Queue, event: Event, _reason: &'static str) -> Result {
        if is_worker(queue) || is_worker(event.queue) {
            self.let_go()?;
        } else if self.keeps_wait(queue, event)? {
            return Ok(());
        }
        self.device.streams.wait(queue, event)
    }

    fn finish(&self, event: Event) -> Result {
        self.let_go()?;
        self.device.streams.finish(event)
    }

    fn is_over(&self, event: Event) -> bool {
        self.device.streams.is_over(event)
    }

    fn timed(&self, queue: Queue, work: TimedWork) -> Option<Result<Duration>> {
        (!is_worker(queue)).then(|| {
            self.let_go()?;
            self.device.timed(queue, work)
        })
    }

    fn begin_section(&self, section: Section) -> Result {
        self.device.streams.check()?;
        self.open_section(section);
        Ok(())
    }

    fn end_section(&self, is_whole: bool) -> Result {
        self.close_section(is_whole)
    }

    fn section_refusal(&self) -> Option<String> {
        self.sections.refusal()
    }
}
