//! The operations on a CUDA device: checks, launches, and arguments.
//!
//! One file an operation family, named like the CPU's and like its source in `kernels/`. Each operation checks, then
//! chooses blocks and threads from the shapes alone, then launches through a [`Driver`]: a device, or the emulation
//! that runs the same sources on the processor in tests.

mod adamw;
mod attention;
mod cross_entropy;
#[cfg(feature = "cuda")]
mod device;
mod driver;
mod elementwise;
mod embedding;
mod extent;
mod flash;
mod matmul;
mod norm;
mod rms_norm;
mod rotary;
mod swiglu;

#[cfg(feature = "cuda")]
pub use device::{CopyRates, CudaDevice, CudaDriver, DeviceFacts, device_count, look_for_library};
pub use driver::{Argument, Driver, Gemm, Kernel, Launch, Matrix, Workspace};

use crate::meta::lease_workspace;
use crate::queue::{bytes_of, count_download, count_upload};
use crate::{
    AdamW, AttentionShape, Event, FlashOptions, Init, KernelError, Kernels, Queue, Queues, Reading,
    Target, Traffic, check,
};
use extent::Extent;
use memory::{Buffer, DType, In, Memory, Out, OutOfMemory};
use std::cell::Cell;

/// A kernel of a source file by its name, followed by the types that it is made for.
macro_rules! kernel {
    ($source:literal, $name:expr) => {
        Kernel {
            source: $source,
            name: $name,
        }
    };
    ($source:literal, $name:literal, $dtype:expr) => {
        kernel!(
            $source,
            match $dtype {
                DType::F32 => concat!($name, "_f32"),
                DType::BF16 => concat!($name, "_bf16"),
                other => no_kernel($name, &[other]),
            }
        )
    };
    ($source:literal, $name:literal, $out:expr, $x:expr) => {
        kernel!(
            $source,
            match ($out, $x) {
                (DType::F32, DType::F32) => concat!($name, "_f32_f32"),
                (DType::F32, DType::BF16) => concat!($name, "_f32_bf16"),
                (DType::BF16, DType::F32) => concat!($name, "_bf16_f32"),
                (DType::BF16, DType::BF16) => concat!($name, "_bf16_bf16"),
                (out, x) => no_kernel($name, &[out, x]),
            }
        )
    };
}
use kernel;

fn no_kernel(name: &str, dtypes: &[DType]) -> ! {
    unreachable!("the check before admits only f32 and bf16: no `{name}` of {dtypes:?}")
}

/// Kernels on a CUDA device.
pub struct Cuda<D> {
    driver: D,
    workspace: Buffer,
    traffic: Cell<Traffic>,
}

impl<D: Driver> Cuda<D> {
    /// Leases the workspace for a compute type in the device's memory.
    ///
    /// # Errors
    /// [`OutOfMemory`] if a limit refuses the workspace.
    pub fn new(driver: D, memory: &Memory, dtype: DType) -> Result<Cuda<D>, OutOfMemory> {
        let workspace = lease_workspace(memory, Target::Cuda, dtype)?
            .expect("every compute type has a workspace on CUDA");
        Ok(Cuda {
            driver,
            workspace,
            traffic: Cell::default(),
        })
    }

    /// Launches a kernel on tensors that the operation has checked; nothing if there are no blocks.
    fn launch(
        &self,
        kernel: Kernel,
        extent: Extent,
        arguments: &[Argument],
    ) -> Result<(), KernelError> {
        self.launch_in(Queue::Compute, kernel, extent, arguments)
    }

    /// The same in a queue: in another than the computation's, the operation's caller answers for the order.
    fn launch_in(
        &self,
        queue: Queue,
        kernel: Kernel,
        extent: Extent,
        arguments: &[Argument],
    ) -> Result<(), KernelError> {
        if extent.is_empty() {
            return Ok(());
        }
        let (grid, block) = extent.checked(kernel.name)?;
        let launch = Launch {
            queue,
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

    /// Computes products of tensors that the operation has checked.
    fn gemm(&self, gemm: &Gemm) -> Result<(), KernelError> {
        let workspace = Workspace {
            pointer: self.workspace.view().pointer(),
            bytes: self.workspace.bytes() as usize,
        };
        // SAFETY: the matrices come from views, which borrow live tensors, the outputs exclusively; the workspace
        // is this product's alone since the stream runs one operation after the other.
        unsafe { self.driver.gemm(gemm, workspace) }
    }
}

impl<D: Driver> Queues for Cuda<D> {
    fn runs_ahead(&self) -> bool {
        true
    }

    unsafe fn start_upload(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_upload", &out, &x)?;
        count_upload(&self.traffic, bytes_of(&x));
        // SAFETY: the caller's promise, and the sides fit.
        unsafe {
            self.driver
                .start_copy(Queue::Upload, out.pointer(), x.pointer(), bytes_of(&x))
        }
    }

    unsafe fn start_download(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_download", &out, &x)?;
        count_download(&self.traffic, bytes_of(&x));
        // SAFETY: the caller's promise, and the sides fit.
        unsafe {
            self.driver
                .start_copy(Queue::Download, out.pointer(), x.pointer(), bytes_of(&x))
        }
    }

    fn start_read(&self, x: In) -> Result<Reading, KernelError> {
        check::start_read(&x)?;
        count_download(&self.traffic, bytes_of(&x));
        // SAFETY: the view covers as many bytes.
        unsafe { self.driver.start_read(x.pointer(), bytes_of(&x)) }
    }

    fn record(&self, queue: Queue) -> Result<Event, KernelError> {
        self.driver.record(queue)
    }

    fn wait(&self, queue: Queue, event: Event, _reason: &'static str) -> Result<(), KernelError> {
        self.driver.wait(queue, event)
    }

    fn finish(&self, event: Event) -> Result<(), KernelError> {
        self.driver.finish(event)
    }

    fn traffic(&self) -> Traffic {
        self.traffic.get()
    }
}

impl<D: Driver> Kernels for Cuda<D> {
    fn target(&self) -> Target {
        Target::Cuda
    }

    fn fill(&self, out: Out, value: f32) -> Result<(), KernelError> {
        elementwise::fill(self, out, value)
    }

    fn copy(&self, out: Out, x: In) -> Result<(), KernelError> {
        elementwise::copy(self, out, x)
    }

    fn upload(&self, out: Out, bytes: &[u8]) -> Result<(), KernelError> {
        check::transfer(
            "upload",
            out.elements(),
            out.dtype(),
            out.is_contiguous(),
            bytes.len(),
        )?;
        assert!(!out.pointer().is_null(), "a shape has no data");
        count_upload(&self.traffic, bytes.len());
        // SAFETY: the view covers as many bytes as `bytes`.
        unsafe { self.driver.copy_to_device(out.pointer(), bytes) }
    }

    fn download(&self, bytes: &mut [u8], x: In) -> Result<(), KernelError> {
        check::transfer(
            "download",
            x.elements(),
            x.dtype(),
            x.is_contiguous(),
            bytes.len(),
        )?;
        assert!(!x.pointer().is_null(), "a shape has no data");
        count_download(&self.traffic, bytes.len());
        // SAFETY: as in `upload`.
        unsafe { self.driver.copy_to_host(bytes, x.pointer()) }
    }

    fn matmul(&self, out: Out, a: In, b: In, init: Init) -> Result<(), KernelError> {
        matmul::matmul(self, out, a, b, init)
    }

    fn add_bias(&self, out: Out, bias: In) -> Result<(), KernelError> {
        elementwise::add_bias(self, out, bias)
    }

    fn bias_backward(&self, out: Out, dy: In, init: Init) -> Result<(), KernelError> {
        elementwise::bias_backward(self, out, dy, init)
    }

    fn embedding(&self, out: Out, table: In, ids: In) -> Result<(), KernelError> {
        embedding::embedding(self, out, table, ids)
    }

    fn embedding_backward(
        &self,
        dtable: Out,
        dout: In,
        ids: In,
        init: Init,
    ) -> Result<(), KernelError> {
        embedding::embedding_backward(self, dtable, dout, ids, init)
    }

    fn rms_norm(
        &self,
        y: Option<Out>,
        rstd: Option<Out>,
        x: In,
        weight: In,
        eps: f32,
    ) -> Result<(), KernelError> {
        rms_norm::rms_norm(self, y, rstd, x, weight, eps)
    }

    fn rms_norm_backward(
        &self,
        dx: Out,
        dx_init: Init,
        dweight: Out,
        dweight_init: Init,
        dy: In,
        x: In,
        weight: In,
        rstd: In,
    ) -> Result<(), KernelError> {
        let (dx, dweight) = ((dx, dx_init), (dweight, dweight_init));
        rms_norm::rms_norm_backward(self, dx, dweight, dy, x, weight, rstd)
    }

    fn rotary(&self, x: Out, table: In, inverse: bool) -> Result<(), KernelError> {
        rotary::rotary(self, x, table, inverse)
    }

    fn attention(
        &self,
        out: Option<Out>,
        probs: Option<Out>,
        scratch: Out,
        q: In,
        k: In,
        v: In,
        shape: AttentionShape,
    ) -> Result<(), KernelError> {
        attention::attention(self, out, probs, scratch, (q, k, v), shape)
    }

    fn attention_backward(
        &self,
        dq: Out,
        dk: Out,
        dv: Out,
        scratch: Out,
        dout: In,
        probs: In,
        q: In,
        k: In,
        v: In,
        shape: AttentionShape,
    ) -> Result<(), KernelError> {
        let gradients = (dq, dk, dv);
        attention::attention_backward(self, gradients, scratch, dout, probs, (q, k, v), shape)
    }

    fn flash_attention(
        &self,
        out: Option<Out>,
        lse: Option<Out>,
        scratch: Out,
        q: In,
        k: In,
        v: In,
        shape: AttentionShape,
        options: FlashOptions,
    ) -> Result<(), KernelError> {
        flash::flash_attention(self, out, lse, scratch, (q, k, v), shape, options)
    }

    fn flash_attention_backward(
        &self,
        dq: Out,
        dk: Out,
        dv: Out,
        scratch: Out,
        dout: In,
        out: In,
        lse: In,
        q: In,
        k: In,
        v: In,
        shape: AttentionShape,
        options: FlashOptions,
    ) -> Result<(), KernelError> {
        let (gradients, saved) = ((dq, dk, dv), (dout, out, lse));
        flash::flash_attention_backward(self, gradients, scratch, saved, (q, k, v), shape, options)
    }

    fn swiglu(&self, act: Out, gate: In, up: In) -> Result<(), KernelError> {
        swiglu::swiglu(self, act, gate, up)
    }

    fn swiglu_backward(&self, gate: Out, up: Out, dact: In) -> Result<(), KernelError> {
        swiglu::swiglu_backward(self, gate, up, dact)
    }

    fn cross_entropy(
        &self,
        losses: Out,
        logits: Out,
        targets: In,
        scale: f32,
    ) -> Result<(), KernelError> {
        cross_entropy::cross_entropy(self, losses, logits, targets, scale)
    }

    fn sum(&self, out: Out, x: In, init: Init) -> Result<(), KernelError> {
        norm::sum(self, out, x, init)
    }

    fn norm_and_clip(
        &self,
        out: Out,
        parts: Out,
        x: In,
        loss: In,
        max_norm: Option<f32>,
    ) -> Result<(), KernelError> {
        norm::norm_and_clip(self, out, parts, x, loss, max_norm)
    }

    fn adamw(&self, update: AdamW) -> Result<(), KernelError> {
        adamw::adamw(self, Queue::Compute, update)
    }

    unsafe fn start_adamw(&self, update: AdamW) -> Result<(), KernelError> {
        adamw::adamw(self, Queue::Update, update)
    }
}

/// Whether a result is added to the output's contents.
fn accumulates(init: &Init) -> Argument {
    matches!(init, Init::Accumulate).into()
}
