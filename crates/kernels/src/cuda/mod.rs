//! The operations on a CUDA device: their launches and arguments.
//!
//! Each operation family has a file, named like the CPU's and like its source in `kernels/`. Each operation chooses
//! blocks and threads from shapes alone. It then launches through a [`Driver`]: a device, or the emulation that runs
//! the same sources on the processor in tests.

mod adafactor;
mod adamw;
pub(crate) mod attention;
mod cache;
mod calls;
mod columns;
mod cross_entropy;
mod delta_cache;
mod dequantise;
#[cfg(feature = "cuda")]
mod device;
mod driver;
mod dropout;
mod elementwise;
mod embedding;
mod experts;
mod extent;
pub(crate) mod flash;
mod fp8;
pub(crate) mod gated_delta;
mod gated_norm;
mod gelu;
mod kind;
mod latent;
mod layer_norm;
mod listing;
mod matmul;
mod muon;
mod norm;
mod norm_backward;
mod policy;
mod positions;
mod preference;
mod qkv;
mod rms_norm;
mod rotary;
mod router;
mod short_convolution;
mod sigmoid_gate;
mod sinks;
mod sum_in_order;
mod swiglu;

pub use calls::{
    Argument, BIAS_ALIGNMENT_BYTES, Gemm, Kernel, Launch, Matrix, PRODUCT_ELEMENTS_MAX,
    SCALE_ALIGNMENT_BYTES, Workspace,
};
#[cfg(feature = "cuda")]
pub use device::{
    Algorithms, CopyRates, CudaDevice, CudaDriver, DeviceFacts, LoadedLibrary, Occupancy,
    Rehearsal, TunedProduct, carried, device_count, device_facts, images, look_for_library,
    pci_bus_id, ptx, ptx_on_hopper, separate_connections,
};
pub use driver::Driver;
pub use experts::BLOCKS_ENOUGH;
pub use flash::{flash_has_sm90, flash_shared_bytes};
pub use kind::KernelKind;
pub use listing::{Call, Listed, Listing};

use crate::backend::TimedWork;
use crate::families::families;
use crate::workspace::lease_workspace;
use crate::{
    Backend, Event, Init, Kernels, Operation, Queue, Queues, Reading, Request, Result, Section,
    Target,
};
use calls::arguments;
use extent::Extent;
use memory::{Buffer, DType, In, Memory, Out, OutOfMemory};
use std::cell::Cell;
use std::time::Duration;

/// A kernel of a source file by its name, followed by the types that it is made for.
macro_rules! kernel {
    ($source:literal, $name:expr) => {
        $crate::cuda::Kernel {
            source: $source,
            name: $name,
        }
    };
    ($source:literal, $name:expr, $dtype:expr) => {
        $crate::cuda::kernel!(
            $source,
            match $dtype {
                memory::DType::F32 => concat!($name, "_f32"),
                memory::DType::BF16 => concat!($name, "_bf16"),
                other => $crate::cuda::no_kernel($name, &[other]),
            }
        )
    };
    ($source:literal, $name:expr, $out:expr, $x:expr) => {
        $crate::cuda::kernel!(
            $source,
            match ($out, $x) {
                (memory::DType::F32, memory::DType::F32) => concat!($name, "_f32_f32"),
                (memory::DType::F32, memory::DType::BF16) => concat!($name, "_f32_bf16"),
                (memory::DType::BF16, memory::DType::F32) => concat!($name, "_bf16_f32"),
                (memory::DType::BF16, memory::DType::BF16) => concat!($name, "_bf16_bf16"),
                (out, x) => $crate::cuda::no_kernel($name, &[out, x]),
            }
        )
    };
}
use kernel;

/// A kernel of a type, and those beside it whose names go on like this.
macro_rules! kernels {
    ($source:literal, $name:expr, $dtype:expr, $($form:literal),+) => {
        [
            $crate::cuda::kernel!($source, $name, $dtype),
            $($crate::cuda::kernel!($source, concat!($name, $form), $dtype),)+
        ]
    };
}
use kernels;

/// Calls the function of an operation.
macro_rules! launch {
    ([$cuda:ident $operation:ident] $([$($file:ident: $($name:ident $function:ident),+;)+])+) => {
        match $operation {
            $($($(Operation::$name(op) => $file::$function($cuda, op),)+)+)+
        }
    };
}

fn no_kernel(name: &str, dtypes: &[DType]) -> ! {
    unreachable!("the check before admits only f32 and bf16: no `{name}` of {dtypes:?}")
}

/// Kernels on a CUDA device.
pub struct Cuda<D> {
    driver: D,
    workspace: Buffer,
    /// The queue of the current operation.
    queue: Cell<Queue>,
    /// The most elements that a matrix of one product of the library reaches over.
    product_elements_max: usize,
    /// Whether codes of FP8 are made by the instruction where there is one, or else by integers.
    converts_fp8: Cell<bool>,
    /// Which kernels compute flash attention in bf16.
    attention: KernelKind,
    /// Which kernels compute products of experts in bf16.
    experts: KernelKind,
    /// From so many tiles of products of experts on blocks for Hopper compute several.
    blocks_enough: usize,
}

impl<D: Driver> Cuda<D> {
    /// Leases the workspace for a compute type in the device's memory.
    ///
    /// # Errors
    /// [`OutOfMemory`] if a limit refuses the workspace.
    pub fn new(driver: D, memory: &Memory, dtype: DType) -> Result<Kernels<Cuda<D>>, OutOfMemory> {
        let workspace = lease_workspace(memory, Target::Cuda, dtype)?
            .expect("every compute type has a workspace on CUDA");
        Ok(Kernels::new(Cuda {
            driver,
            workspace,
            queue: Cell::new(Queue::Compute),
            product_elements_max: PRODUCT_ELEMENTS_MAX,
            converts_fp8: Cell::new(true),
            attention: KernelKind::Sm80,
            experts: KernelKind::Sm80,
            blocks_enough: BLOCKS_ENOUGH,
        }))
    }

    /// Makes all calls of an operation, already checked.
    fn launch_operation(&self, queue: Queue, operation: Operation) -> Result {
        self.driver.begin_operation(&operation);
        self.queue.set(queue);
        families!(launch! self operation)
    }

    /// Launches a kernel of a checked operation, in the operation's queue. In queues other than the computation's, the
    /// operation's caller is responsible for the order. Does nothing without blocks.
    fn launch(&self, kernel: Kernel, extent: Extent, arguments: &[Argument]) -> Result {
        if extent.is_empty() {
            return Ok(());
        }
        let (grid, block) = extent.checked(kernel.name)?;
        let launch = Launch {
            queue: self.queue.get(),
            kernel,
            grid,
            block,
            shared_bytes: extent.shared_bytes as u32,
            arguments,
        };
        // SAFETY: the arguments come from views, which borrow live tensors, the outputs exclusively; each operation
        // passes its kernel's parameters, which the emulation verifies.
        unsafe { self.driver.launch(&launch) }
    }

    /// The workspace of products.
    fn workspace(&self) -> Workspace {
        Workspace {
            pointer: self.workspace.view().pointer(),
            bytes: self.workspace.bytes() as usize,
        }
    }

    /// Computes products of a checked operation's tensors, in the computation's queue: products of all operations share the
    /// workspace.
    fn gemm(&self, gemm: &Gemm) -> Result {
        assert_eq!(
            self.queue.get(),
            Queue::Compute,
            "a product runs in no other queue"
        );
        let workspace = self.workspace();
        // SAFETY: the matrices come from views, which borrow live tensors, the outputs exclusively; the workspace
        // is this product's alone since the stream runs one operation after the other.
        unsafe { self.driver.gemm(gemm, workspace) }
    }
}

impl<D: Driver> Kernels<Cuda<D>> {
    /// Cuts products whose matrices reach over more elements than that, in place of [`PRODUCT_ELEMENTS_MAX`].
    pub fn cutting_products(self, elements_max: usize) -> Kernels<Cuda<D>> {
        Kernels::new(Cuda {
            product_elements_max: elements_max,
            ..self.backend
        })
    }
}

impl<D: Driver> Backend for Cuda<D> {
    fn target(&self) -> Target {
        Target::Cuda
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn widens(&self) -> bool {
        true
    }

    unsafe fn ask(&self, queue: Queue, request: Request) -> Result {
        // SAFETY: the caller's promise.
        unsafe {
            match request {
                Request::Operation(operation) => self.launch_operation(queue, operation),
                Request::Copy(out, x) => self.driver.start_copy(queue, out, x),
                Request::Disk(copy) => self.driver.start_disk(copy),
                Request::Exchange(exchange) => self.driver.start_exchange(exchange),
            }
        }
    }

    unsafe fn write(&self, out: Out, bytes: &[u8]) -> Result {
        assert!(!out.pointer().is_null(), "a shape has no data");
        // SAFETY: the view covers as many bytes as `bytes`.
        unsafe { self.driver.copy_to_device(out.pointer(), bytes) }
    }

    unsafe fn read(&self, bytes: &mut [u8], x: In) -> Result {
        assert!(!x.pointer().is_null(), "a shape has no data");
        // SAFETY: as in `write`.
        unsafe { self.driver.copy_to_host(bytes, x.pointer()) }
    }

    unsafe fn start_reading(&self, x: In) -> Result<Reading> {
        // SAFETY: the view covers as many bytes.
        unsafe { self.driver.start_read(x.pointer(), x.bytes()) }
    }
}

impl<D: Driver> Queues for Cuda<D> {
    fn rank(&self) -> usize {
        self.driver.rank()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.driver.record(queue)
    }

    fn wait(&self, queue: Queue, event: Event, reason: &'static str) -> Result {
        self.driver.wait(queue, event, reason)
    }

    fn finish(&self, event: Event) -> Result {
        self.driver.finish(event)
    }

    fn is_over(&self, event: Event) -> bool {
        self.driver.is_over(event)
    }

    fn timed(&self, queue: Queue, work: TimedWork) -> Option<Result<Duration>> {
        self.driver.timed(queue, work)
    }

    fn begin_section(&self, section: Section) -> Result {
        self.driver.begin_section(section)
    }

    fn end_section(&self, is_whole: bool) -> Result {
        self.driver.end_section(is_whole)
    }

    fn section_refusal(&self) -> Option<String> {
        self.driver.section_refusal()
    }
}

/// An `int` of a kernel.
fn int(number: usize) -> Argument {
    Argument::Int(number as i32)
}

/// Whether a result is added to the output's contents.
fn accumulates(init: &Init) -> Argument {
    matches!(init, Init::Accumulate).into()
}
