//! The weights: all on the device, or a few units of them at a time.

use crate::UnitError;
use crate::stream::{OnDevice, finish_all, host_bytes, locate};
use kernels::{KernelError, Kernels, Queue, Traffic};
use memory::{Arena, Category, DType, In, Layer, Layout, Memory, Out, OutOfMemory, Space};
use std::ops::Range;
use std::rc::Rc;

const CAME: &str = "a unit of weights has come before it is read";
const CAME_TO_BE_UPDATED: &str = "a unit of weights has come before it is updated";

/// Where matrices live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightsHome {
    /// On the device.
    Device,
    /// In pinned host memory, with at most so many units on the device at a time. One is enough; a second comes while the
    /// first is used.
    Host {
        /// Units on the device at a time.
        slots: usize,
    },
}

/// The weights of a model.
///
/// Whoever computes with them says which unit comes next ([`Weights::use_unit`]), in an order that it gave before
/// ([`Weights::begin_pass`]); from the order follows what is fetched ahead ([`Weights::look_ahead`]).
pub struct Weights {
    /// All of them, or the vectors.
    resident: Arena,
    streamed: Option<StreamedWeights>,
    /// The units that were used, where that is recorded.
    record: Option<Vec<usize>>,
}

struct StreamedWeights {
    host: Arena,
    here: Vec<OnDevice>,
    slots: usize,
    order: Rc<[usize]>,
    /// How many of the order have been used.
    used: usize,
    traffic: Traffic,
}

impl Weights {
    /// Leases the weights, zeroed.
    ///
    /// # Errors
    /// [`OutOfMemory`] if they do not fit.
    pub fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        dtype: DType,
        home: WeightsHome,
    ) -> Result<Weights, OutOfMemory> {
        let lease = |space, name, held| {
            Arena::lease_part(
                memory,
                space,
                Category::Parameter,
                name,
                layout,
                dtype,
                held,
            )
        };
        let (held, streamed) = match home {
            WeightsHome::Device => (0..layout.elements(), None),
            WeightsHome::Host { slots } => {
                let streamed = StreamedWeights {
                    host: lease(Space::Host, "offloaded_parameters", layout.matrices())?,
                    here: Vec::new(),
                    slots: slots.max(1),
                    order: Rc::new([]),
                    used: 0,
                    traffic: Traffic::default(),
                };
                (layout.vectors(), Some(streamed))
            }
        };
        Ok(Weights {
            resident: lease(Space::Device, "parameters", held)?,
            streamed,
            record: None,
        })
    }

    /// Where each tensor lies.
    pub fn layout(&self) -> &Rc<Layout> {
        self.resident.layout()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.resident.dtype()
    }

    /// Whether units come and go.
    pub fn is_streamed(&self) -> bool {
        self.streamed.is_some()
    }

    /// Bytes on the device, across steps.
    pub fn bytes(&self) -> u64 {
        self.resident.bytes()
    }

    /// Name and bytes of the arena in pinned host memory.
    pub fn host_arena(&self) -> Option<(&'static str, u64)> {
        let streamed = self.streamed.as_ref()?;
        Some(("offloaded_parameters", streamed.host.bytes()))
    }

    /// What has crossed of them during passes and after updates.
    pub fn traffic(&self) -> Traffic {
        let streamed = self.streamed.as_ref();
        streamed.map_or(Traffic::default(), |streamed| streamed.traffic)
    }

    /// Reads a tensor. Its unit is on the device: somebody uses it.
    pub fn view(&self, entry: usize) -> In<'_> {
        let tensor = &self.layout().entries()[entry];
        match (&self.streamed, self.layout().unit_of(entry)) {
            (Some(streamed), Some(unit)) => {
                let rows = self.layout().units()[unit].cover.rows(&tensor.range());
                let rows = rows.expect("a unit covers its own tensors");
                streamed.of(unit).rows(rows).reshape(tensor.dims())
            }
            _ => self.resident.view(entry),
        }
    }

    /// Reads a range of one unit, or of the vectors, on the device.
    pub fn flat(&self, range: Range<usize>) -> In<'_> {
        match (&self.streamed, locate(self.layout(), &range)) {
            (Some(streamed), Some((unit, rows))) => streamed.of(unit).rows(rows),
            _ => self.resident.flat(range),
        }
    }

    /// Writes a range of one unit, or of the vectors, on the device.
    pub fn flat_mut(&mut self, range: Range<usize>) -> Out<'_> {
        match (&mut self.streamed, locate(self.resident.layout(), &range)) {
            (Some(streamed), Some((unit, rows))) => streamed.of_mut(unit).rows_mut(rows),
            _ => self.resident.flat_mut(range),
        }
    }

    /// Copies a range of one tensor, between steps.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or `bytes` have another size.
    pub fn read(
        &self,
        kernels: &dyn Kernels,
        range: Range<usize>,
        bytes: &mut [u8],
    ) -> Result<(), KernelError> {
        match (&self.streamed, locate(self.layout(), &range)) {
            (Some(streamed), Some(_)) => {
                bytes.copy_from_slice(host_bytes(kernels, streamed.host.flat(range))?);
                Ok(())
            }
            _ => kernels.download(bytes, self.resident.flat(range)),
        }
    }

    /// Sets a range of one tensor, between steps.
    ///
    /// # Errors
    /// As [`Weights::read`].
    pub fn store(
        &mut self,
        kernels: &dyn Kernels,
        range: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        match (&mut self.streamed, locate(self.resident.layout(), &range)) {
            (Some(streamed), Some(_)) => {
                assert!(streamed.here.is_empty(), "weights are set between steps");
                let out = streamed.host.flat_mut(range).cast(DType::U8);
                out.slice_mut::<u8>().copy_from_slice(bytes);
                Ok(())
            }
            _ => kernels.upload(self.resident.flat_mut(range), bytes),
        }
    }

    /// Records from now on which units are used: the order of a pass that another session goes by.
    pub fn keep_record(&mut self) {
        self.record = Some(Vec::new());
    }

    /// The units that were used since [`Weights::keep_record`], in order.
    pub fn take_record(&mut self) -> Vec<usize> {
        self.record.take().unwrap_or_default()
    }

    /// Begins a pass that uses units in this order.
    pub fn begin_pass(&mut self, order: &Rc<[usize]>) {
        if let Some(streamed) = &mut self.streamed {
            (streamed.order, streamed.used) = (order.clone(), 0);
        }
    }

    /// The computation uses a unit from here on, until it uses another: fetched now if it was not fetched ahead. Whether
    /// it used another before.
    ///
    /// # Errors
    /// [`UnitError`] if a lease is refused or the device fails.
    ///
    /// # Panics
    /// If another unit comes next in the order of the pass.
    pub fn use_unit(
        &mut self,
        memory: &Memory,
        kernels: &dyn Kernels,
        unit: usize,
    ) -> Result<bool, UnitError> {
        if let Some(record) = &mut self.record
            && record.last() != Some(&unit)
        {
            record.push(unit);
        }
        match &mut self.streamed {
            Some(streamed) => streamed.use_unit(memory, kernels, unit),
            None => Ok(false),
        }
    }

    /// Lets go of units that nobody uses soon, and fetches those that come next, as far as there are slots.
    ///
    /// # Errors
    /// As [`Weights::use_unit`].
    pub fn look_ahead(&mut self, memory: &Memory, kernels: &dyn Kernels) -> Result<(), UnitError> {
        match &mut self.streamed {
            Some(streamed) => streamed.look_ahead(memory, kernels),
            None => Ok(()),
        }
    }

    /// Lets `queue` wait until a part's unit has come.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn ready(
        &self,
        kernels: &dyn Kernels,
        queue: Queue,
        part: Layer,
    ) -> Result<(), KernelError> {
        let mut units = self.layout().units().iter();
        match (&self.streamed, units.position(|unit| unit.part == part)) {
            (Some(streamed), Some(unit)) => {
                kernels.wait(queue, streamed.of(unit).came, CAME_TO_BE_UPDATED)
            }
            _ => Ok(()),
        }
    }

    /// A range was updated, on the device: it goes back to the host. The download queue was told to wait for the update.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn updated(
        &mut self,
        kernels: &dyn Kernels,
        range: &Range<usize>,
    ) -> Result<(), KernelError> {
        match (&mut self.streamed, locate(self.resident.layout(), range)) {
            (Some(streamed), Some((unit, _))) => {
                let here = streamed.here.iter_mut().find(|here| here.unit == unit);
                let here = here.expect("what is updated is on the device");
                here.send(kernels, &mut streamed.host, range)?;
                let bytes = range.len() * streamed.host.dtype().size_in_bytes();
                streamed.traffic = streamed
                    .traffic
                    .plus(Traffic::of(Queue::Download, bytes as u64));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Ends a pass: nothing stays. The next one begins with the same leases as this one, so all need the same memory.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn end_pass(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        match &mut self.streamed {
            Some(streamed) => streamed.end_pass(kernels),
            None => Ok(()),
        }
    }

    /// Lets go of everything when a pass ended early and copies may be under way: the host waits for all queues.
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

    /// Whether the padding of what is on the device for good, and of what is on the host, is zero. Reads host memory.
    pub fn padding_is_zero(&self) -> bool {
        let host = self.streamed.iter().map(|streamed| &streamed.host);
        [&self.resident]
            .into_iter()
            .chain(host)
            .all(Arena::padding_is_zero)
    }
}

impl StreamedWeights {
    fn of(&self, unit: usize) -> &OnDevice {
        let here = self.here.iter().find(|here| here.unit == unit);
        here.expect("a unit is read while somebody uses it")
    }

    fn of_mut(&mut self, unit: usize) -> &mut OnDevice {
        let here = self.here.iter_mut().find(|here| here.unit == unit);
        here.expect("a unit is written while somebody uses it")
    }

    /// The units that should be on the device now, the one in use first.
    fn wanted(&self) -> Vec<usize> {
        let rest = self.order.iter().skip(self.used.saturating_sub(1));
        let mut wanted = Vec::new();
        for unit in rest {
            if wanted.len() < self.slots && !wanted.contains(unit) {
                wanted.push(*unit);
            }
        }
        wanted
    }

    fn use_unit(
        &mut self,
        memory: &Memory,
        kernels: &dyn Kernels,
        unit: usize,
    ) -> Result<bool, UnitError> {
        if self.used > 0 && self.order[self.used - 1] == unit {
            return Ok(false);
        }
        let next = self.order.get(self.used);
        assert_eq!(next, Some(&unit), "units are used in the order of the pass");
        self.used += 1;
        if self.here.iter().all(|here| here.unit != unit) {
            self.keep_only_wanted(kernels)?;
            self.fetch(memory, kernels, unit)?;
        }
        kernels.wait(Queue::Compute, self.of(unit).came, CAME)?;
        Ok(true)
    }

    fn look_ahead(&mut self, memory: &Memory, kernels: &dyn Kernels) -> Result<(), UnitError> {
        self.keep_only_wanted(kernels)?;
        for unit in self.wanted() {
            if self.here.iter().all(|here| here.unit != unit) {
                self.fetch(memory, kernels, unit)?;
            }
        }
        Ok(())
    }

    fn end_pass(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        (self.order, self.used) = (Rc::new([]), 0);
        self.keep_only_wanted(kernels)
    }

    fn keep_only_wanted(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        let wanted = self.wanted();
        while let Some(index) = self
            .here
            .iter()
            .position(|here| !wanted.contains(&here.unit))
        {
            self.here.swap_remove(index).leave(kernels)?;
        }
        Ok(())
    }

    fn fetch(
        &mut self,
        memory: &Memory,
        kernels: &dyn Kernels,
        unit: usize,
    ) -> Result<(), UnitError> {
        let kind = (Category::Parameter, "unit_weights");
        let dtype = self.host.dtype();
        let here = OnDevice::lease(memory, self.host.layout(), unit, kind, dtype)?;
        // Filed even if the device failed: what was asked for is waited for before the lease ends.
        self.here.push(here);
        let here = self.here.last_mut().expect("one was pushed");
        self.traffic = self.traffic.plus(Traffic::of(Queue::Upload, here.bytes()));
        Ok(here.fetch(kernels, &self.host)?)
    }
}
