//! A rehearsal: it loads every kernel, and plans and runs every product of a step once, before memory is reserved.
//!
//! cuBLASLt loads the code of a product when it first computes it. On a card filled by a run, that fails in the middle
//! of the first step, with a status that does not mention memory. After a rehearsal no more code is loaded, so the
//! memory that the driver calls free is free.

use super::block::Block;
use super::problem::Problem;
use super::{CudaDevice, CudaDriver, error};
use crate::cuda::{Cuda, Gemm, Matrix};
use crate::{Fault, KernelError, Kernels, Result};
use memory::{GRANULARITY_BYTES, Space, round_up};
use std::collections::HashSet;

/// If a library fails with less than this free, the reason is taken to be a lack of memory. The library does not say so
/// itself, and no module of cuBLASLt takes more.
const FREE_BYTES_MIN: u64 = 128 << 20;

/// The result of a rehearsal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rehearsal {
    /// Different products.
    pub products: usize,
    /// Those for which no algorithm keeps the parts of a split sum in f32.
    pub rounded: usize,
    /// Those that use a measured algorithm.
    pub tuned: usize,
    /// Those whose measured algorithm the library refused.
    pub refused: usize,
}

impl Kernels<Cuda<CudaDriver>> {
    /// Loads all kernels, and runs each of `products` once on zeros. Their block is returned to the driver afterwards.
    ///
    /// # Errors
    /// [`Fault::DeviceFull`] if memory is short; otherwise as for products.
    pub fn rehearse(&self, products: &[Gemm]) -> Result<Rehearsal> {
        let device = &self.backend.driver.device;
        let rehearsed = device
            .load_kernels()
            .and_then(|()| self.run_each(&distinct(products)?));
        let rehearsed = rehearsed.map_err(|error| blamed_on_memory(device, error));
        device.trim()?;
        rehearsed
    }

    /// Runs products that are all different.
    fn run_each(&self, products: &[Gemm]) -> Result<Rehearsal> {
        let device = &self.backend.driver.device;
        let bytes = products.iter().map(|gemm| Operands::of(gemm).bytes()).max();
        let block = match bytes {
            Some(bytes) => Some(Block::new(device, "rehearsal", Space::Device, bytes)?),
            None => None,
        };
        for gemm in products {
            let start = block.as_ref().expect("there is a product").pointer();
            let gemm = Operands::of(gemm).placed(gemm, start);
            // SAFETY: the block covers the operands; nothing but this stream uses block and workspace.
            unsafe {
                self.backend
                    .driver
                    .products
                    .compute(&gemm, self.backend.workspace(), device.stream)
            }?;
        }
        let done = device.synchronize();
        done.map_err(error::of_driver("rehearsal"))?;
        let (tuned, refused) = self.backend.driver.products.tuned();
        Ok(Rehearsal {
            products: products.len(),
            rounded: self.backend.driver.products.rounded(),
            tuned,
            refused,
        })
    }
}

/// One product of each problem.
pub(super) fn distinct(products: &[Gemm]) -> Result<Vec<Gemm>> {
    let (mut seen, mut distinct) = (HashSet::new(), Vec::new());
    for gemm in products {
        if seen.insert(Problem::new(gemm)?.0) {
            distinct.push(*gemm);
        }
    }
    Ok(distinct)
}

/// Turns a failure into one of memory if the card is nearly full.
pub(super) fn blamed_on_memory(device: &CudaDevice, error: KernelError) -> KernelError {
    let is_full = || {
        device
            .memory_bytes()
            .is_ok_and(|bytes| bytes.free < FREE_BYTES_MIN)
    };
    match error.fault {
        Fault::Device if is_full() => KernelError {
            fault: Fault::DeviceFull,
            ..error
        },
        _ => error,
    }
}

/// Where the operands of a product lie in a block: inputs overlap at its start, and the output lies behind them. No
/// larger than what a run holds at that moment.
pub(super) struct Operands {
    read_bytes: u64,
    written_bytes: u64,
}

impl Operands {
    pub(super) fn of(gemm: &Gemm) -> Operands {
        let [m, k, n] = gemm.sizes;
        let read = [
            reach(&gemm.a, [m, k], gemm.batch),
            reach(&gemm.b, [k, n], gemm.batch),
            gemm.init.map_or(0, |init| reach(&init, [m, n], gemm.batch)),
            round_up((n * gemm.out.dtype.size_in_bytes()) as u64),
        ];
        Operands {
            read_bytes: read.into_iter().max().unwrap_or(0),
            written_bytes: reach(&gemm.out, [m, n], gemm.batch),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.read_bytes + self.written_bytes
    }

    /// The same problem, with the alignment that its matrices have.
    pub(super) fn placed(&self, gemm: &Gemm, start: *mut u8) -> Gemm {
        let at = |matrix: Matrix, offset: u64| Matrix {
            pointer: start.wrapping_add(offset as usize + misalignment(&matrix)),
            ..matrix
        };
        let adds_to_itself = gemm
            .init
            .is_some_and(|init| init.pointer == gemm.out.pointer);
        let init_at = if adds_to_itself { self.read_bytes } else { 0 };
        Gemm {
            a: at(gemm.a, 0),
            b: at(gemm.b, 0),
            init: gemm.init.map(|init| at(init, init_at)),
            bias: gemm.bias.map(|_| start.cast_const()),
            scales: gemm.scales.map(|_| [start.cast_const(); 2]),
            out: at(gemm.out, self.read_bytes),
            ..*gemm
        }
    }
}

/// Bytes of an address above the last multiple of the granularity.
fn misalignment(matrix: &Matrix) -> usize {
    matrix.pointer as usize % GRANULARITY_BYTES as usize
}

/// Bytes from the granule in which a batch of matrices begins to the end of that in which it ends.
fn reach(matrix: &Matrix, [rows, columns]: [usize; 2], batch: usize) -> u64 {
    let last = (batch - 1) * matrix.batch_stride
        + (rows - 1) * matrix.row_stride
        + (columns - 1) * matrix.column_stride;
    let bytes = misalignment(matrix) + (last + 1) * matrix.dtype.size_in_bytes();
    round_up(bytes as u64)
}
