//! Gradients of all trained parameters, accumulated over the micro-batches of a step.

use crate::gather::gathered;
use crate::grains::Grains;
use crate::reduction::Reducing;
use crate::stream::{finish_all, host_bytes};
use crate::streamed_gradients::StreamedGradients;
use crate::{Ranks, UnitError};
use kernels::{Init, KernelError, Kernels, Traffic};
use memory::{
    Arena, ArenaLease, ArenaPlace, Category, DType, Home, In, Layer, Layout, Memory, Out,
    OutOfMemory,
};
use std::ops::Range;
use std::rc::Rc;

/// A unit that the backward pass contributes to, until it is closed.
#[must_use = "what is opened is closed"]
pub struct OpenUnit(usize);

impl OpenUnit {
    /// Its index in the layout.
    pub fn unit(&self) -> usize {
        self.0
    }
}

/// The gradients, f32 or bf16.
///
/// The first contribution of a step replaces what the last step left, later ones are added: nothing is ever
/// zeroed as a whole, and a trained parameter that received nothing is noticed.
///
/// The backward pass opens a unit before it contributes to it ([`Gradients::open`]), and closes it after that
/// ([`Gradients::close`]): where units come and go, it is on the device in between. The squares of what is complete are
/// summed by grains ([`memory::GRAIN_ELEMENTS`]), of units when they close, so that the norm needs nothing to come again.
pub struct Gradients {
    /// All of them, or the vectors.
    resident: Arena,
    streamed: Option<StreamedGradients>,
    reducing: Option<Reducing>,
    touched: Vec<bool>,
    grains: Grains,
}

impl Gradients {
    /// Leases what lives across steps. Ranks, if there are any, add up gradients; each makes so many micro-batches in a step.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it does not fit.
    pub fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        dtype: DType,
        home: &Home,
        ranks: Option<(&Ranks, usize)>,
    ) -> Result<Gradients, OutOfMemory> {
        let lease = |place, name, held| {
            let lease = ArenaLease::new(place, Category::Gradient, name);
            Arena::lease(memory, lease, layout, dtype, held)
        };
        let trained = layout.trained();
        let (is_resident, host) = match home {
            Home::Device => (
                !ranks.is_some_and(|(ranks, _)| ranks.stages_by_unit()),
                None,
            ),
            Home::Pinned => {
                let matrices = trained.within(&layout.matrices());
                let host = lease(ArenaPlace::Host, "offloaded_gradients", matrices)?;
                (false, Some(host))
            }
            Home::Released => (false, None),
            Home::Disk(_) => unreachable!("no gradients live there"),
        };
        let (held, streamed) = match is_resident {
            true => (trained, None),
            false => {
                let streamed = StreamedGradients {
                    host,
                    here: Vec::new(),
                    traffic: Traffic::default(),
                };
                (trained.within(&layout.vectors()), Some(streamed))
            }
        };
        let reducing = ranks.map(|ranks| Reducing::lease(memory, layout, dtype, ranks));
        let reducing = reducing.transpose()?;
        Ok(Gradients {
            resident: lease(ArenaPlace::Device, "gradients", held)?,
            streamed,
            reducing,
            touched: vec![false; layout.entries().len()],
            grains: Grains::lease(memory, layout)?,
        })
    }

    /// Where each tensor lies.
    pub fn layout(&self) -> &Rc<Layout> {
        self.resident.layout()
    }

    /// Bytes on the device, across steps.
    pub fn bytes(&self) -> u64 {
        self.resident.bytes() + self.reducing.as_ref().map_or(0, Reducing::bytes)
    }

    /// Name and bytes of the arena in pinned host memory.
    pub fn host_arena(&self) -> Option<(&'static str, u64)> {
        let host = self.streamed.as_ref()?.host.as_ref()?;
        Some(("offloaded_gradients", host.bytes()))
    }

    /// What has crossed of them during passes; updates bring them with the states.
    pub fn traffic(&self) -> Traffic {
        let streamed = self.streamed.as_ref().map(|streamed| streamed.traffic);
        let reducing = self.reducing.as_ref().map(|reducing| reducing.traffic);
        let none = Traffic::default();
        streamed.unwrap_or(none).plus(reducing.unwrap_or(none))
    }

    /// Whether gradients of matrices are gone after a step.
    pub fn is_released(&self) -> bool {
        let is_nowhere = |streamed: &StreamedGradients| streamed.host.is_none();
        self.reducing.is_none() && self.streamed.as_ref().is_some_and(is_nowhere)
    }

    /// A step begins: the next contribution to each parameter replaces its gradient.
    pub fn begin_step(&mut self) {
        self.touched.fill(false);
        if let Some(reducing) = &mut self.reducing {
            reducing.begin_step();
        }
    }

    /// A micro-batch begins. Where every one is added up over ranks, its contributions replace those of the one before, which
    /// were sent.
    pub fn begin_micro_batch(&mut self) {
        let reducing = self.reducing.as_ref();
        if reducing.is_some_and(|reducing| reducing.ranks.adds_every_micro_batch()) {
            self.touched.fill(false);
        }
    }

    /// Where to write the next contribution to a parameter, and what to add it to. Its unit is open.
    pub fn accumulate(&mut self, parameter: usize) -> (Out<'_>, Init<'static>) {
        let gradient = self.accumulate_joined(&[parameter]);
        gradient.expect("a tensor lies with itself")
    }

    /// The same for several parameters as one, where the layout has them so ([`Layout::joined`]).
    ///
    /// # Panics
    /// If some of them have had contributions in this step, and some have not.
    pub fn accumulate_joined(&mut self, parameters: &[usize]) -> Option<(Out<'_>, Init<'static>)> {
        let layout = self.resident.layout().clone();
        let (range, dims) = layout.joined(parameters)?;
        let touched = |parameter: &usize| self.touched[*parameter];
        assert!(
            parameters.iter().all(touched) || !parameters.iter().any(touched),
            "what is contributed to as one always is"
        );
        let inits = parameters.iter().map(|parameter| self.touch(*parameter));
        let init = inits.last().expect("a joined tensor has parts");
        let flat = match (layout.unit_of(parameters[0]), &mut self.streamed) {
            (Some(unit), Some(streamed)) => streamed.open_mut(unit).flat_mut(&range),
            _ => self.resident.flat_mut(range),
        };
        Some((flat.reshape(dims), init))
    }

    /// The same for several vectors, in the order in which they lie.
    pub fn accumulate_all(&mut self, parameters: &[usize]) -> Vec<(Out<'_>, Init<'static>)> {
        let parameters = parameters.iter();
        let inits: Vec<_> = parameters.clone().map(|one| self.touch(*one)).collect();
        let ranges = parameters.map(|one| self.layout().entries()[*one].range());
        let ranges: Vec<_> = ranges.collect();
        let views = self.resident.disjoint_mut(&ranges).into_iter();
        views.zip(inits).collect()
    }

    fn touch(&mut self, parameter: usize) -> Init<'static> {
        match std::mem::replace(&mut self.touched[parameter], true) {
            false => Init::Overwrite,
            true => Init::Accumulate,
        }
    }

    /// The names of trained parameters that received nothing in this step.
    pub fn missing(&self) -> Vec<&str> {
        let entries = self.layout().entries().iter().zip(&self.touched);
        entries
            .filter(|(entry, touched)| entry.role.is_trained() && !**touched)
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
        kernels: &Kernels,
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
        kernels: &Kernels,
        unit: usize,
    ) -> Result<OpenUnit, UnitError> {
        self.fetch(memory, kernels, unit)?;
        if let Some(reducing) = &mut self.reducing {
            // Vectors of any part may be contributed to with the first unit.
            reducing.wait_until_sent(kernels, unit)?;
            reducing.wait_until_sent(kernels, reducing.vectors())?;
        }
        let has_trained = self.has_trained(unit);
        if let Some(streamed) = self.streamed.as_mut().filter(|_| has_trained) {
            streamed.open(memory, kernels, unit, &self.resident)?;
        }
        Ok(OpenUnit(unit))
    }

    /// The backward pass has contributed to a unit: all that it will in this micro-batch if that `is_own`, else another part
    /// has. If that was the step's last contribution, the squares are summed; where gradients are added up over ranks, that
    /// begins. What is sent somewhere keeps its memory until the next unit is closed, so that the copies have had as long;
    /// what is not, until [`Gradients::release`].
    ///
    /// # Errors
    /// [`KernelError`] if the device or another rank fails.
    pub fn close(
        &mut self,
        kernels: &Kernels,
        OpenUnit(unit): OpenUnit,
        of: (bool, bool),
    ) -> Result<(), KernelError> {
        if self.has_trained(unit) {
            self.send(kernels, unit, of)?;
        }
        self.give_back(kernels, Some(unit))
    }

    /// Sums what is complete of a unit, and sends it to the host or to other ranks.
    fn send(
        &mut self,
        kernels: &Kernels,
        unit: usize,
        (is_own, is_last_micro_batch): (bool, bool),
    ) -> Result<(), KernelError> {
        if self.reducing.is_some() {
            return match is_own {
                true => self.add_up(kernels, unit, is_last_micro_batch),
                false => Ok(()),
            };
        }
        if is_own && is_last_micro_batch && self.streamed.is_some() {
            self.sum_unit(kernels, unit)?;
        }
        match &mut self.streamed {
            Some(streamed) => streamed.send(kernels, unit),
            None => Ok(()),
        }
    }

    /// Whether a unit has gradients.
    pub fn has_trained(&self, unit: usize) -> bool {
        self.layout().units()[unit].trained.elements() > 0
    }

    /// Begins to add up a bundle over ranks, if that is due.
    fn add_up(
        &mut self,
        kernels: &Kernels,
        bundle: usize,
        is_last_micro_batch: bool,
    ) -> Result<(), KernelError> {
        let reducing = self.reducing.as_mut().expect("asked where there are ranks");
        if !(reducing.ranks.adds_every_micro_batch() || is_last_micro_batch) {
            return Ok(());
        }
        let is_unit = bundle != reducing.vectors();
        let streamed = self.streamed.as_mut().filter(|_| is_unit);
        let unit = streamed.as_ref().map(|streamed| streamed.of(bundle));
        let sent = reducing.add(kernels, bundle, (&mut self.resident, unit))?;
        if let Some(streamed) = streamed {
            streamed.closed(bundle, sent);
        }
        Ok(())
    }

    /// The backward pass of a micro-batch is over: all vectors have been contributed to, and what was sent gives back its
    /// memory. After the last one the sums over ranks are complete.
    ///
    /// # Errors
    /// [`KernelError`] if the device or another rank fails.
    pub fn end_micro_batch(&mut self, kernels: &Kernels, is_last: bool) -> Result<(), KernelError> {
        if let Some(reducing) = &self.reducing {
            self.add_up(kernels, reducing.vectors(), is_last)?;
        }
        if let (Some(reducing), true) = (&mut self.reducing, is_last) {
            reducing.finish(kernels, &mut self.resident)?;
        }
        self.give_back(kernels, None)
    }

    /// Gives back the memory of units that were sent, but of this one.
    fn give_back(&mut self, kernels: &Kernels, but: Option<usize>) -> Result<(), KernelError> {
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
    pub fn abandon(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        match &mut self.streamed {
            Some(streamed) if !streamed.here.is_empty() => {
                let finished = finish_all(kernels);
                match self.reducing {
                    None => streamed.here.clear(),
                    // Other ranks may never take what they are sent, so nobody waits for it, and its memory is not used again.
                    Some(_) => streamed.here.drain(..).for_each(std::mem::forget),
                }
                finished
            }
            _ => Ok(()),
        }
    }

    /// Sums the squares of what is on the device for good; those of other units were summed when they closed. Where ranks add
    /// up gradients, all get all sums first if they need them; else each sums the squares of its own, and all get the grains.
    ///
    /// # Errors
    /// [`KernelError`] if the device or another rank fails.
    pub fn sum_grains(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let layout = self.resident.layout().clone();
        if let Some(reducing) = self.reducing.as_mut().filter(|one| one.ranks.shares_sums()) {
            gathered(kernels, || reducing.share(kernels, &mut self.resident))?;
        }
        let held = match &self.reducing {
            Some(reducing) => layout.own_trained(reducing.ranks.updating()),
            None => self.resident.held().clone(),
        };
        let (resident, reducing) = (&self.resident, &self.reducing);
        self.grains.sum(kernels, &held, |range| match reducing {
            Some(reducing) => reducing.sum(resident, range),
            None => resident.flat(range),
        })?;
        match reducing {
            Some(reducing) if !reducing.ranks.shares_sums() => {
                let rank = reducing.ranks.rank;
                gathered(kernels, || self.grains.gather(kernels, rank))
            }
            _ => Ok(()),
        }
    }

    fn sum_unit(&mut self, kernels: &Kernels, unit: usize) -> Result<(), KernelError> {
        let cover = &self.resident.layout().units()[unit].trained;
        let streamed = self.streamed.as_ref().expect("the unit is open");
        let on_device = streamed.of(unit);
        self.grains
            .sum(kernels, cover, |range| on_device.flat(&range))
    }

    /// The sums of squares of all gradients, `[g]` f64.
    pub fn grains(&self) -> In<'_> {
        self.grains.all()
    }

    /// Those of the unit of one part, which lie together; none if it has no unit.
    pub fn unit_grains(&self, part: Layer) -> In<'_> {
        let unit = self.layout().unit_of_part(part);
        let cover = unit.map(|unit| &self.layout().units()[unit].trained);
        self.grains.within(cover)
    }

    /// Reads a range, within one unit or the vectors, that lives in pinned host memory; none of others.
    pub fn on_host(&self, range: &Range<usize>) -> Option<In<'_>> {
        let host = self.streamed.as_ref()?.host.as_ref()?;
        self.layout().locate(range)?;
        Some(host.flat(range.clone()))
    }

    /// Reads a range, within one unit or the vectors, on the device.
    pub fn flat(&self, range: &Range<usize>) -> In<'_> {
        if let Some(reducing) = &self.reducing {
            return reducing.sum(&self.resident, range.clone());
        }
        match (&self.streamed, self.layout().locate(range)) {
            (Some(streamed), Some(unit)) => streamed.of(unit).flat(range),
            _ => self.resident.flat(range.clone()),
        }
    }

    /// Copies the gradient of a range of one tensor, between steps. Those of matrices must not have been released.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or `bytes` have another size.
    pub fn read(
        &self,
        kernels: &Kernels,
        range: &Range<usize>,
        bytes: &mut [u8],
    ) -> Result<(), KernelError> {
        match self.on_host(range) {
            None => kernels.download(bytes, self.flat(range)),
            Some(x) => {
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
        kernels: &Kernels,
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
        self.resident.types().common()
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

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::SumInOrder;
    use kernels::cpu::Cpu;
    use memory::LayoutBuilder;

    /// Two units of a matrix each.
    fn layout() -> Rc<Layout> {
        let mut builder = LayoutBuilder::default();
        builder.add(Layer::Block(0), "first", &[2, 128]);
        builder.add(Layer::Block(1), "second", &[40, 128]);
        Rc::new(builder.build())
    }

    fn contribute(
        (memory, kernels): (&Memory, &Kernels),
        gradients: &mut Gradients,
        unit: usize,
        (value, is_last): (f32, bool),
    ) {
        let elements = layout().entries()[unit].elements();
        let lease = memory.lease(Category::Temporary, "x", [1, elements], DType::F32);
        let mut x = lease.unwrap();
        x.view_mut().slice_mut::<f32>().fill(value);
        let open = gradients.open(memory, kernels, unit).unwrap();
        let (out, init) = gradients.accumulate(unit);
        let (out, x) = (out.reshape([elements]), x.view());
        kernels.run(SumInOrder { out, x, init }).unwrap();
        gradients.close(kernels, open, (true, is_last)).unwrap();
    }

    /// Two micro-batches that add 1 and 2 in the second of two steps: the gradients, and the sums of their squares by grains.
    fn accumulated(home: &Home) -> ([Vec<f32>; 2], Vec<f64>) {
        let memory = Memory::host();
        let kernels: Box<Kernels> = Box::new(Cpu::new(&memory, DType::F32).unwrap());
        let gradients = Gradients::lease(&memory, &layout(), DType::F32, home, None);
        let mut gradients = gradients.unwrap();
        for values in [[100.0, 200.0], [1.0, 2.0]] {
            gradients.begin_step();
            assert_eq!(gradients.missing(), ["first", "second"]);
            for (value, is_last) in values.into_iter().zip([false, true]) {
                gradients.begin_micro_batch();
                for unit in [1, 0] {
                    let of = (value, is_last);
                    contribute((&memory, &*kernels), &mut gradients, unit, of);
                }
                gradients.end_micro_batch(&*kernels, is_last).unwrap();
            }
            assert_eq!(gradients.missing(), [""; 0]);
            gradients.sum_grains(&*kernels).unwrap();
        }
        let read = |unit: usize| {
            let range = layout().entries()[unit].range();
            let mut bytes = vec![0; 4 * range.len()];
            gradients.read(&*kernels, &range, &mut bytes).unwrap();
            let values = bytes.as_chunks().0.iter().copied();
            values.map(f32::from_le_bytes).collect()
        };
        let grains = gradients.grains().slice::<f64>().to_vec();
        ([read(0), read(1)], grains)
    }

    #[test]
    fn contributions_replace_those_of_the_last_step_and_add_up_wherever_they_live() {
        let on_device = accumulated(&Home::Device);
        let [first, second] = &on_device.0;
        assert_eq!((first.len(), second.len()), (256, 5120));
        assert!(first.iter().chain(second).all(|value| *value == 3.0));
        let grains = [256, 4096, 1024].map(|elements| 9.0 * f64::from(elements));
        assert_eq!(on_device.1, grains);
        assert_eq!(accumulated(&Home::Pinned), on_device);
    }
}
