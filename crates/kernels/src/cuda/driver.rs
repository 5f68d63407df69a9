//! What a CUDA device does for the launch code; the emulation does the same on the processor.

use super::LibraryAttention;
use crate::{DiskCopy, Event, Exchange, KernelError, Operation, Queue, Reading, Section};
use memory::{DType, In, Out};
use std::ffi::c_void;

/// A device with a stream for each queue, but for those of a disk, which are threads. All but [`Driver::start_copy`],
/// [`Driver::start_disk`], [`Driver::start_exchange`], and launches that name another queue, runs in
/// the stream of computation, in the order in which it was asked for.
///
/// Only [`Driver::copy_to_host`] and [`Driver::finish`] wait, and [`Driver::copy_to_device`] where many uploads are under
/// way. An error may belong to earlier work.
pub trait Driver {
    /// Told of each operation before what is asked for to carry it out: for a driver that lists calls.
    fn begin_operation(&self, _operation: &Operation) {}

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and point to what it reads and writes, which nothing else writes.
    ///
    /// # Errors
    /// [`KernelError`] if the kernel is unknown or the device refuses the launch.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), KernelError>;

    /// Computes matrix products.
    ///
    /// # Safety
    /// Every matrix lies in live tensors, which nothing else writes; none but `init` overlaps `out`, and `init` is
    /// `out` if it does. `workspace` is not used by anything else.
    ///
    /// # Errors
    /// [`KernelError`] if the library refuses the product.
    unsafe fn gemm(&self, gemm: &Gemm, workspace: Workspace) -> Result<(), KernelError>;

    /// Computes attention by a library, where there is one.
    ///
    /// # Safety
    /// Every tensor lies in live memory, which nothing else writes; none that is written overlaps another. `workspace` is
    /// not used by anything else.
    ///
    /// # Errors
    /// [`KernelError`] if there is no such library here, or it refuses.
    unsafe fn attention(&self, attention: &LibraryAttention) -> Result<(), KernelError> {
        let message = "there is no cuDNN on this device";
        Err(KernelError::device(attention.pass().operation(), message))
    }

    /// Copies host bytes to the device; they may be changed when this returns.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn copy_to_device(&self, to: *mut u8, bytes: &[u8]) -> Result<(), KernelError>;

    /// Copies bytes to the host, when all work before is done.
    ///
    /// # Safety
    /// `from` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses, or failed in earlier work.
    unsafe fn copy_to_host(&self, bytes: &mut [u8], from: *const u8) -> Result<(), KernelError>;

    /// Sets `bytes` bytes to 0.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn clear(&self, to: *mut u8, bytes: usize) -> Result<(), KernelError>;

    /// Asks for a copy between the device and pinned host memory in a copy queue: the queue says which side is which.
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_upload`]; both pointers start as many bytes.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn start_copy(
        &self,
        queue: Queue,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), KernelError>;

    /// Asks for a copy between a file and pinned host memory, in the queue that it belongs to.
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_disk_read`] and [`crate::Kernels::start_disk_write`].
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses, or a file failed: then every later call that can wait fails too, when
    /// nothing is under way any more.
    unsafe fn start_disk(&self, copy: DiskCopy) -> Result<(), KernelError>;

    /// This device's rank in its group; 0 without one.
    fn rank(&self) -> usize;

    /// Asks for an exchange of device memory with other ranks, in their queue.
    ///
    /// # Safety
    /// As for [`crate::Backend::ask`].
    ///
    /// # Errors
    /// [`KernelError`] if there is no group or no such rank, the device refuses, or an exchange failed: then every later
    /// call that can wait fails too.
    unsafe fn start_exchange(&self, exchange: Exchange) -> Result<(), KernelError>;

    /// Asks for a few bytes, at most [`crate::READING_BYTES_MAX`], in the queue of computation. They stay as they are
    /// for [`crate::READINGS_MAX`] readings.
    ///
    /// # Safety
    /// `from` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn start_read(&self, from: *const u8, bytes: usize) -> Result<Reading, KernelError>;

    /// The present end of a queue.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn record(&self, queue: Queue) -> Result<Event, KernelError>;

    /// Makes a queue wait for an event.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn wait(&self, queue: Queue, event: Event) -> Result<(), KernelError>;

    /// Waits until an event is over.
    ///
    /// # Errors
    /// [`KernelError`] if the device failed.
    fn finish(&self, event: Event) -> Result<(), KernelError>;

    /// As [`crate::Kernels::begin_section`]: on a driver without graphs, nothing.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn begin_section(&self, _section: Section) -> Result<(), KernelError> {
        Ok(())
    }

    /// As [`crate::Kernels::end_section`].
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn end_section(&self, _is_whole: bool) -> Result<(), KernelError> {
        Ok(())
    }

    /// As [`crate::Kernels::section_refusal`].
    fn section_refusal(&self) -> Option<String> {
        None
    }
}

/// A kernel of `kernels/*.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Its file, without `.cu`.
    pub source: &'static str,
    /// Its unmangled name.
    pub name: &'static str,
}

/// A launch of a kernel.
#[derive(Debug)]
pub struct Launch<'a> {
    /// Where it runs: [`Queue::Compute`] or [`Queue::Update`].
    pub queue: Queue,
    /// What is launched.
    pub kernel: Kernel,
    /// Blocks along x, y and z; at least one.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z: whole warps.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block. Above 48 KB a device wants to be told before the launch: a driver sets the
    /// function's `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` when it loads it or when the need first comes.
    /// 163 KB fit on an A100, 227 KB on an H100, less what the kernel declares itself.
    pub shared_bytes: u32,
    /// One for each parameter, in their order.
    pub arguments: &'a [Argument],
}

/// An argument of a kernel, by its type in CUDA C++.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// A pointer; null for an optional tensor that was left out.
    Pointer(*const u8),
    /// `size_t`.
    Size(usize),
    /// `int`; 0 or 1 where it says yes or no.
    Int(i32),
    /// `float`.
    Float(f32),
}

impl Argument {
    /// No tensor.
    pub const NULL: Argument = Argument::Pointer(std::ptr::null());

    /// A tensor that may have been left out.
    pub fn optional(out: &Option<Out>) -> Argument {
        out.as_ref().map_or(Argument::NULL, Argument::from)
    }

    /// The address of the value, as a launch takes it.
    pub fn address(&self) -> *mut c_void {
        match self {
            Argument::Pointer(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Size(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Int(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
        }
    }
}

impl From<&In<'_>> for Argument {
    fn from(view: &In) -> Argument {
        assert!(!view.pointer().is_null(), "a shape has no data");
        Argument::Pointer(view.pointer())
    }
}

impl From<&Out<'_>> for Argument {
    fn from(view: &Out) -> Argument {
        assert!(!view.pointer().is_null(), "a shape has no data");
        Argument::Pointer(view.pointer())
    }
}

impl From<usize> for Argument {
    fn from(value: usize) -> Argument {
        Argument::Size(value)
    }
}

impl From<bool> for Argument {
    fn from(value: bool) -> Argument {
        Argument::Int(value.into())
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Argument {
        Argument::Float(value)
    }
}

/// `batch` matrices in device memory, each `batch_stride` elements after the one before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    /// The first element.
    pub pointer: *const u8,
    /// f32 or bf16.
    pub dtype: DType,
    /// Elements from a row to the next. This or `column_stride` is 1, but for matrices of one row or column.
    pub row_stride: usize,
    /// Elements from a column to the next.
    pub column_stride: usize,
    /// Elements from a matrix to the next; 0 repeats one.
    pub batch_stride: usize,
}

impl Matrix {
    /// Rows exchanged with columns.
    pub fn t(self) -> Matrix {
        Matrix {
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// `out [m, n] = init + alpha a [m, k] b [k, n] + bias [n]` on every row, for every matrix of a batch. Sums are f32 and
/// rounded once.
///
/// Deterministic: the algorithm follows from sizes, types, strides and the alignment of the pointers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    /// m, k, n.
    pub sizes: [usize; 3],
    /// Number of products; at least 1.
    pub batch: usize,
    /// Factor on the product.
    pub alpha: f32,
    /// The left matrix, of the type of `b`.
    pub a: Matrix,
    /// The right matrix, of the type of `a`.
    pub b: Matrix,
    /// What the product is added to, of the type of `out`: another matrix, or `out` itself.
    pub init: Option<Matrix>,
    /// What is added to every row of every product: `n` elements of the type of `out`, one after the other, from a multiple
    /// of [`BIAS_ALIGNMENT_BYTES`] on.
    pub bias: Option<*const u8>,
    /// Row-major and written; f32, or of the type of `a`.
    pub out: Matrix,
}

/// What the address of a [`Gemm::bias`] is a multiple of.
pub const BIAS_ALIGNMENT_BYTES: usize = 16;

/// Device memory that the matrix library may use during a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workspace {
    /// Its first byte.
    pub pointer: *const u8,
    /// Its size.
    pub bytes: usize,
}
