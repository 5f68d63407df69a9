//! A module: its kernels, and how one is launched.

use crate::error::{LaunchError, ParseError};
use crate::kernel::{ArgumentValue, PtxKernel, Shape};
use crate::machine::Machine;
use crate::memory::{AddressSpace, GlobalMemory};
use crate::report::{AccessCounts, Report};

/// A PTX text, decoded.
pub struct Module {
    text: String,
    kernels: Vec<PtxKernel>,
    variables: AddressSpace,
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
    pub fn kernels(&self) -> &[PtxKernel] {
        &self.kernels
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// [`LaunchError::Launch`] if a device would refuse the launch, or the arguments are of other sizes than the parameters;
    /// [`LaunchError::Mistake`] with the first thing that the kernel does wrong. Memory is then as the kernel left it.
    pub fn launch(
        &self,
        name: &str,
        shape: Shape,
        arguments: &[ArgumentValue],
        memory: &mut GlobalMemory,
    ) -> Result<Report, LaunchError> {
        let refuse = |message: String| {
            let kernel = name.into();
            LaunchError::Launch { kernel, message }
        };
        let found = self.kernels.iter().find(|kernel| kernel.name == name);
        let kernel = found.ok_or_else(|| refuse("the module has no such kernel".into()))?;
        kernel.check_shape(shape).map_err(refuse)?;
        let parameters = kernel.lay_out(arguments).map_err(refuse)?;
        let mut shared = AddressSpace::default();
        for (address, name, bytes) in &kernel.shared.fixed {
            shared.add(*address, name, *bytes);
        }
        if shape.shared_bytes > 0 {
            shared.add(
                kernel.shared.dynamic,
                "dynamic shared memory",
                shape.shared_bytes,
            );
        }
        let machine = Machine {
            text: &self.text,
            variables: &self.variables,
            kernel,
            grid: shape.grid,
            block: shape.block,
            parameters,
            global: &mut memory.space,
            shared,
            counts: vec![AccessCounts::default(); kernel.code.len()],
            has_run: vec![false; kernel.code.len()],
            instructions: 0,
            budget: 0,
        };
        Ok(machine.run()?)
    }
}
