//! A kernel, decoded, and what it is launched with.

use crate::declaration::SharedArrays;
use crate::executable::Executable;
use crate::registers::{Condition, LANES, Numbered, Registers};
use crate::shadow::BLOCKS_MAX;
use std::collections::BTreeSet;

/// Shared memory of a block, static and dynamic, on a GPU of compute capability 8.0, and of 9.0.
pub(crate) const SHARED_BYTES_MAX: usize = 163 << 10;
pub(crate) const SHARED_BYTES_MAX_ON_HOPPER: usize = 227 << 10;
const THREADS_MAX: u64 = 1024;

/// An instruction, decoded.
pub(crate) struct PtxInstruction {
    pub(crate) line: u32,
    pub(crate) opcode: &'static str,
    pub(crate) guard: Option<Condition>,
    /// The registers that it reads and writes. Its guard's is not among them.
    pub(crate) read: Box<[Numbered]>,
    pub(crate) written: Box<[Numbered]>,
    pub(crate) action: Executable,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PtxParameter {
    /// Where it lies among the parameters.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
}

/// A kernel.
pub struct PtxKernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<PtxParameter>,
    pub(crate) code: Vec<PtxInstruction>,
    /// Whether groups of warps multiply.
    pub(crate) has_products: bool,
    /// Registers before the first instruction.
    pub(crate) registers: Registers,
    pub(crate) shared: SharedArrays,
    pub(crate) local_bytes: usize,
    /// Most threads of a block, if the kernel says.
    pub(crate) threads_max: Option<u64>,
    /// How many blocks have to fit on a multiprocessor.
    pub(crate) blocks_min: u32,
    pub(crate) shared_bytes_max: usize,
}

impl PtxKernel {
    /// Its unmangled name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Threads that a multiprocessor has to hold, which the compiler divides its registers among.
    pub(crate) fn threads_of_multiprocessor(&self) -> u32 {
        self.threads_max.unwrap_or(THREADS_MAX).min(THREADS_MAX) as u32 * self.blocks_min.max(1)
    }

    /// The opcodes of its instructions.
    pub fn opcodes(&self) -> BTreeSet<&'static str> {
        self.code.iter().map(|code| code.opcode).collect()
    }

    /// Its parameters, in their order.
    pub fn parameters(&self) -> &[PtxParameter] {
        &self.parameters
    }
}

/// How many blocks of how many threads, and the dynamic shared memory of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z.
    pub block: [u32; 3],
    /// Bytes.
    pub shared_bytes: usize,
}

/// An argument of a launch.
#[derive(Clone, Debug, PartialEq)]
pub enum ArgumentValue {
    /// A pointer, or a `size_t`.
    U64(u64),
    /// `int`.
    I32(i32),
    /// `float`.
    F32(f32),
    /// A structure.
    Bytes(Vec<u8>),
}

impl ArgumentValue {
    fn bytes(&self) -> Vec<u8> {
        match self {
            ArgumentValue::U64(value) => value.to_le_bytes().into(),
            ArgumentValue::I32(value) => value.to_le_bytes().into(),
            ArgumentValue::F32(value) => value.to_le_bytes().into(),
            ArgumentValue::Bytes(bytes) => bytes.clone(),
        }
    }
}

impl PtxKernel {
    /// Refuses what a device does not launch.
    pub(crate) fn check_shape(&self, shape: Shape) -> Result<(), String> {
        let [blocks, threads] =
            [shape.grid, shape.block].map(|sides| sides.map(u64::from).iter().product::<u64>());
        let threads_max = self.threads_max.unwrap_or(THREADS_MAX).min(THREADS_MAX);
        if threads == 0 || threads > threads_max || shape.block[2] > 64 {
            return Err(format!(
                "a block of {:?} threads; {threads_max} are allowed",
                shape.block
            ));
        }
        let [_, y, z] = shape.grid;
        if blocks == 0 || blocks > BLOCKS_MAX || y.max(z) > 65_535 {
            return Err(format!("a grid of {:?} blocks", shape.grid));
        }
        let fixed: usize = self.shared.fixed.iter().map(|(_, _, bytes)| bytes).sum();
        let shared_bytes_max = self.shared_bytes_max;
        if fixed + shape.shared_bytes > shared_bytes_max {
            let asked = fixed + shape.shared_bytes;
            return Err(format!(
                "{asked} bytes of shared memory; there are {shared_bytes_max}"
            ));
        }
        Ok(())
    }

    /// The arguments at the offsets of the parameters.
    pub(crate) fn lay_out(&self, arguments: &[ArgumentValue]) -> Result<Vec<u8>, String> {
        if arguments.len() != self.parameters.len() {
            let (given, taken) = (arguments.len(), self.parameters.len());
            return Err(format!("{given} arguments for {taken} parameters"));
        }
        let mut all = Vec::new();
        for (index, (argument, parameter)) in arguments.iter().zip(&self.parameters).enumerate() {
            let bytes = argument.bytes();
            if bytes.len() != parameter.bytes {
                let (given, taken) = (bytes.len(), parameter.bytes);
                return Err(format!(
                    "argument {index} has {given} bytes; the parameter has {taken}"
                ));
            }
            all.resize(parameter.offset, 0);
            all.extend(bytes);
        }
        Ok(all)
    }
}

/// Blocks of the maximal size consist of whole warps.
const _: () = assert!((THREADS_MAX as usize).is_multiple_of(LANES));
