//! A GPU through CUDA's driver interface and cuBLASLt, both loaded when the first device is asked for.
//!
//! [`CudaDevice`] is the GPU itself: its context, its streams, its memory. [`CudaDriver`] runs kernels and products
//! on it. There is a stream for each queue: computation, with small uploads and all blocks of memory in its order, and
//! copies each way. Nothing waits but a download, the end of an event, and an upload that finds all staging buffers on
//! their way.

mod blocks;
mod error;
mod modules;
mod numa;
mod problem;
mod products;
mod staging;
mod streams;
mod survey;
mod timing;

pub use survey::CopyRates;

use super::{Driver, Gemm, Launch, Workspace};
use crate::{Event, KernelError, Queue, Reading};
use blocks::Pool;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute};
use memory::DeviceBytes;
use modules::Modules;
use products::Products;
use staging::Staging;
use std::cell::Cell;
use std::ffi::c_void;
use std::rc::Rc;
use streams::Streams;
use timing::Stamps;

/// The kernels use what came with Ampere: asynchronous copies, and tensor cores for bf16.
const CAPABILITY_MIN: (i32, i32) = (8, 0);

/// Most parameters that a kernel has.
const ARGUMENTS_MAX: usize = 17;

/// A GPU, with a context, a stream and a pool of memory of its own.
///
/// It belongs to the thread that opened it, whose current context it stays: a thread opens one GPU at a time.
pub struct CudaDevice {
    device: sys::CUdevice,
    facts: DeviceFacts,
    /// The stream of computation.
    stream: sys::CUstream,
    streams: Streams,
    pool: Pool,
    stamps: Stamps,
    /// Places are shown to profilers.
    ranges: Cell<bool>,
}

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its number, from 0, among those that CUDA_VISIBLE_DEVICES shows.
    pub index: usize,
    /// As NVIDIA calls it: `NVIDIA H200`.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: i32,
    /// Most shared memory of a block.
    pub shared_bytes_max: i32,
    /// The machine's node of memory that is closest; -1 where it has no nodes.
    pub host_node: i32,
    /// CUDA version of the driver, as 13000 for 13.0.
    pub driver_version: i32,
}

/// The number of GPUs. Asks the driver, so that a machine without one is told apart from a driver that fails.
///
/// # Errors
/// [`KernelError`] if there is no driver, or it finds no GPU.
pub fn device_count() -> Result<usize, KernelError> {
    // SAFETY: only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(KernelError::device(
            "cuda",
            "there is no NVIDIA driver (libcuda.so.1): install one, and in a container start it with the GPU \
             (--gpus all)",
        ));
    }
    let refused = |error| error::of_driver("cuda", error);
    result::init().map_err(refused)?;
    let count = result::device::get_count().map_err(refused)?;
    Ok(count.max(0) as usize)
}

/// Looks for cuBLASLt, without a GPU.
///
/// # Errors
/// [`KernelError`], with where to find it, if it cannot be loaded.
pub fn look_for_library() -> Result<(), KernelError> {
    Products::look_for_library()
}

impl CudaDevice {
    /// Opens a GPU.
    ///
    /// # Errors
    /// [`KernelError`] if there is no such GPU, it is too old, cuBLASLt is missing, or the driver refuses.
    pub fn open(index: usize) -> Result<Rc<CudaDevice>, KernelError> {
        let count = device_count()?;
        if index >= count {
            return Err(KernelError::device(
                "cuda",
                format!("there is no GPU {index}: the driver finds {count}, numbered from 0"),
            ));
        }
        let refused = |error| error::of_driver("cuda", error);
        let device = result::device::get(index as i32).map_err(refused)?;
        let facts = DeviceFacts::ask(device, index).map_err(refused)?;
        facts.check()?;
        Products::look_for_library()?;
        let context = Context::retain(device).map_err(refused)?;
        let streams = Streams::new().map_err(refused)?;
        let pool = Pool::new(device).map_err(refused)?;
        context.keep();
        Ok(Rc::new(CudaDevice {
            device,
            facts,
            stream: streams.of(Queue::Compute),
            streams,
            pool,
            stamps: Stamps::default(),
            ranges: Cell::new(false),
        }))
    }

    /// What it is.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Its memory, whoever uses it.
    ///
    /// # Errors
    /// [`KernelError`] if the driver refuses, or earlier work failed.
    pub fn memory_bytes(&self) -> Result<DeviceBytes, KernelError> {
        self.device_bytes()
            .map_err(|error| error::of_driver("cuda", error))
    }

    /// Shows profilers where a step is: phases and layers become NVTX ranges. To be called before the first is entered.
    pub fn show_ranges(&self) {
        self.ranges.set(true);
    }

    /// Page-locked host memory that a driver of this device takes outside the ledger.
    pub fn untracked_host_bytes() -> u64 {
        staging::STAGING_BYTES
    }

    /// Waits for all computation that was asked for.
    fn synchronize(&self) -> Result<(), DriverError> {
        self.streams.synchronize(Queue::Compute)
    }

    /// Waits for everything that was asked for in any queue.
    fn synchronize_all(&self) -> Result<(), DriverError> {
        let waited = Queue::ALL.map(|queue| self.streams.synchronize(queue));
        waited.into_iter().collect()
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // A failure here is one of earlier work, and was told there.
        let _ = self.synchronize_all();
        self.stamps.destroy();
        self.pool.destroy();
        self.streams.destroy();
        // SAFETY: retained in `open`, and everything that uses it holds this device.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A retained primary context, released unless the device keeps it.
struct Context(sys::CUdevice);

impl Context {
    fn retain(device: sys::CUdevice) -> Result<Context, DriverError> {
        // SAFETY: the device comes from the driver.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        let retained = Context(device);
        // SAFETY: just retained.
        unsafe { result::ctx::set_current(context) }?;
        Ok(retained)
    }

    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, in `retain`.
        let _ = unsafe { result::primary_ctx::release(self.0) };
    }
}

impl DeviceFacts {
    fn ask(device: sys::CUdevice, index: usize) -> Result<DeviceFacts, DriverError> {
        // SAFETY: the device comes from the driver.
        let ask = |attribute| unsafe { result::device::get_attribute(device, attribute) };
        let mut driver_version = 0;
        // SAFETY: writes one number.
        unsafe { sys::cuDriverGetVersion(&mut driver_version) }.result()?;
        Ok(DeviceFacts {
            index,
            name: result::device::get_name(device)?,
            capability: (
                ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max: ask(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            // Drivers before CUDA 12.2 do not know it.
            host_node: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID).unwrap_or(-1),
            driver_version,
        })
    }

    fn check(&self) -> Result<(), KernelError> {
        if self.capability >= CAPABILITY_MIN {
            return Ok(());
        }
        let ((major, minor), (least, least_minor)) = (self.capability, CAPABILITY_MIN);
        Err(KernelError::device(
            "cuda",
            format!(
                "{} has compute capability {major}.{minor}; the kernels need {least}.{least_minor} (Ampere) or newer",
                self.name
            ),
        ))
    }
}

/// Runs kernels, products and copies on a GPU.
pub struct CudaDriver {
    modules: Modules,
    products: Products,
    staging: Staging,
    device: Rc<CudaDevice>,
}

impl CudaDriver {
    /// A driver of an open device.
    ///
    /// # Errors
    /// [`KernelError`] if cuBLASLt does not start or page-locked memory is refused.
    pub fn new(device: &Rc<CudaDevice>) -> Result<CudaDriver, KernelError> {
        Ok(CudaDriver {
            modules: Modules::new(device.facts.capability),
            products: Products::new()?,
            staging: Staging::new(device)?,
            device: device.clone(),
        })
    }

    /// Version of cuBLASLt, as 130002 for 13.0.2.
    pub fn library_version(&self) -> usize {
        self.products.version()
    }

    /// Loads the modules of all kernels, which otherwise happens when the first of each is launched.
    ///
    /// # Errors
    /// [`KernelError`] if the driver cannot compile one of them for this GPU.
    pub fn load_modules(&self) -> Result<(), KernelError> {
        self.modules.load_all()
    }
}

impl Driver for CudaDriver {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), KernelError> {
        let function = self.modules.function(launch.kernel, launch.shared_bytes)?;
        // A step has thousands of launches: none of them allocates.
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
                self.device.stream,
                arguments,
            )
        };
        launched.map_err(|error| error::of_driver(launch.kernel.name, error))
    }

    unsafe fn gemm(&self, gemm: &Gemm, workspace: Workspace) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.products.compute(gemm, workspace, self.device.stream) }
    }

    unsafe fn copy_to_device(&self, to: *mut u8, bytes: &[u8]) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.staging.copy(to, bytes) }
    }

    unsafe fn copy_to_host(&self, bytes: &mut [u8], from: *const u8) -> Result<(), KernelError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (to, stream) = (bytes.as_mut_ptr().cast(), self.device.stream);
        // SAFETY: the caller's promise; `bytes` is borrowed until the copy is done.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from as u64, bytes.len(), stream) };
        let done = copied.result().and_then(|()| self.device.synchronize());
        done.map_err(|error| error::of_driver("download", error))
    }

    unsafe fn clear(&self, to: *mut u8, bytes: usize) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        let set = unsafe { self.device.set(to, 0, bytes) };
        set.map_err(|error| error::of_driver("clear", error))
    }

    unsafe fn start_copy(
        &self,
        queue: Queue,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        let asked = unsafe { self.device.streams.copy(queue, to, from, bytes) };
        asked.map_err(|error| error::of_driver("start_copy", error))
    }

    unsafe fn start_read(&self, from: *const u8, bytes: usize) -> Result<Reading, KernelError> {
        let to = self.staging.reading();
        let stream = self.device.stream;
        // SAFETY: the caller's promise; the place is in pinned memory and as large as a reading can be.
        let asked = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from as u64, bytes, stream) };
        let recorded = asked
            .result()
            .and_then(|()| self.device.streams.record(Queue::Compute));
        let event = recorded.map_err(|error| error::of_driver("start_read", error))?;
        // SAFETY: the place is used again by the `READINGS_MAX`th reading from here.
        Ok(unsafe { Reading::after(event, to, bytes) })
    }

    fn record(&self, queue: Queue) -> Result<Event, KernelError> {
        let recorded = self.device.streams.record(queue);
        recorded.map_err(|error| error::of_driver("record", error))
    }

    fn wait(&self, queue: Queue, event: Event) -> Result<(), KernelError> {
        let asked = self.device.streams.wait(queue, event);
        asked.map_err(|error| error::of_driver("wait", error))
    }

    fn finish(&self, event: Event) -> Result<(), KernelError> {
        let waited = self.device.streams.finish(event);
        waited.map_err(|error| error::of_driver("finish", error))
    }
}
