//! Gradients of all parameters, accumulated over the micro-batches of a step.

use crate::UnitError;
use crate::stream::{finish_all, host_bytes, locate};
use crate::streamed_gradients::StreamedGradients;
use kernels::{Init, KernelError, Kernels, NormGrains, Traffic};
use memory::{
    Arena, Buffer, Category, DType, GRAIN_ELEMENTS, In, Layer, Layout, Memory, Out, OutOfMemory,
    Space,
};
use std::ops::Range;
use std::rc::Rc;

/// Where gradients of matrices live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientsHome {
    /// On the device.
    Device,
    /// In pinned host memory, but for the unit that the backward pass is at.
    Host,
    /// Nowhere: a unit is updated as soon as its gradients are there, and they are gone.
    Released,
}

/// Where the gradients of a range are.
pub enum GradientSource<'a> {
    /// On the device.
    Device(In<'a>),
    /// In pinned host memory.
    Host(In<'a>),
}

/// The gradients, f32 or bf16.
///
/// The first contribution of a step replaces what the last step left, later ones are added: nothing is ever
/// zeroed as a whole, and a parameter that received nothing is noticed.
///
/// Where units come and go, the backward pass opens one before it contributes to it ([`Gradients::open`]) and closes it
/// after that ([`Gradients::close`]). The squares of what is complete are summed by grains ([`memory::GRAIN_ELEMENTS`]), of
/// units when they close, so that the norm needs nothing to come again.
pub struct Gradients {
    /// All of them, or the vectors.
    resident: Arena,
    streamed: Option<StreamedGradients>,
    touched: Vec<bool>,
    /// f64 sums of squares, in the order of [`Layout::grained`].
    grains: Buffer,
}

impl Gradients {
    /// Leases what lives across steps.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it does not fit.
    pub fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        dtype: DType,
        home: GradientsHome,
    ) -> Result<Gradients, OutOfMemory> {
        let category = Category::Gradient;
        let lease = |space, name, held| {
            Arena::lease_part(memory, space, category, name, layout, dtype, held)
        };
        let host = || lease(Space::Host, "offloaded_gradients", layout.matrices());
        let streamed = |host| StreamedGradients {
            host,
            here: Vec::new(),
            traffic: Traffic::default(),
        };
        let (held, streamed) = match home {
            GradientsHome::Device => (0..layout.elements(), None),
            GradientsHome::Host => (layout.vectors(), Some(streamed(Some(host()?)))),
            GradientsHome::Released => (layout.vectors(), Some(streamed(None))),
        };
        let grains = layout.grained().last().map_or(0, |(range, first)| {
            first + range.len().div_ceil(GRAIN_ELEMENTS)
        });
        Ok(Gradients {
            resident: lease(Space::Device, "gradients", held)?,
            streamed,
            touched: vec![false; layout.entries().len()],
            grains: memory.lease_persistent(category, "norm_grains", [grains], DType::F64)?,
        })
    }

    /// Where each tensor lies.
    pub fn layout(&self) -> &Rc<Layout> {
        self.resident.layout()
    }

    /// Bytes on the device, across steps.
    pub fn bytes(&self) -> u64 {
        self.resident.bytes()
    }

    /// Name and bytes of the arena in pinned host memory.
    pub fn host_arena(&self) -> Option<(&'static str, u64)> {
        let host = self.streamed.as_ref()?.host.as_ref()?;
        Some(("offloaded_gradients", host.bytes()))
    }

    /// What has crossed of them during passes; updates bring them with the states.
    pub fn traffic(&self) -> Traffic {
        let streamed = self.streamed.as_ref();
        streamed.map_or(Traffic::default(), |streamed| streamed.traffic)
    }

    /// Whether gradients of matrices are gone after a step.
    pub fn is_released(&self) -> bool {
        self.streamed
            .as_ref()
            .is_some_and(|streamed| streamed.host.is_none())
    }

    /// A step begins: the next contribution to each parameter replaces its gradient.
    pub fn begin_step(&mut self) {
        self.touched.fill(false);
    }

    /// Where to write the next contribution to a parameter, and what to add it to. Its unit is open.
    pub fn accumulate(&mut self, parameter: usize) -> (Out<'_>, Init<'static>) {
        let init = self.touch(parameter);
        let layout = self.resident.layout();
        let (Some(unit), Some(streamed)) = (layout.unit_of(parameter), &mut self.streamed) else {
            return (self.resident.view_mut(parameter), init);
        };
        let tensor = &layout.entries()[parameter];
        let rows = layout.units()[unit].cover.rows(&tensor.range());
        let rows = rows.expect("a unit covers its own tensors");
        let view = streamed.open_mut(unit).rows_mut(rows);
        (view.reshape(tensor.dims()), init)
    }

    /// The same for several vectors, in the order in which they lie.
    pub fn accumulate_all<const N: usize>(
        &mut self,
        parameters: [usize; N],
    ) -> [(Out<'_>, Init<'static>); N] {
        let mut inits = parameters
            .map(|parameter| self.touch(parameter))
            .into_iter();
        let views = self.resident.all_mut(parameters);
        views.map(|view| (view, inits.next().expect("as many as parameters")))
    }

    fn touch(&mut self, parameter: usize) -> Init<'static> {
        match std::mem::replace(&mut self.touched[parameter], true) {
            false => Init::Overwrite,
            true => Init::Accumulate,
        }
    }

    /// The names of parameters that received nothing in this step.
    pub fn missing(&self) -> Vec<&str> {
        let entries = self.layout().entries().iter().zip(&self.touched);
        entries
            .filter(|(_, touched)| !**touched)
            .map(|(entry, _)| entry.name.as_str())
            .collect()
    }

    /// Makes room for a unit that the backward pass will contribute to next, and asks for what earlier contributions have
    /// made of it.
    ///
    /// # Errors
    /// [`UnitError`] if the lease is refused or the device fails.
    pub fn fetch(
        &mut self,
        memory: &Memory,
        kernels: &dyn Kernels,
        unit: usize,
    ) -> Result<(), UnitError> {
        let layout = self.resident.layout().clone();
        let entries = &layout.units()[unit].entries;
        let is_begun = entries.iter().any(|entry| self.touched[*entry]);
        match &mut self.streamed {
            Some(streamed) if is_begun => {
                streamed.lease(memory, kernels, unit, &self.resident, true)
            }
            _ => Ok(()),
        }
    }

    /// The backward pass contributes to a unit from here on.
    ///
    /// # Errors
    /// As [`Gradients::fetch`].
    pub fn open(
        &mut self,
        memory: &Memory,
        kernels: &dyn Kernels,
        unit: usize,
    ) -> Result<(), UnitError> {
        self.fetch(memory, kernels, unit)?;
        match &mut self.streamed {
            Some(streamed) => streamed.open(memory, kernels, unit, &self.resident),
            None => Ok(()),
        }
    }

    /// The backward pass has contributed to a unit. If that was the step's last contribution, the squares are summed.
    /// Its memory is given back by [`Gradients::give_back`] or [`Gradients::release`].
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn close(
        &mut self,
        kernels: &dyn Kernels,
        unit: usize,
        is_final: bool,
    ) -> Result<(), KernelError> {
        if is_final && self.streamed.is_some() {
            self.sum_unit(kernels, unit)?;
        }
        match &mut self.streamed {
            Some(streamed) => streamed.send(kernels, unit),
            None => Ok(()),
        }
    }

    /// Gives back the memory of closed units but this one: when the next unit's backward pass is over, so that the copies
    /// have had as long.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn give_back(
        &mut self,
        kernels: &dyn Kernels,
        but: Option<usize>,
    ) -> Result<(), KernelError> {
        match &mut self.streamed {
            Some(streamed) => streamed.give_back(kernels, but),
            None => Ok(()),
        }
    }

    /// Gives back the memory of a part's unit, or for [`Layer::Whole`] of all, when the computation was told to wait for the
    /// update.
    pub fn release(&mut self, part: Layer) {
        let units = self.resident.layout().units();
        if let Some(streamed) = &mut self.streamed {
            let here = &mut streamed.here;
            here.retain(|open| part != Layer::Whole && units[open.on_device.unit].part != part);
        }
    }

    /// Lets go of everything when a pass ended early and copies may be under way: the host waits for them.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails. Nothing is on the device then either.
    pub fn abandon(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        match &mut self.streamed {
            Some(streamed) if !streamed.here.is_empty() => {
                let finished = finish_all(kernels);
                streamed.here.clear();
                finished
            }
            _ => Ok(()),
        }
    }

    /// Sums the squares of what is on the device for good; those of other units were summed when they closed.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn sum_grains(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        let held = self.resident.held();
        for (range, first) in self.layout().grained() {
            if held.start <= range.start && range.end <= held.end {
                let x = self.resident.flat(range);
                kernels.run(sum_of(&mut self.grains, first, x))?;
            }
        }
        Ok(())
    }

    fn sum_unit(&mut self, kernels: &dyn Kernels, unit: usize) -> Result<(), KernelError> {
        let layout = self.resident.layout().clone();
        let cover = &layout.units()[unit].cover;
        let streamed = self.streamed.as_ref().expect("the unit is open");
        for (range, first) in layout.grained() {
            if let Some(rows) = cover.rows(&range) {
                let x = streamed.of(unit).rows(rows);
                kernels.run(sum_of(&mut self.grains, first, x))?;
            }
        }
        Ok(())
    }

    /// The sums of squares of all gradients, `[g]` f64.
    pub fn grains(&self) -> In<'_> {
        self.grains.view()
    }

    /// Those of the unit of one part, which lie together; none if it has no unit.
    pub fn unit_grains(&self, part: Layer) -> In<'_> {
        let layout = self.layout();
        let is_of_part = |range: &Range<usize>| {
            let mut units = layout.units().iter().filter(|unit| unit.part == part);
            units.any(|unit| unit.cover.rows(range).is_some())
        };
        let mut grains = 0..0;
        for (range, first) in layout.grained() {
            if is_of_part(&range) {
                let start = if grains.is_empty() {
                    first
                } else {
                    grains.start
                };
                grains = start..first + range.len().div_ceil(GRAIN_ELEMENTS);
            }
        }
        self.grains.view().rows(grains)
    }

    /// Where the gradients of a range, within one unit or the vectors, are now.
    pub fn source(&self, range: &Range<usize>) -> GradientSource<'_> {
        let unit = locate(self.layout(), range);
        let Some((streamed, (unit, rows))) = self.streamed.as_ref().zip(unit) else {
            return GradientSource::Device(self.resident.flat(range.clone()));
        };
        let mut here = streamed.here.iter();
        match (
            &streamed.host,
            here.find(|open| open.on_device.unit == unit),
        ) {
            (Some(host), _) => GradientSource::Host(host.flat(range.clone())),
            (None, open) => {
                let open = open.expect("released gradients are asked for while their unit is open");
                GradientSource::Device(open.on_device.rows(rows))
            }
        }
    }

    /// Copies a tensor's gradient, between steps. Those of matrices must not have been released.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or `bytes` have another size.
    pub fn read(
        &self,
        kernels: &dyn Kernels,
        entry: usize,
        bytes: &mut [u8],
    ) -> Result<(), KernelError> {
        let range = self.layout().entries()[entry].range();
        match self.source(&range) {
            GradientSource::Device(x) => kernels.download(bytes, x),
            GradientSource::Host(x) => {
                bytes.copy_from_slice(host_bytes(kernels, x)?);
                Ok(())
            }
        }
    }

    /// Sets a range of one tensor's gradient on the device, as if a backward pass had.
    ///
    /// # Errors
    /// As [`Gradients::read`].
    pub fn store(
        &mut self,
        kernels: &dyn Kernels,
        range: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        kernels.upload(self.resident.flat_mut(range), bytes)
    }

    /// Reads a tensor's gradient that is on the device for good.
    pub fn view(&self, entry: usize) -> In<'_> {
        self.resident.view(entry)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.resident.dtype()
    }

    /// Whether the padding of what lives across steps is zero. Reads host memory.
    pub fn padding_is_zero(&self) -> bool {
        let host = self.streamed.iter().flat_map(|streamed| &streamed.host);
        [&self.resident]
            .into_iter()
            .chain(host)
            .all(Arena::padding_is_zero)
    }
}

/// The sums of squares of some gradients, whose first grain is this.
fn sum_of<'a>(grains: &'a mut Buffer, first: usize, x: In<'a>) -> NormGrains<'a> {
    let count = x.elements().div_ceil(GRAIN_ELEMENTS);
    NormGrains {
        grains: grains.view_mut().rows(first..first + count),
        x,
    }
}
