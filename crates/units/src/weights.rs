//! The weights: all on the device, or a few units at a time.

use crate::coded::{self, CodeBytes, Filling, set_code_bytes};
use crate::gathered_weights::GatheredWeights;
use crate::step_codes::StepCodes;
use crate::stream::read_host;
use crate::streamed_weights::StreamedWeights;
use crate::{Ranks, Zero};
use kernels::{Kernels, Result};
use memory::{
    Arena, ArenaLease, ArenaPlace, Category, Cover, DType, Home, Homes, In, Layout, Memory, Out,
    OutOfMemory,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// The weights of a model.
///
/// Before a pass, the caller gives the order in which it uses units ([`Weights::begin_pass`]). In the pass it says
/// which unit comes next ([`Weights::use_unit`]). The order tells which units to fetch ahead ([`Weights::look_ahead`]).
pub struct Weights {
    /// The weights that stay on the device.
    pub(crate) resident: Arena,
    pub(crate) streamed: Option<StreamedWeights>,
    /// What this rank keeps of bundles that other ranks update in part.
    pub(crate) gathered: Option<GatheredWeights>,
    /// Codes that are kept for a step.
    pub(crate) step_codes: Option<StepCodes>,
    /// The matrices of codes of which a part was set, by their index in the layout.
    filling: BTreeMap<usize, Filling>,
    /// The units that were used, if that is recorded.
    pub(crate) record: Option<Vec<usize>>,
}

impl Weights {
    /// Leases the weights of a model that computes in `dtype`, zeroed. Under [`Zero::Weights`] these are the vectors,
    /// the buffers and this rank's shards of matrices, else all.
    ///
    /// # Errors
    /// [`OutOfMemory`] if they do not fit.
    pub fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        compute: DType,
        homes: &Homes,
        ranks: Option<&Ranks>,
    ) -> Result<Weights, OutOfMemory> {
        let lease = |place, name, held| {
            let lease = ArenaLease::new(place, Category::Parameter, name);
            Arena::lease(memory, lease, layout, layout.types(compute), held)
        };
        let divided = ranks.filter(|ranks| ranks.zero == Zero::Weights);
        let matrices = match divided {
            Some(ranks) => layout.shards(ranks.rank),
            None => layout.weights().within(&layout.matrices()),
        };
        let others = Cover::joined([Cover::new([layout.vectors()]), layout.buffers()]);
        let (on_device, host) = match homes.weights {
            Home::Device => (Cover::joined([matrices, others]), None),
            Home::Pinned => {
                let host = lease(ArenaPlace::Host, "offloaded_parameters", matrices)?;
                (others, Some(host))
            }
            Home::Disk(_) | Home::Released => unreachable!("no weights live there"),
        };
        let resident = lease(ArenaPlace::Device, "parameters", on_device)?;
        // Without gathering ahead, one slot is enough, and vectors are not gathered ahead either.
        let slots = match divided {
            Some(ranks) if !ranks.overlap_param_gather => 1,
            _ => homes.unit_slots,
        };
        let streamed = (divided.is_some() || host.is_some())
            .then(|| StreamedWeights::new(memory, layout, host, slots, ranks));
        let gathered = ranks.filter(|ranks| ranks.zero != Zero::Replicated);
        let gathered = gathered.map(|ranks| {
            let is_overlapped = ranks.overlap_param_gather && (divided.is_none() || slots > 1);
            GatheredWeights::of(&resident, ranks.rank, is_overlapped)
        });
        Ok(Weights {
            resident,
            streamed,
            gathered,
            step_codes: None,
            filling: BTreeMap::new(),
            record: None,
        })
    }

    /// The place of each tensor in the arenas.
    pub fn layout(&self) -> &Rc<Layout> {
        self.resident.layout()
    }

    /// The type that the model computes in. Parameters without a type of their own are stored in it.
    pub fn dtype(&self) -> DType {
        self.resident.types().common()
    }

    /// The type that a range of one tensor is stored in.
    pub fn dtype_of(&self, range: &Range<usize>) -> DType {
        self.resident.types().of(range.start)
    }

    /// Whether matrices live in pinned host memory, and come to the device to be updated.
    pub fn is_on_host(&self) -> bool {
        self.host().is_some()
    }

    pub(crate) fn host(&self) -> Option<&Arena> {
        self.streamed.as_ref()?.units.host.as_ref()
    }

    /// The elements that live on this rank, on the device or in pinned host memory: all, or its shards and the vectors.
    pub fn held(&self) -> Cover {
        let arenas = [&self.resident].into_iter().chain(self.host());
        Cover::joined(arenas.map(|arena| arena.held().clone()))
    }

    /// The elements that this rank must be given when weights are set: those that it holds, and all others of matrices of
    /// codes, since scales depend on the whole matrix.
    pub fn to_set(&self) -> Cover {
        let (held, coded) = (self.held(), self.layout().coded());
        Cover::joined([held.without(&coded), coded])
    }

    /// Bytes on the device that live across steps.
    pub fn bytes(&self) -> u64 {
        self.resident.bytes()
    }

    /// Those of matrices that are stored as codes.
    pub fn coded_bytes(&self) -> u64 {
        let coded = self.layout().coded().within_all(self.resident.held());
        self.resident.types().bytes(&coded) as u64
    }

    /// Writes the values of a matrix that is stored as codes, in the type of `out`. Its unit must be in use.
    ///
    /// # Errors
    /// `KernelError` if the device fails.
    ///
    /// # Panics
    /// If the matrix is not stored as codes.
    pub fn widen(&self, kernels: &Kernels, entry: usize, out: Out) -> Result {
        let arena = self.arena_of(self.layout().unit_of(entry));
        let entry = &self.layout().entries()[entry];
        coded::widen(kernels, entry, arena.raw(&entry.padded_range()), out)
    }

    /// The matrix of a range, if it is stored as codes.
    fn coded(&self, range: &Range<usize>) -> Option<usize> {
        let layout = self.layout();
        let unit = &layout.units()[layout.locate(range)?];
        let mut coded = unit.entries.iter().copied();
        coded.find(|entry| {
            let entry = &layout.entries()[*entry];
            entry.codes.is_some() && entry.range().contains(&range.start)
        })
    }

    /// Name and bytes of the arena in pinned host memory.
    pub fn host_arena(&self) -> Option<(&'static str, u64)> {
        Some(("offloaded_parameters", self.host()?.bytes()))
    }

    /// Whether some of what other ranks updated has yet to be gathered: the next pass gathers it, or
    /// [`Weights::wait_until_gathered`].
    pub fn owes_gathering(&self) -> bool {
        self.gathered.as_ref().is_some_and(GatheredWeights::is_owed)
    }

    /// Reads a tensor that is not stored as codes. Its unit must be in use.
    pub fn view(&self, entry: usize) -> In<'_> {
        let view = self.joined(&[entry]);
        view.expect("a tensor lies with itself")
    }

    /// Reads several tensors as one, if they are contiguous in the layout ([`Layout::joined`]). Their unit must be in
    /// use.
    pub fn joined(&self, entries: &[usize]) -> Option<In<'_>> {
        let (range, dims) = self.layout().joined(entries)?;
        let arena = self.arena_of(self.layout().unit_of(entries[0]));
        Some(arena.flat(range).reshape(dims))
    }

    /// Reads the rows of a matrix that are a group ([`memory::LayoutBuilder::in_groups`]), by the group's unit, which must be in use.
    pub fn group(&self, entry: usize, unit: usize) -> In<'_> {
        let (range, dims) = self.layout().group(entry, unit);
        self.arena_of(Some(unit)).flat(range).reshape(dims)
    }

    /// Where a unit is on the device while it is used; vectors and buffers belong to none.
    fn arena_of(&self, unit: Option<usize>) -> &Arena {
        match (&self.streamed, unit) {
            (Some(streamed), Some(unit)) => &streamed.units.get((unit, 0)).arena,
            _ => &self.resident,
        }
    }

    /// The unit that a range belongs to, if it does not stay on the device.
    pub(crate) fn comes_with(&self, range: &Range<usize>) -> Option<usize> {
        match self.resident.held().rows(range) {
            Some(_) => None,
            None => self.layout().locate(range),
        }
    }

    /// Reads a range on the device, within one unit, the vectors, or one buffer.
    pub fn flat(&self, range: Range<usize>) -> In<'_> {
        self.arena_of(self.comes_with(&range)).flat(range)
    }

    /// Writes a range on the device, within one unit, the vectors, or one buffer.
    pub fn flat_mut(&mut self, range: Range<usize>) -> Out<'_> {
        let unit = self.comes_with(&range);
        match (&mut self.streamed, unit) {
            (Some(streamed), Some(unit)) => streamed.units.get_mut((unit, 0)).flat_mut(&range),
            _ => self.resident.flat_mut(range),
        }
    }

    /// Copies a range of one tensor, between steps. This rank must hold it.
    ///
    /// # Errors
    /// `KernelError` if the device fails, or `bytes` have another size.
    pub fn read(&self, kernels: &Kernels, range: Range<usize>, bytes: &mut [u8]) -> Result {
        if let Some(index) = self.coded(&range) {
            let entry = &self.layout().entries()[index];
            return coded::read(entry, range, (self.dtype(), bytes), |part| {
                self.download_codes(kernels, &entry.padded_range(), part)
            });
        }
        match (self.host(), self.on_device(&range)) {
            (Some(host), None) => read_host(kernels, bytes, host.flat(range)),
            _ => kernels.download(bytes, self.resident.flat(range)),
        }
    }

    /// Some bytes of a matrix of codes, between steps.
    fn download_codes(
        &self,
        kernels: &Kernels,
        matrix: &Range<usize>,
        part: Range<usize>,
    ) -> Result<Vec<u8>> {
        let mut bytes = vec![0; part.len()];
        match self.host() {
            Some(host) => read_host(kernels, &mut bytes, host.raw(matrix).rows(part))?,
            None => kernels.download(&mut bytes, self.resident.raw(matrix).rows(part))?,
        }
        Ok(bytes)
    }

    /// Reads a range of one tensor that stays on the device; none if it lives in host memory, or is stored as codes.
    pub fn on_device(&self, range: &Range<usize>) -> Option<In<'_>> {
        let is_here = self.resident.held().rows(range).is_some() && self.coded(range).is_none();
        is_here.then(|| self.resident.flat(range.clone()))
    }

    /// Sets a range of one tensor, as far as this rank holds it, between steps. A matrix that is stored as codes is set from its
    /// first element to its last, in order.
    ///
    /// # Errors
    /// As [`Weights::read`].
    pub fn store(&mut self, kernels: &Kernels, range: Range<usize>, bytes: &[u8]) -> Result {
        if let Some(index) = self.coded(&range) {
            return self.quantise_and_store(kernels, (index, range), bytes);
        }
        let size = self.dtype_of(&range).size_in_bytes();
        let of = |part: &Range<usize>| {
            &bytes[(part.start - range.start) * size..(part.end - range.start) * size]
        };
        for (arena, set) in arenas_to_set(&mut self.resident, &mut self.streamed) {
            for part in arena.held().within(&range).ranges() {
                set(kernels, arena.raw_mut(part), of(part))?;
            }
        }
        Ok(())
    }

    /// Sets bytes of a matrix that is stored as codes, by its index in the layout, between steps.
    ///
    /// # Errors
    /// `KernelError` if the device fails.
    pub fn store_codes(&mut self, kernels: &Kernels, entry: usize, bytes: &CodeBytes) -> Result {
        self.filling.remove(&entry);
        let matrix = self.layout().entries()[entry].padded_range();
        for (arena, set) in arenas_to_set(&mut self.resident, &mut self.streamed) {
            set_code_bytes(arena, &matrix, bytes, |out, bytes| set(kernels, out, bytes))?;
        }
        Ok(())
    }

    /// Makes codes of a range of a matrix that is stored so, and sets them.
    fn quantise_and_store(
        &mut self,
        kernels: &Kernels,
        (index, range): (usize, Range<usize>),
        bytes: &[u8],
    ) -> Result {
        let (dtype, layout) = (self.dtype(), self.layout().clone());
        let entry = &layout.entries()[index];
        let mut filling = self.filling.remove(&index).unwrap_or_default();
        let is_whole = filling.add(entry, range, (dtype, bytes), |bytes| {
            self.store_codes(kernels, index, &bytes)
        })?;
        if !is_whole {
            self.filling.insert(index, filling);
        }
        Ok(())
    }

    /// Gathers what other ranks updated of the weights that this rank keeps; shards of units may come in the next pass instead. The
    /// computation must already wait for this rank's updates.
    ///
    /// # Errors
    /// `KernelError` if the device or another rank fails.
    pub fn gather_updated(&mut self, kernels: &Kernels) -> Result {
        let gathered = self.gathered.as_mut();
        gathered.map_or(Ok(()), |gathered| {
            gathered.start(kernels, &mut self.resident)
        })
    }

    /// Makes the computation wait for the updates of other ranks.
    ///
    /// # Errors
    /// `KernelError` if the device or another rank fails.
    pub fn wait_until_gathered(&mut self, kernels: &Kernels) -> Result {
        match &mut self.gathered {
            Some(gathered) => gathered.wait_until_gathered(kernels, &mut self.resident),
            None => Ok(()),
        }
    }

    /// Whether the padding of the weights that live on this rank is zero. Only for arenas that the host can read.
    pub fn padding_is_zero(&self) -> bool {
        let mut arenas = [&self.resident].into_iter().chain(self.host());
        arenas.all(Arena::padding_is_zero)
    }
}

/// Sets bytes of an arena.
type Set = fn(&Kernels, Out, &[u8]) -> Result;

/// The weights on the device and those in pinned host memory, between steps.
fn arenas_to_set<'a>(
    resident: &'a mut Arena,
    streamed: &'a mut Option<StreamedWeights>,
) -> impl Iterator<Item = (&'a mut Arena, Set)> {
    let on_device: Set = |kernels, out, bytes| kernels.upload(out, bytes);
    let on_host: Set = |_, out, bytes| {
        out.slice_mut().copy_from_slice(bytes);
        Ok(())
    };
    let host = streamed.as_mut().and_then(|streamed| {
        assert!(streamed.units.is_empty(), "weights are set between steps");
        streamed.units.host.as_mut()
    });
    [(resident, on_device)]
        .into_iter()
        .chain(host.map(|host| (host, on_host)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::cpu::Cpu;
    use memory::{Layer, LayoutBuilder};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// Three units of one matrix each, and a vector. Element `n` is `n`. Matrices live in pinned host memory.
    fn weights(memory: &Memory) -> (Box<Kernels>, Weights) {
        let mut builder = LayoutBuilder::default();
        for block in 0..3 {
            builder.add(Layer::Block(block), format!("matrix {block}"), &[2, 128]);
        }
        builder.add(Layer::Whole, "vector", &[256]);
        let layout = Rc::new(builder.build());
        let homes = Homes {
            weights: Home::Pinned,
            ..Homes::default()
        };
        let kernels: Box<Kernels> = Box::new(Cpu::new(memory, DType::F32).unwrap());
        let mut weights = Weights::lease(memory, &layout, DType::F32, &homes, None).unwrap();
        for entry in layout.entries() {
            let values: Vec<f32> = entry.range().map(|element| element as f32).collect();
            let bytes = bytemuck::cast_slice(&values);
            weights.store(&*kernels, entry.range(), bytes).unwrap();
        }
        (kernels, weights)
    }

    #[test]
    fn units_come_for_their_use_and_go_after_it() {
        let memory = Memory::host();
        let (kernels, mut weights) = weights(&memory);
        assert!(weights.is_on_host());
        let (live, unit_bytes) = (memory.live_bytes(), 4 * 256);
        weights.begin_pass(&[0, 1, 2].into());
        for unit in 0..3 {
            assert!(weights.use_unit(&*kernels, unit).unwrap());
            assert!(!weights.use_unit(&*kernels, unit).unwrap());
            let found = weights.view(unit).slice::<f32>();
            let expected = 256 * unit..256 * (unit + 1);
            assert!(
                expected
                    .map(|element| element as f32)
                    .eq(found.iter().copied())
            );
            weights.look_ahead(&*kernels).unwrap();
            let slots = Homes::default().unit_slots.min(3 - unit) as u64;
            assert_eq!(memory.live_bytes(), live + slots * unit_bytes);
        }
        weights.end_pass(&*kernels).unwrap();
        assert_eq!(memory.live_bytes(), live);
        assert_eq!(kernels.step_traffic().weights.h2d_bytes, 3 * unit_bytes);
        assert_eq!(weights.view(3).slice::<f32>()[1], 769.0, "vectors stay");
    }

    #[test]
    fn a_unit_out_of_order_is_a_defect() {
        let memory = Memory::host();
        let (kernels, mut weights) = weights(&memory);
        weights.begin_pass(&[1, 0].into());
        let use_other = || weights.use_unit(&*kernels, 0);
        assert!(catch_unwind(AssertUnwindSafe(use_other)).is_err());
    }
}
