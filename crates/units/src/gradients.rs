//! Gradients of all trained parameters, accumulated over the micro-batches of a step.

use crate::gather::gathered;
use crate::grains::Grains;
use crate::reduction::Reducing;
use crate::stream::{OnDevice, UnitsOnDevice, finish_all, read_host};
use crate::{Ranks, UnitError};
use kernels::{Fill, Init, Kernels, Queue, Result};
use memory::{
    Arena, ArenaLease, ArenaPlace, Category, Cover, DType, Home, In, Layout, Memory, Out,
    OutOfMemory,
};
use std::ops::Range;
use std::rc::Rc;

const CAME: &str = "a unit of gradients has come before it is added to";
const SUMMED: &str = "a unit of gradients is summed before it leaves";

/// A unit that the backward pass adds to, until it is closed.
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
/// The first contribution of a step overwrites what the last step left, and later ones are added. So nothing is zeroed
/// as a whole, and a trained parameter without a contribution is noticed.
///
/// The backward pass opens a unit before it adds to it ([`Gradients::open`]), and closes it afterwards
/// ([`Gradients::close`]). If units live elsewhere, they are on the device only in between. The squares of complete
/// gradients are summed by grains ([`memory::GRAIN_ELEMENTS`]), those of a unit when it closes, so that the norm needs
/// no unit on the device again.
///
/// Where a rank has several parts of each sequence, every part adds to gradients of its own ([`Gradients::use_part`]), which are then added
/// up like those of ranks.
pub struct Gradients {
    /// All gradients, or only the vectors'. With several parts, the vectors' are those of the first.
    resident: Arena,
    /// The vectors' gradients of the other parts.
    of_parts: Vec<Arena>,
    /// The units on the device, one for each part of a sequence; none if all gradients stay there. They live on the host unless they are released
    /// or added up over ranks.
    units: Option<UnitsOnDevice>,
    reducing: Option<Reducing>,
    /// The part that adds now.
    part: usize,
    /// The virtual stage that adds now, counted over the whole pipeline.
    virtual_stage: usize,
    /// For each part, which parameters it has contributed to, and which groups of them.
    touched: Vec<Vec<Vec<bool>>>,
    grains: Grains,
}

impl Gradients {
    /// Leases what lives across steps. `ranks` are those that add up gradients, if any, and how many micro-batches each
    /// makes in a step.
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
        let parts = ranks.map_or(1, |(ranks, _)| ranks.parts_each);
        let (is_resident, host) = match home {
            Home::Device => (
                !ranks.is_some_and(|(ranks, _)| ranks.leases_gradients()),
                None,
            ),
            // Own gradients come and go, and the sums over ranks live there.
            Home::Pinned if ranks.is_some() => (false, None),
            Home::Pinned => {
                let matrices = trained.within(&layout.matrices());
                let host = lease(ArenaPlace::Host, "offloaded_gradients", matrices)?;
                (false, Some(host))
            }
            Home::Released => (false, None),
            Home::Disk(_) => unreachable!("no gradients live there"),
        };
        let kind = (Category::Gradient, "unit_gradients");
        let units = (!is_resident).then(|| UnitsOnDevice::new(memory, layout, kind, host));
        let vectors = trained.within(&layout.vectors());
        // Where all ranks get all sums, these come into an arena of all.
        let gets_all = is_resident || ranks.is_some_and(|(ranks, _)| ranks.shares_sums());
        let held = match gets_all {
            true => trained,
            false => vectors.clone(),
        };
        let reducing = ranks.map(|ranks| Reducing::lease(memory, layout, (dtype, home), ranks));
        let reducing = reducing.transpose()?;
        let of_part = |_| lease(ArenaPlace::Device, "gradients_of_part", vectors.clone());
        Ok(Gradients {
            resident: lease(ArenaPlace::Device, "gradients", held)?,
            of_parts: (1..parts).map(of_part).collect::<Result<_, _>>()?,
            units,
            reducing,
            part: 0,
            virtual_stage: layout.stage().number,
            touched: vec![untouched(layout); parts],
            grains: Grains::lease(memory, layout)?,
        })
    }

    /// The place of each tensor in the arenas.
    pub fn layout(&self) -> &Rc<Layout> {
        self.resident.layout()
    }

    /// Bytes on the device that live across steps.
    pub fn bytes(&self) -> u64 {
        let arenas = [&self.resident].into_iter().chain(&self.of_parts);
        arenas.map(Arena::bytes).sum::<u64>() + self.reducing.as_ref().map_or(0, Reducing::bytes)
    }

    /// Name and bytes of the arena in pinned host memory.
    pub fn host_arena(&self) -> Option<(&'static str, u64)> {
        Some(("offloaded_gradients", self.host()?.bytes()))
    }

    /// The gradients of matrices, or their sums over ranks, if they live in pinned host memory.
    fn host(&self) -> Option<&Arena> {
        let sums = self.reducing.as_ref();
        let sums = sums.and_then(|reducing| reducing.on_host.as_ref());
        sums.or(self.units.as_ref())?.host.as_ref()
    }

    /// Whether the gradients of matrices are released during the step.
    pub fn is_released(&self) -> bool {
        let is_nowhere = |units: &UnitsOnDevice| units.host.is_none();
        self.reducing.is_none() && self.units.as_ref().is_some_and(is_nowhere)
    }

    /// Begins a step: the next contribution to each parameter overwrites its gradient.
    pub fn begin_step(&mut self) {
        let touched = self.touched.iter_mut().flatten();
        touched.for_each(|touched| touched.fill(false));
        if let Some(reducing) = &mut self.reducing {
            reducing.begin_step();
        }
    }

    /// Begins a micro-batch's backward pass through a virtual stage, counted over the whole pipeline. If every micro-batch is added up
    /// over ranks, its contributions overwrite the previous micro-batch's, which were sent.
    pub fn begin_micro_batch(&mut self, virtual_stage: usize) {
        self.virtual_stage = virtual_stage;
        if self.overwrites_every_micro_batch() {
            let layout = self.resident.layout();
            for touched in &mut self.touched {
                let entries = touched.iter_mut().enumerate();
                let own =
                    entries.filter(|(entry, _)| layout.virtual_stage_of(*entry) == virtual_stage);
                own.for_each(|(_, touched)| touched.fill(false));
            }
        }
    }

    fn overwrites_every_micro_batch(&self) -> bool {
        let reducing = self.reducing.as_ref();
        reducing.is_some_and(|reducing| reducing.ranks.adds_every_micro_batch())
    }

    /// From now on this part of the micro-batch contributes.
    pub fn use_part(&mut self, part: usize) {
        self.part = part;
    }

    /// Where to write the next contribution to a parameter's gradient, and what to add it to. The parameter's unit must
    /// be open.
    pub fn accumulate(&mut self, parameter: usize) -> (Out<'_>, Init<'static>) {
        let gradient = self.accumulate_joined(&[parameter]);
        gradient.expect("a tensor lies with itself")
    }

    /// The same for several parameters as one, if they are contiguous in the layout ([`Layout::joined`]).
    ///
    /// # Panics
    /// If only some of them have had contributions in this step.
    pub fn accumulate_joined(&mut self, parameters: &[usize]) -> Option<(Out<'_>, Init<'static>)> {
        let layout = self.resident.layout().clone();
        let (range, dims) = layout.joined(parameters)?;
        let init = self.touch_together(parameters);
        let flat = self.place(layout.unit_of(parameters[0]), range);
        Some((flat.reshape(dims), init))
    }

    /// The same for a group of a parameter ([`memory::LayoutBuilder::in_groups`]), by the group's unit.
    pub fn accumulate_group(&mut self, parameter: usize, unit: usize) -> (Out<'_>, Init<'static>) {
        let (range, dims) = self.layout().group(parameter, unit);
        let group = unit - self.layout().units_of(parameter).start;
        let init = self.touch(parameter, group);
        (self.place(Some(unit), range).reshape(dims), init)
    }

    /// Where the part's gradients of a range are, which is of this unit if it is of any.
    fn place(&mut self, unit: Option<usize>, range: Range<usize>) -> Out<'_> {
        match (unit, self.part.checked_sub(1), &mut self.units) {
            (Some(unit), _, Some(units)) => units.get_open((unit, self.part)).flat_mut(&range),
            (_, None, _) => self.resident.flat_mut(range),
            (_, Some(other), _) => self.of_parts[other].flat_mut(range),
        }
    }

    /// The same for several vectors that lie apart, in the layout's order.
    ///
    /// # Panics
    /// As [`Gradients::accumulate_joined`].
    pub fn accumulate_apart(&mut self, vectors: &[usize]) -> (Vec<Out<'_>>, Init<'static>) {
        let init = self.touch_together(vectors);
        (self.own_vectors(vectors), init)
    }

    /// The same, each by itself.
    pub fn accumulate_all(&mut self, vectors: &[usize]) -> Vec<(Out<'_>, Init<'static>)> {
        let inits: Vec<_> = vectors.iter().map(|one| self.touch(*one, 0)).collect();
        self.own_vectors(vectors).into_iter().zip(inits).collect()
    }

    /// The part's gradients of several vectors, in the layout's order.
    fn own_vectors(&mut self, vectors: &[usize]) -> Vec<Out<'_>> {
        let range = |vector: &usize| self.layout().entries()[*vector].range();
        let ranges: Vec<_> = vectors.iter().map(range).collect();
        self.own_mut().disjoint_mut(&ranges)
    }

    /// The part's gradients on the device, if those of units are not leased.
    fn own_mut(&mut self) -> &mut Arena {
        match self.part.checked_sub(1) {
            None => &mut self.resident,
            Some(other) => &mut self.of_parts[other],
        }
    }

    fn touch_together(&mut self, parameters: &[usize]) -> Init<'static> {
        let touched = |parameter: &usize| self.touched[self.part][*parameter][0];
        assert!(
            parameters.iter().all(touched) || !parameters.iter().any(touched),
            "what is contributed to as one always is"
        );
        let inits = parameters.iter().map(|parameter| self.touch(*parameter, 0));
        inits.last().expect("there are some")
    }

    fn touch(&mut self, parameter: usize, group: usize) -> Init<'static> {
        match std::mem::replace(&mut self.touched[self.part][parameter][group], true) {
            false => Init::Overwrite,
            true => Init::Accumulate,
        }
    }

    /// The names of this stage's trained parameters without a contribution in this step.
    pub fn missing(&self) -> Vec<&str> {
        let layout = self.layout();
        let entries = layout.entries().iter().enumerate();
        let is_here = |index| layout.stage_of(index) == layout.stage().number;
        let is_missing = |index: usize| {
            self.touched
                .iter()
                .any(|touched| touched[index].contains(&false))
        };
        entries
            .filter(|(index, entry)| {
                entry.role.is_trained() && is_missing(*index) && is_here(*index)
            })
            .map(|(_, entry)| entry.name.as_str())
            .collect()
    }

    /// Leases room for the unit that the backward pass adds to next, and starts fetching what earlier micro-batches
    /// added to it.
    ///
    /// # Errors
    /// [`UnitError`] if the lease is refused or the device fails.
    pub fn fetch(&mut self, kernels: &Kernels, unit: usize) -> Result<(), UnitError> {
        match self.is_begun(unit) {
            true => self.lease_unit(kernels, unit),
            false => Ok(()),
        }
    }

    /// Whether this step has added to a unit.
    fn is_begun(&self, unit: usize) -> bool {
        let layout = self.layout();
        let mut entries = layout.units()[unit].entries.iter();
        entries.any(|entry| self.touched[0][*entry][unit - layout.units_of(*entry).start])
    }

    /// Leases room for a unit that has none, for each part. Starts fetching what the host has of it, or zeroes its padding.
    fn lease_unit(&mut self, kernels: &Kernels, unit: usize) -> Result<(), UnitError> {
        let (parts, is_begun) = (self.touched.len(), self.is_begun(unit));
        let Some(units) = &mut self.units else {
            return Ok(());
        };
        let cover = &self.resident.layout().units()[unit].trained;
        for of in (0..parts).map(|part| (unit, part)) {
            if units.has(of) {
                continue;
            }
            let types = self.resident.types().clone();
            let (here, host) = units.lease(of, cover.clone(), types)?;
            match host.filter(|_| is_begun) {
                Some(host) => here.fetch(kernels, &[(host, cover.clone())])?,
                None => clear_padding(kernels, &mut here.arena)?,
            }
        }
        Ok(())
    }

    /// Opens a unit: the backward pass may add to it from now on.
    ///
    /// # Errors
    /// As [`Gradients::fetch`].
    pub fn open(&mut self, kernels: &Kernels, unit: usize) -> Result<OpenUnit, UnitError> {
        self.open_vectors(kernels)?;
        self.open_matrices(kernels, unit)
    }

    fn open_matrices(&mut self, kernels: &Kernels, unit: usize) -> Result<OpenUnit, UnitError> {
        if !self.has_trained(unit) {
            return Ok(OpenUnit(unit));
        }
        self.fetch(kernels, unit)?;
        if let Some(reducing) = &mut self.reducing {
            reducing.wait_until_sent(kernels, unit)?;
            let like = (&self.resident, &mut self.grains);
            reducing.open(kernels, unit, like)?;
        }
        self.lease_unit(kernels, unit)?;
        if let Some(units) = &mut self.units {
            for part in 0..self.touched.len() {
                units.open(kernels, Queue::Compute, (unit, part), CAME)?;
            }
        }
        Ok(OpenUnit(unit))
    }

    /// Lets the backward pass add to any vectors of its virtual stage, also where no unit is open.
    ///
    /// # Errors
    /// `KernelError` if the device fails.
    pub fn open_vectors(&mut self, kernels: &Kernels) -> Result {
        match &mut self.reducing {
            Some(reducing) => {
                reducing.wait_until_sent(kernels, reducing.vectors_of(self.virtual_stage))
            }
            None => Ok(()),
        }
    }

    /// Opens a unit for deferred gradients of a micro-batch. Later backward passes may have begun since, which have added nothing to it.
    ///
    /// # Errors
    /// As [`Gradients::open`].
    pub fn open_deferred(&mut self, kernels: &Kernels, unit: usize) -> Result<OpenUnit, UnitError> {
        if self.overwrites_every_micro_batch() {
            let entries = &self.resident.layout().units()[unit].entries;
            for touched in &mut self.touched {
                entries.iter().for_each(|entry| touched[*entry].fill(false));
            }
        }
        self.open_matrices(kernels, unit)
    }

    /// Closes a unit, after the unit's own part (`is_own`) or another part has added to it. If this was the step's last
    /// contribution, the squares are summed. If gradients are added up over ranks, that begins. A unit that is sent
    /// keeps its memory until the next unit is closed, so that the copy has that long; one that is not sent keeps it
    /// until [`Gradients::release`].
    ///
    /// # Errors
    /// `KernelError` if the device or another rank fails.
    pub fn close(
        &mut self,
        kernels: &Kernels,
        OpenUnit(unit): OpenUnit,
        of: (bool, bool),
    ) -> Result {
        if self.has_trained(unit) {
            self.send(kernels, unit, of)?;
        }
        self.give_back(kernels, Some(unit))
    }

    /// Sums the squares of a unit if it is complete, and sends the unit to the host or to other ranks.
    fn send(
        &mut self,
        kernels: &Kernels,
        unit: usize,
        (is_own, is_last_micro_batch): (bool, bool),
    ) -> Result {
        if self.reducing.is_some() {
            return match is_own {
                true => self.add_up(kernels, unit, is_last_micro_batch),
                false => Ok(()),
            };
        }
        let Some(units) = &mut self.units else {
            return Ok(());
        };
        if is_own && is_last_micro_batch {
            let cover = &self.resident.layout().units()[unit].trained;
            let here = units.get((unit, 0));
            self.grains.sum(kernels, cover, |range| here.flat(&range))?;
        }
        match units.host {
            Some(_) => units.send(kernels, Queue::Compute, (unit, 0), SUMMED),
            None => Ok(()),
        }
    }

    /// Whether a unit has gradients.
    pub fn has_trained(&self, unit: usize) -> bool {
        self.layout().units()[unit].trained.elements() > 0
    }

    /// Starts adding up a bundle over ranks, if that is due.
    fn add_up(&mut self, kernels: &Kernels, bundle: usize, is_last_micro_batch: bool) -> Result {
        let reducing = self.reducing.as_mut().expect("asked where there are ranks");
        if !(reducing.ranks.adds_every_micro_batch() || is_last_micro_batch) {
            return Ok(());
        }
        let is_unit = bundle < self.resident.layout().units().len();
        let of_parts = (0..self.touched.len()).map(|part| (bundle, part));
        let mut units = self.units.as_mut().filter(|_| is_unit);
        let own: Vec<&OnDevice> = match &units {
            Some(units) => of_parts.clone().map(|of| units.get(of)).collect(),
            None => Vec::new(),
        };
        let own = (&mut self.resident, &self.of_parts[..], &own[..]);
        let sent = reducing.add(kernels, (bundle, is_last_micro_batch), own)?;
        if let Some(units) = &mut units {
            of_parts.for_each(|of| units.get_mut(of).close(sent));
        }
        Ok(())
    }

    /// After a micro-batch's backward pass, whose vectors of the virtual stage are complete: adds them up over ranks, if that is due.
    ///
    /// # Errors
    /// `KernelError` if the device or another rank fails.
    pub fn add_up_vectors(&mut self, kernels: &Kernels, is_last: bool) -> Result {
        match &self.reducing {
            Some(reducing) => {
                self.add_up(kernels, reducing.vectors_of(self.virtual_stage), is_last)
            }
            None => Ok(()),
        }
    }

    /// After a backward pass, or after deferred gradients were added: units that were sent give back their memory. If the step's gradients
    /// are complete, so are the sums over ranks.
    ///
    /// # Errors
    /// As [`Gradients::add_up_vectors`].
    pub fn end_pass(&mut self, kernels: &Kernels, is_complete: bool) -> Result {
        if let Some(reducing) = &mut self.reducing {
            let into = (&mut self.resident, &mut self.grains);
            reducing.end_pass(kernels, is_complete, into)?;
        }
        self.give_back(kernels, None)
    }

    /// Gives back the memory of all sent units except `but`.
    fn give_back(&mut self, kernels: &Kernels, but: Option<usize>) -> Result {
        if let Some(units) = &mut self.units {
            while units.take_sent(kernels, but)?.is_some() {}
        }
        Ok(())
    }

    /// Gives back the memory of some units. The computation must already wait for their updates.
    pub fn release(&mut self, is_over: impl Fn(usize) -> bool) {
        if let Some(units) = &mut self.units {
            units.release(is_over);
        }
    }

    /// Drops everything after a pass that ended early. The host waits for copies under way.
    ///
    /// # Errors
    /// `KernelError` if the device fails. Nothing is left on the device then either.
    pub fn abandon(&mut self, kernels: &Kernels) -> Result {
        let has_units = self.units.as_ref().is_some_and(|units| !units.is_empty());
        let reducing = self.reducing.as_ref();
        if !has_units && reducing.is_none_or(|reducing| reducing.on_host.is_none()) {
            return Ok(());
        }
        let finished = finish_all(kernels);
        if let Some(reducing) = &mut self.reducing {
            reducing.abandon();
        }
        if let Some(units) = &mut self.units {
            units.abandon(self.reducing.is_some());
        }
        finished
    }

    /// Sums the squares of the gradients that stay on the device; those of other units were summed when they closed.
    /// With ranks, all ranks either get all gradients first, or each sums the squares of its own and all get the
    /// grains. Stages of a pipeline first get each other's vectors, once none waits for a pass any more.
    ///
    /// # Errors
    /// `KernelError` if the device or another rank fails.
    pub fn sum_grains(&mut self, kernels: &Kernels) -> Result {
        let layout = self.resident.layout().clone();
        let (resident, grains) = (&mut self.resident, &mut self.grains);
        let Some(reducing) = &mut self.reducing else {
            return grains.sum(kernels, resident.held(), |range| resident.flat(range));
        };
        let has_stages = reducing.ranks.stage.of > 1;
        if has_stages {
            gathered(kernels, || reducing.share_vectors(kernels, resident))?;
        }
        if reducing.ranks.shares_sums() {
            gathered(kernels, || reducing.share(kernels, resident))?;
        }
        let own = layout.own_trained(reducing.ranks.updating());
        let held = match reducing.on_host {
            // Those of units were summed when they left.
            Some(_) => own.within(&layout.vectors()),
            None => own,
        };
        grains.sum(kernels, &held, |range| reducing.sum(resident, range))?;
        if !reducing.ranks.shares_sums() {
            gathered(kernels, || grains.gather(kernels, reducing.ranks.rank))?;
        }
        if has_stages {
            gathered(kernels, || grains.gather_stages(kernels, &reducing.ranks))?;
        }
        Ok(())
    }

    /// The sums of squares of all gradients, `[g]` f64.
    pub fn grains(&self) -> In<'_> {
        self.grains.all()
    }

    /// The sums of squares of a unit. They are contiguous if none of its part's experts are units of their own.
    pub fn unit_grains(&self, unit: usize) -> In<'_> {
        self.grains.within(&self.layout().units()[unit].trained)
    }

    /// Reads a range, within one unit or the vectors, from pinned host memory; none if it does not live there.
    pub fn on_host(&self, range: &Range<usize>) -> Option<In<'_>> {
        let host = self.host()?;
        host.held().rows(range)?;
        Some(host.flat(range.clone()))
    }

    /// Reads a range on the device, within one unit or the vectors.
    pub fn flat(&self, range: &Range<usize>) -> In<'_> {
        if let Some(reducing) = &self.reducing {
            return reducing.sum(&self.resident, range.clone());
        }
        match (&self.units, self.layout().locate(range)) {
            (Some(units), Some(unit)) => units.get((unit, 0)).flat(range),
            _ => self.resident.flat(range.clone()),
        }
    }

    /// Copies the gradient of a range of one tensor, between steps. A matrix's gradient must not have been released.
    ///
    /// # Errors
    /// `KernelError` if the device fails, or `bytes` have another size.
    pub fn read(&self, kernels: &Kernels, range: &Range<usize>, bytes: &mut [u8]) -> Result {
        match self.on_host(range) {
            None => kernels.download(bytes, self.flat(range)),
            Some(x) => read_host(kernels, bytes, x),
        }
    }

    /// Overwrites a range of one tensor's gradient on the device, as a backward pass would.
    ///
    /// # Errors
    /// As [`Gradients::read`].
    pub fn store(&mut self, kernels: &Kernels, range: Range<usize>, bytes: &[u8]) -> Result {
        kernels.upload(self.resident.flat_mut(range), bytes)
    }

    /// Reads the gradient of a tensor whose gradient stays on the device.
    pub fn view(&self, entry: usize) -> In<'_> {
        self.resident.view(entry)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.resident.types().common()
    }

    /// Whether the padding of what lives across steps is zero. Only for arenas that the host can read.
    pub fn padding_is_zero(&self) -> bool {
        let mut arenas = [&self.resident].into_iter().chain(self.host());
        arenas.all(Arena::padding_is_zero)
    }
}

/// For each parameter, no contribution to any of its groups.
fn untouched(layout: &Layout) -> Vec<Vec<bool>> {
    let entries = 0..layout.entries().len();
    let groups = entries.map(|entry| layout.units_of(entry).len().max(1));
    groups.map(|groups| vec![false; groups]).collect()
}

/// Zeroes the padding behind a unit's tensors, because the norm and the update read it.
fn clear_padding(kernels: &Kernels, arena: &mut Arena) -> Result {
    let padding = Cover::new(arena.layout().padding()).within_all(arena.held());
    padding.ranges().iter().try_for_each(|range| {
        let out = arena.flat_mut(range.clone());
        kernels.run(Fill { out, value: 0.0 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::SumInOrder;
    use kernels::cpu::Cpu;
    use memory::{Layer, LayoutBuilder};

    /// Two units of one matrix each.
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
        let open = gradients.open(kernels, unit).unwrap();
        let (out, init) = gradients.accumulate(unit);
        let (out, x) = (out.reshape([elements]), x.view());
        kernels.run(SumInOrder { out, x, init }).unwrap();
        gradients.close(kernels, open, (true, is_last)).unwrap();
    }

    /// Runs two steps of two micro-batches; those of the second add 1 and 2. Returns the gradients, and the sums of
    /// their squares by grains.
    fn accumulated(home: &Home) -> ([Vec<f32>; 2], Vec<f64>) {
        let memory = Memory::host();
        let kernels: Box<Kernels> = Box::new(Cpu::new(&memory, DType::F32).unwrap());
        let gradients = Gradients::lease(&memory, &layout(), DType::F32, home, None);
        let mut gradients = gradients.unwrap();
        for values in [[100.0, 200.0], [1.0, 2.0]] {
            gradients.begin_step();
            assert_eq!(gradients.missing(), ["first", "second"]);
            for (value, is_last) in values.into_iter().zip([false, true]) {
                gradients.begin_micro_batch(0);
                for unit in [1, 0] {
                    let of = (value, is_last);
                    contribute((&memory, &*kernels), &mut gradients, unit, of);
                }
                gradients.add_up_vectors(&*kernels, is_last).unwrap();
                gradients.end_pass(&*kernels, is_last).unwrap();
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
