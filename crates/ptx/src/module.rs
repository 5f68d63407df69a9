//! A module: its kernels, and how one is launched.

use crate::action::Action;
use crate::error::{Error, ParseError};
use crate::machine::Machine;
use crate::memory::{GlobalMemory, Space};
use crate::registers::{Condition, LANES, Registers};
use crate::report::{Report, Traffic};
use crate::shadow::BLOCKS_MAX;

/// Where dynamic shared memory lies: behind all arrays.
pub(crate) const DYNAMIC_SHARED: u64 = 1 << 20;

/// Shared memory of a block, static and dynamic, on a GPU of compute capability 8.0.
const SHARED_BYTES_MAX: usize = 163 << 10;
const THREADS_MAX: u64 = 1024;

/// An instruction, decoded.
pub(crate) struct Instruction {
    pub(crate) line: u32,
    pub(crate) guard: Option<Condition>,
    pub(crate) action: Action,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Where it lies among the parameters.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
}

/// A kernel.
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) code: Vec<Instruction>,
    /// Registers before the first instruction.
    pub(crate) registers: Registers,
    /// Arrays in shared memory: address, name, bytes.
    pub(crate) shared: Vec<(u64, String, usize)>,
    pub(crate) local_bytes: usize,
    /// Most threads of a block, if the kernel says.
    pub(crate) threads_max: Option<u64>,
}

impl Kernel {
    /// Its unmangled name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its parameters, in their order.
    pub fn parameters(&self) -> &[Parameter] {
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
pub enum Argument {
    /// A pointer, or a `size_t`.
    U64(u64),
    /// `int`.
    I32(i32),
    /// `float`.
    F32(f32),
    /// A structure.
    Bytes(Vec<u8>),
}

impl Argument {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Argument::U64(value) => value.to_le_bytes().into(),
            Argument::I32(value) => value.to_le_bytes().into(),
            Argument::F32(value) => value.to_le_bytes().into(),
            Argument::Bytes(bytes) => bytes.clone(),
        }
    }
}

/// A PTX text, decoded.
pub struct Module {
    text: String,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) variables: Space,
}

impl Module {
    /// Reads a text, to the zero that ends it if there is one.
    ///
    /// # Errors
    /// [`ParseError`] if there is something in it that is not supported: an opcode, for example.
    pub fn parse(text: &str) -> Result<Module, ParseError> {
        let (kernels, variables) = crate::parse::parse(text)?;
        Ok(Module {
            text: text.into(),
            kernels,
            variables,
        })
    }

    /// All kernels, in the order of the text.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    pub(crate) fn line(&self, line: u32) -> &str {
        let found = self.text.lines().nth(line as usize - 1);
        found.unwrap_or_default().trim()
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// [`Error::Launch`] if a device would refuse the launch, or the arguments are of other sizes than the parameters;
    /// [`Error::Fault`] with the first thing that the kernel does wrong. Memory is then as the kernel left it.
    pub fn launch(
        &self,
        name: &str,
        shape: Shape,
        arguments: &[Argument],
        memory: &mut GlobalMemory,
    ) -> Result<Report, Error> {
        let refuse = |message: String| {
            let kernel = name.into();
            Error::Launch { kernel, message }
        };
        let found = self.kernels.iter().find(|kernel| kernel.name == name);
        let kernel = found.ok_or_else(|| refuse("the module has no such kernel".into()))?;
        kernel.check_shape(shape).map_err(refuse)?;
        let parameters = kernel.lay_out(arguments).map_err(refuse)?;
        let mut shared = Space::default();
        for (address, name, bytes) in &kernel.shared {
            shared.add(*address, name, *bytes);
        }
        if shape.shared_bytes > 0 {
            shared.add(DYNAMIC_SHARED, "dynamic shared memory", shape.shared_bytes);
        }
        let machine = Machine {
            module: self,
            kernel,
            grid: shape.grid,
            block: shape.block,
            parameters,
            global: &mut memory.space,
            shared,
            traffic: vec![Traffic::default(); kernel.code.len()],
            instructions: 0,
        };
        Ok(machine.run()?)
    }
}

impl Kernel {
    fn check_shape(&self, shape: Shape) -> Result<(), String> {
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
        let fixed: usize = self.shared.iter().map(|(_, _, bytes)| bytes).sum();
        if fixed + shape.shared_bytes > SHARED_BYTES_MAX {
            let asked = fixed + shape.shared_bytes;
            return Err(format!(
                "{asked} bytes of shared memory; there are {SHARED_BYTES_MAX}"
            ));
        }
        Ok(())
    }

    /// The arguments at the offsets of the parameters.
    fn lay_out(&self, arguments: &[Argument]) -> Result<Vec<u8>, String> {
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

/// Warps are whole but for the last.
const _: () = assert!(THREADS_MAX as usize % LANES == 0);
