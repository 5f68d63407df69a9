//! The state of a session as in a checkpoint: weights as in Hugging Face's files, and optimizer states by name
//! ([`optim::NamedState`]), bit by bit. It is read from the device in chunks while training waits, or first copied to
//! host memory and written while training continues. Each of several ranks saves its own part, whatever it holds, so
//! that all write at the same time.

use files::{PieceSource, PieceSpec, TensorSource, TensorSpec, host_room, in_chunks};
use kernels::{KernelError, Kernels};
use memory::{Buffer, Category, DType, Memory, OutOfMemory};
use model::{ADAPTER_STEM, OutgoingWeights, Parameters};
use optim::Optimizer;
use settings::Settings;
use std::borrow::Cow;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use units::{Ranks, Weights};

/// What is saved, and its place in a copy: weights in the order of the layout, then states.
struct Inventory {
    /// The weights that are saved: all, or the factors of adapters alone.
    parameters: Parameters,
    /// The names of their files.
    stem: &'static str,
    dtype: DType,
    items: Vec<Item>,
    /// The items as in files.
    specs: Vec<PieceSpec>,
    /// Number of items that are weights.
    weights: usize,
    bytes: usize,
}

/// A range of a parameter's weights, or of one of its states.
struct Item {
    /// The parameter's index in the layout.
    entry: usize,
    /// Its elements in the layout.
    range: Range<usize>,
    /// The number of the parameter's state; none for weights.
    state: Option<usize>,
    /// Its place in a copy.
    bytes: Range<usize>,
}

/// The owners of the state between steps.
#[derive(Clone, Copy)]
pub(crate) struct StateOnDevice<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) weights: &'a Weights,
    pub(crate) optimizer: &'a Optimizer,
}

/// The state of a session between steps, to be written to files: weights and optimizer states, or this rank's pieces of
/// both.
pub struct SessionState<'a> {
    inventory: Arc<Inventory>,
    source: StateSource<'a>,
}

impl<'a> StateOnDevice<'a> {
    /// The state, read from the device. No update may be pending: see [`crate::Session::finish_step`].
    pub(crate) fn state(self, settings: &Settings, parameters: &Parameters) -> SessionState<'a> {
        SessionState {
            inventory: Arc::new(Inventory::new(settings, self, parameters)),
            source: StateSource::Device(self),
        }
    }
}

/// A copy of the state in host memory, which another thread can read. The session waits for its end before the next
/// copy, and before it is dropped itself. So its own thread must not hold the copy meanwhile.
pub struct StateOnHost {
    inventory: Arc<Inventory>,
    bytes: *const u8,
    /// Sends nothing: dropping it tells the session that the copy is no longer read.
    _reading: Sender<()>,
}

// SAFETY: the bytes belong to the session, which neither writes nor frees them until this reader is dropped.
unsafe impl Send for StateOnHost {}

/// Host memory for a copy of the state, leased for the whole run.
pub(crate) struct CopyPlace {
    inventory: Arc<Inventory>,
    buffer: Buffer,
    /// Receiving fails once the reader of the last copy is dropped.
    last_reader: Option<Receiver<()>>,
}

impl Inventory {
    /// Lists what this rank saves, if there are several; otherwise everything.
    fn new(settings: &Settings, held: StateOnDevice, parameters: &Parameters) -> Inventory {
        let layout = held.weights.layout();
        let entries = layout.entries();
        let (parameters, indices) = saved_parameters(settings, parameters);
        let stem = match settings.lora {
            None => "model",
            Some(_) => ADAPTER_STEM,
        };
        let own = match several(settings) {
            Some(ranks) => layout.own(ranks.rank),
            None => layout.all(),
        };
        let mut ranges = Vec::new();
        for (index, parameter) in indices.into_iter().zip(parameters.in_layout()) {
            let own = own.within(&entries[index].range());
            let own = own.ranges().iter().cloned();
            ranges.extend(own.map(|range| (index, parameter.name.clone(), range)));
        }
        let mut inventory = Inventory {
            parameters,
            stem,
            dtype: held.weights.dtype(),
            items: Vec::new(),
            specs: Vec::new(),
            weights: ranges.len(),
            bytes: 0,
        };
        for (index, name, range) in &ranges {
            let (entry, dtype) = (&entries[*index], held.weights.dtype_of(range));
            let spec = PieceSpec {
                stem: stem.into(),
                name: name.clone(),
                dtype: dtype.into(),
                shape: entry.shape.clone(),
                elements: range.start - entry.offset..range.end - entry.offset,
            };
            inventory.add(spec, dtype, (*index, None), range);
        }
        for (index, _, range) in &ranges {
            if entries[*index].role.is_trained() {
                inventory.add_states(held.optimizer, *index, range);
            }
        }
        inventory
    }

    fn add_states(&mut self, optimizer: &Optimizer, index: usize, range: &Range<usize>) {
        let states = optimizer.named_states(index, range).into_iter();
        // A range of a parameter may have no element of a small state.
        let states = states.enumerate().filter(|(_, state)| state.bytes() > 0);
        for (number, state) in states {
            let spec = PieceSpec {
                stem: "optimizer".into(),
                name: state.name,
                dtype: state.dtype.into(),
                shape: vec![state.whole],
                elements: state.elements,
            };
            self.add(spec, state.dtype, (index, Some(number)), range);
        }
    }

    fn add(
        &mut self,
        spec: PieceSpec,
        dtype: DType,
        (entry, state): (usize, Option<usize>),
        range: &Range<usize>,
    ) {
        let first = self.bytes;
        self.bytes += spec.elements.len() * dtype.size_in_bytes();
        self.specs.push(spec);
        self.items.push(Item {
            entry,
            range: range.clone(),
            state,
            bytes: first..self.bytes,
        });
    }
}

/// The parameters that are saved, and their indices in the layout: of a model with adapters those alone.
pub(crate) fn saved_parameters(settings: &Settings, all: &Parameters) -> (Parameters, Vec<usize>) {
    let has_adapters = settings.lora.is_some();
    let saved = all.in_layout().enumerate();
    let saved = saved.filter(|(_, one)| one.is_factor || !has_adapters);
    let indices = saved.map(|(index, _)| index).collect();
    match has_adapters {
        true => (all.factors(), indices),
        false => (all.clone(), indices),
    }
}

/// The ranks that save a checkpoint together; none if there is only one.
pub(crate) fn several(settings: &Settings) -> Option<&Ranks> {
    settings
        .ranks
        .as_ref()
        .filter(|ranks| ranks.of_all().of > 1)
}

impl StateOnDevice<'_> {
    /// Reads a range of an item's elements, which must start at the beginning of a block.
    fn read(&self, item: &Item, range: &Range<usize>, bytes: &mut [u8]) -> Result<(), KernelError> {
        match item.state {
            None => self.weights.read(self.kernels, range.clone(), bytes),
            Some(state) => {
                let states = self.optimizer.named_states(item.entry, range);
                states[state].read(self.kernels, bytes)
            }
        }
    }

    /// The bytes of a range of an item's elements.
    fn chunk(&self, item: &Item, range: Range<usize>) -> io::Result<Vec<u8>> {
        let bytes = match item.state {
            None => range.len() * self.weights.dtype_of(&range).size_in_bytes(),
            Some(state) => self.optimizer.named_states(item.entry, &range)[state].bytes(),
        };
        let mut chunk = host_room(bytes)?;
        self.read(item, &range, &mut chunk)
            .map_err(io::Error::other)?;
        Ok(chunk)
    }
}

/// The place of a state's bytes.
#[derive(Clone, Copy)]
enum StateSource<'a> {
    Device(StateOnDevice<'a>),
    Host(&'a StateOnHost),
}

/// The states of whole parameters.
struct OptimizerStates<'a> {
    state: &'a SessionState<'a>,
    specs: Vec<TensorSpec>,
}

impl SessionState<'_> {
    /// The name of the weights' files, without their ending.
    pub fn stem(&self) -> &'static str {
        self.inventory.stem
    }

    /// The weights, in a process that has all of them; of a model with adapters those alone.
    pub fn weights(&self) -> impl TensorSource + '_ {
        let all = &*self.inventory;
        OutgoingWeights::new(&all.parameters, all.dtype, move |entry, elements| {
            self.weights_of(&all.items[entry], elements)
        })
    }

    /// The optimizer states, in a process that has all of them.
    pub fn optimizer(&self) -> impl TensorSource + '_ {
        let specs = self.inventory.specs[self.inventory.weights..].iter();
        let specs = specs.map(|spec| TensorSpec {
            name: spec.name.clone(),
            dtype: spec.dtype,
            shape: spec.shape.clone(),
        });
        OptimizerStates {
            specs: specs.collect(),
            state: self,
        }
    }

    /// The bytes of some elements of a parameter, whose weights are `item`.
    fn weights_of(&self, item: &Item, elements: Range<usize>) -> io::Result<Cow<'_, [u8]>> {
        match self.source {
            StateSource::Host(copy) => {
                let size = item.bytes.len() / item.range.len();
                let place = |element| item.bytes.start + element * size;
                let bytes = copy.part(&(place(elements.start)..place(elements.end)));
                Ok(Cow::Borrowed(bytes))
            }
            StateSource::Device(state) => {
                let first = item.range.start;
                let chunk = first + elements.start..first + elements.end;
                Ok(Cow::Owned(state.chunk(item, chunk)?))
            }
        }
    }
}

/// The pieces of weights and states that this rank saves.
impl PieceSource for SessionState<'_> {
    fn pieces(&self) -> &[PieceSpec] {
        &self.inventory.specs
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        let item = &self.inventory.items[index];
        match self.source {
            StateSource::Host(copy) => out.write_all(copy.part(&item.bytes)),
            StateSource::Device(state) => in_chunks(item.range.clone())
                .try_for_each(|chunk| out.write_all(&state.chunk(item, chunk)?)),
        }
    }
}

impl TensorSource for OptimizerStates<'_> {
    fn tensors(&self) -> &[TensorSpec] {
        &self.specs
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        let index = self.state.inventory.weights + index;
        self.state.write_to(index, out)
    }
}

impl StateOnHost {
    /// The copied state.
    pub fn state(&self) -> SessionState<'_> {
        SessionState {
            inventory: self.inventory.clone(),
            source: StateSource::Host(self),
        }
    }

    fn part(&self, range: &Range<usize>) -> &[u8] {
        // SAFETY: the range lies within the copy, which nobody writes or frees while this reader exists.
        unsafe { std::slice::from_raw_parts(self.bytes.add(range.start), range.len()) }
    }
}

impl CopyPlace {
    pub(crate) fn lease(
        memory: &Memory,
        settings: &Settings,
        parameters: &Parameters,
        held: StateOnDevice,
    ) -> Result<CopyPlace, OutOfMemory> {
        let inventory = Inventory::new(settings, held, parameters);
        let (category, name) = (Category::Temporary, "checkpoint_copy");
        Ok(CopyPlace {
            buffer: memory.lease_pinned(category, name, [inventory.bytes], DType::U8)?,
            inventory: Arc::new(inventory),
            last_reader: None,
        })
    }

    /// The arena's name and size.
    pub(crate) fn arena(&self) -> (&'static str, u64) {
        ("checkpoint_copy", self.buffer.bytes())
    }

    fn wait(&mut self) {
        if let Some(reader) = self.last_reader.take() {
            // Nothing is ever sent, so this fails, as soon as the reader is dropped.
            let _ = reader.recv();
        }
    }

    pub(crate) fn fill(&mut self, held: StateOnDevice) -> Result<StateOnHost, KernelError> {
        self.wait();
        let bytes = self.buffer.view_mut().slice_mut::<u8>();
        for item in &self.inventory.items {
            held.read(item, &item.range, &mut bytes[item.bytes.clone()])?;
        }
        let (reading, reader) = channel();
        self.last_reader = Some(reader);
        Ok(StateOnHost {
            inventory: self.inventory.clone(),
            bytes: bytes.as_ptr(),
            _reading: reading,
        })
    }
}

impl Drop for CopyPlace {
    fn drop(&mut self) {
        self.wait();
    }
}
