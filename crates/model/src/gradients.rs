//! Gradients of all parameters, accumulated over the micro-batches of a step.

use kernels::Init;
use memory::{Arena, Category, DType, Layout, Memory, Out, OutOfMemory};
use std::rc::Rc;

/// The gradient arena, f32 or bf16.
///
/// The first contribution of a step replaces what the last step left, later ones are added: nothing is ever
/// zeroed as a whole, and a parameter that received nothing is noticed.
pub struct Gradients {
    arena: Arena,
    touched: Vec<bool>,
}

impl Gradients {
    /// Leases the arena.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it does not fit.
    pub fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        dtype: DType,
    ) -> Result<Gradients, OutOfMemory> {
        let arena = Arena::lease(memory, Category::Gradient, "gradients", layout, dtype)?;
        Ok(Gradients {
            arena,
            touched: vec![false; layout.entries().len()],
        })
    }

    /// A step begins: the next contribution to each parameter replaces its gradient.
    pub fn begin_step(&mut self) {
        self.touched.fill(false);
    }

    /// Where to write the next contribution to a parameter, and what to add it to.
    pub fn accumulate(&mut self, parameter: usize) -> (Out<'_>, Init<'static>) {
        let first = !std::mem::replace(&mut self.touched[parameter], true);
        (
            self.arena.view_mut(parameter),
            if first {
                Init::Overwrite
            } else {
                Init::Accumulate
            },
        )
    }

    /// The same for several parameters, in the order in which they lie.
    pub fn accumulate_all<const N: usize>(
        &mut self,
        parameters: [usize; N],
    ) -> [(Out<'_>, Init<'static>); N] {
        let mut inits = parameters
            .map(|parameter| self.accumulate(parameter).1)
            .into_iter();
        let views = self.arena.all_mut(parameters);
        views.map(|view| (view, inits.next().expect("as many as parameters")))
    }

    /// The names of parameters that received nothing in this step.
    pub fn missing(&self) -> Vec<&str> {
        let entries = self.arena.layout().entries().iter().zip(&self.touched);
        entries
            .filter(|(_, touched)| !**touched)
            .map(|(entry, _)| entry.name.as_str())
            .collect()
    }

    /// The gradients themselves.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }
}
