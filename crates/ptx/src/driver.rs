//! A `Driver` that interprets kernels and computes matrix products with the emulation's code.

use crate::{ArgumentValue, GlobalMemory, LaunchError, PtxTexts, Shape};
use kernels::cuda::{Argument, Driver, Gemm, Launch, Matrix, Workspace};
use kernels::{DiskCopy, Exchange, KernelError, Queue, Queues, Reading};
use memory::{Blocks, DType, HostBlock, In, Out, Refused, Space};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

/// A CUDA device whose kernels are interpreted; everything is done when it is asked for. Device memory lies at made-up
/// addresses: nothing but the interpreter reads it.
#[derive(Clone)]
pub struct Interpreter(Rc<State>);

struct State {
    sources: Arc<PtxTexts>,
    memory: RefCell<GlobalMemory>,
    pinned: RefCell<HashMap<NonNull<u8>, HostBlock>>,
}

impl Interpreter {
    /// A device that has these kernels. It is the driver, and `Memory::device` takes it for its blocks.
    pub fn new(sources: &Arc<PtxTexts>) -> Interpreter {
        Interpreter(Rc::new(State {
            sources: sources.clone(),
            memory: RefCell::default(),
            pinned: RefCell::default(),
        }))
    }

    fn write(&self, to: *mut u8, bytes: &[u8]) -> Result<(), KernelError> {
        let mut memory = self.0.memory.borrow_mut();
        let written = memory.write(to.addr() as u64, bytes);
        written.map_err(|message| KernelError::misfit("upload", message))
    }

    fn read(&self, from: *const u8, bytes: usize) -> Result<Vec<u8>, KernelError> {
        let mut memory = self.0.memory.borrow_mut();
        let read = memory.read(from.addr() as u64, bytes);
        read.map(<[u8]>::to_vec)
            .map_err(|message| KernelError::misfit("download", message))
    }

    /// Launches, or says why not.
    fn interpret(&self, launch: &Launch) -> Result<(), String> {
        let module = self.0.sources.module(launch.kernel.source)?;
        let value = |argument: &Argument| match *argument {
            Argument::Pointer(pointer) => ArgumentValue::U64(pointer.addr() as u64),
            Argument::Size(size) => ArgumentValue::U64(size as u64),
            Argument::Int(int) => ArgumentValue::I32(int),
            Argument::Float(float) => ArgumentValue::F32(float),
        };
        let arguments: Vec<ArgumentValue> = launch.arguments.iter().map(value).collect();
        let shape = Shape {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes as usize,
        };
        let mut memory = self.0.memory.borrow_mut();
        let report = module.launch(launch.kernel.name, shape, &arguments, &mut memory);
        let report = report.map_err(|mut error| {
            if let LaunchError::Mistake(mistake) = &mut error {
                mistake.place = self.0.sources.place(launch.kernel.source, mistake.line);
            }
            error.to_string()
        })?;
        self.0.sources.tell(launch.kernel.name, &report);
        Ok(())
    }
}

/// The contiguous runs of a matrix: the bytes of each, and their start offsets.
fn runs(matrix: &Matrix, batch: usize, [rows, columns]: [usize; 2]) -> (usize, Vec<usize>) {
    let size = matrix.dtype.size_in_bytes();
    let (length, strides, count) = match matrix.column_stride {
        1 => (columns, matrix.row_stride, rows),
        _ if matrix.row_stride == 1 => (rows, matrix.column_stride, columns),
        // A single row or column with a stride has no contiguous run: one element per run.
        stride => (1, stride.max(matrix.row_stride), rows.max(columns)),
    };
    let starts = (0..batch).flat_map(|index| {
        (0..count).map(move |run| (index * matrix.batch_stride + run * strides) * size)
    });
    (length * size, starts.collect())
}

/// The matrix at its host address. Errors if a product would read unwritten bytes.
fn on_host(
    memory: &mut GlobalMemory,
    matrix: &Matrix,
    batch: usize,
    sizes: [usize; 2],
    is_read: bool,
) -> Result<Matrix, String> {
    let address = matrix.pointer.addr() as u64;
    let (bytes, starts) = runs(matrix, batch, sizes);
    for start in starts.iter().filter(|_| is_read) {
        let written = memory.written(address + *start as u64, bytes)?;
        if written < bytes {
            let at = start + written;
            return Err(format!(
                "a product reads byte {at} of a matrix, which nobody wrote"
            ));
        }
    }
    let end = starts.iter().max().map_or(0, |start| start + bytes);
    let pointer = memory.pointer(address, end)?;
    Ok(Matrix {
        pointer: pointer.cast_const(),
        ..*matrix
    })
}

/// Computes products in device memory.
fn multiply(memory: &mut GlobalMemory, gemm: &Gemm) -> Result<(), KernelError> {
    let refuse = |message: String| KernelError::misfit("gemm", message);
    let [m, k, n] = gemm.sizes;
    let batch = gemm.batch;
    let mut host = *gemm;
    host.a = on_host(memory, &gemm.a, batch, [m, k], true).map_err(refuse)?;
    host.b = on_host(memory, &gemm.b, batch, [k, n], true).map_err(refuse)?;
    host.out = on_host(memory, &gemm.out, batch, [m, n], false).map_err(refuse)?;
    if let Some(init) = &gemm.init {
        host.init = Some(on_host(memory, init, batch, [m, n], true).map_err(refuse)?);
    }
    if let Some(bias) = gemm.bias {
        let row = Matrix {
            pointer: bias,
            row_stride: n,
            column_stride: 1,
            batch_stride: 0,
            ..gemm.out
        };
        host.bias = Some(
            on_host(memory, &row, 1, [1, n], true)
                .map_err(refuse)?
                .pointer,
        );
    }
    for scale in host.scales.iter_mut().flatten() {
        let one = Matrix {
            pointer: *scale,
            dtype: DType::F32,
            row_stride: 1,
            column_stride: 1,
            batch_stride: 0,
        };
        *scale = on_host(memory, &one, 1, [1, 1], true)
            .map_err(refuse)?
            .pointer;
    }
    // SAFETY: every matrix lies within an allocation, where the bytes of an allocation stay.
    unsafe { emulation::gemm(&host)? };
    let (bytes, starts) = runs(&gemm.out, batch, [m, n]);
    for start in starts {
        let row = gemm.out.pointer.addr() as u64 + start as u64;
        memory.set_written(row, bytes).map_err(refuse)?;
    }
    Ok(())
}

impl Queues for Interpreter {}

impl Driver for Interpreter {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), KernelError> {
        let launched = self.interpret(launch);
        launched.map_err(|message| KernelError::misfit(launch.kernel.name, message))
    }

    unsafe fn gemm(&self, gemm: &Gemm, _workspace: Workspace) -> Result<(), KernelError> {
        multiply(&mut self.0.memory.borrow_mut(), gemm)
    }

    unsafe fn copy_to_device(&self, to: *mut u8, bytes: &[u8]) -> Result<(), KernelError> {
        self.write(to, bytes)
    }

    unsafe fn copy_to_host(&self, bytes: &mut [u8], from: *const u8) -> Result<(), KernelError> {
        bytes.copy_from_slice(&self.read(from, bytes.len())?);
        Ok(())
    }

    unsafe fn clear(&self, to: *mut u8, bytes: usize) -> Result<(), KernelError> {
        self.write(to, &vec![0; bytes])
    }

    unsafe fn start_copy(&self, queue: Queue, out: Out, x: In) -> Result<(), KernelError> {
        let (to, from, bytes) = (out.pointer(), x.pointer(), x.bytes());
        if queue == Queue::Upload {
            // SAFETY: the caller's promise: an upload comes from host memory.
            return self.write(to, unsafe { std::slice::from_raw_parts(from, bytes) });
        }
        let read = self.read(from, bytes)?;
        // SAFETY: the caller's promise: a download goes to host memory.
        unsafe { std::ptr::copy_nonoverlapping(read.as_ptr(), to, bytes) };
        Ok(())
    }

    unsafe fn start_disk(&self, copy: DiskCopy) -> Result<(), KernelError> {
        // SAFETY: the caller's promise: a disk's copies are of host memory.
        unsafe { copy.carry_out() }
    }

    unsafe fn start_exchange(&self, _exchange: Exchange) -> Result<(), KernelError> {
        let message = "an interpreter is alone";
        Err(KernelError::misfit("exchange", message))
    }

    unsafe fn start_read(&self, from: *const u8, bytes: usize) -> Result<Reading, KernelError> {
        self.read(from, bytes).map(Reading::done)
    }
}

impl Blocks for Interpreter {
    fn device(&self) -> &'static str {
        "PTX"
    }

    fn allocate(&self, space: Space, bytes: u64) -> Result<NonNull<u8>, Refused> {
        let pointer = match space {
            Space::Device => {
                let mut memory = self.0.memory.borrow_mut();
                let address = memory.allocate_with("block", &vec![0; bytes as usize]);
                NonNull::new(std::ptr::without_provenance_mut(address as usize))
            }
            Space::Host => HostBlock::new(bytes).map(|block| {
                let pointer = block.pointer();
                self.0.pinned.borrow_mut().insert(pointer, block);
                pointer
            }),
        };
        pointer.ok_or(Refused {
            device_bytes: None,
            error: None,
        })
    }

    unsafe fn free(&self, space: Space, block: NonNull<u8>) {
        match space {
            Space::Device => {
                let address = block.as_ptr().addr() as u64;
                let freed = self.0.memory.borrow_mut().free(address);
                freed.expect("`allocate` gave it");
            }
            Space::Host => drop(self.0.pinned.borrow_mut().remove(&block)),
        }
    }

    /// Other devices fill poisoned leases with a pattern. This one marks them unwritten too, so that early reads are errors.
    unsafe fn fill(&self, pointer: *mut u8, value: u8, bytes: u64) {
        let mut memory = self.0.memory.borrow_mut();
        let forgotten = memory.forget(pointer.addr() as u64, bytes as usize, value);
        forgotten.expect("the caller's promise: it lies in a block");
    }
}
