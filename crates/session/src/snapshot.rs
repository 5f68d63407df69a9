//! The state of a session as a checkpoint holds it: weights as Hugging Face's files have them, and optimizer states by name
//! ([`optim::NamedState`]), bit by bit. It is read from the device a chunk at a time while training waits, or copied to host
//! memory first, from where it is written while training goes on. Of several ranks each has a part of it, whatever else it
//! holds, so that all write at once.

use files::{PieceSource, PieceSpec, TensorSource, TensorSpec, host_room, in_chunks};
use kernels::{KernelError, Kernels};
use memory::{Buffer, Category, DType, Memory, OutOfMemory};
use model::{OutgoingWeights, Parameters};
use optim::Optimizer;
use settings::Settings;
use std::borrow::Cow;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use units::{Ranks, Weights};

/// What there is to save, and where each of it is in a copy: weights in the order of the layout, then states.
struct Inventory {
    parameters: Parameters,
    dtype: DType,
    items: Vec<Item>,
    /// The same, as files have it.
    specs: Vec<PieceSpec>,
    /// How many of them are weights.
    weights: usize,
    bytes: usize,
}

/// Some of a parameter's weights, or of one of its states.
struct Item {
    /// Index of the parameter in the layout.
    entry: usize,
    /// The elements of the layout that it is of.
    range: Range<usize>,
    /// Which of the parameter's states it is; none: the weights.
    state: Option<usize>,
    /// Where it is in a copy.
    bytes: Range<usize>,
}

/// The owners of the state between steps.
#[derive(Clone, Copy)]
pub(crate) struct StateOnDevice<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) weights: &'a Weights,
    pub(crate) optimizer: &'a Optimizer,
}

/// The state of a session between steps, on its way into files: weights, optimizer states, or the pieces of both that are this
/// rank's to save.
pub struct SessionState<'a> {
    inventory: Arc<Inventory>,
    source: StateSource<'a>,
}

impl<'a> StateOnDevice<'a> {
    /// The state, to be read from the device. No update may be pending: see [`crate::Session::finish_step`].
    pub(crate) fn state(self, settings: &Settings, parameters: &Parameters) -> SessionState<'a> {
        SessionState {
            inventory: Arc::new(Inventory::new(settings, self, parameters)),
            source: StateSource::Device(self),
        }
    }
}

/// A copy of the state in host memory, to be read from another thread. The session waits for its end before it makes the
/// next copy, and before it goes: on the session's own thread, one that is held meanwhile is waited for in vain.
pub struct StateOnHost {
    inventory: Arc<Inventory>,
    bytes: *const u8,
    /// Nothing is sent: the place notices that it is gone.
    _reading: Sender<()>,
}

// SAFETY: the bytes belong to the session, which neither writes nor frees them until this reader is gone.
unsafe impl Send for StateOnHost {}

/// Host memory for a copy of the state, leased for the whole run.
pub(crate) struct CopyPlace {
    inventory: Arc<Inventory>,
    buffer: Buffer,
    /// Fails once the reader of the last copy is gone.
    last_reader: Option<Receiver<()>>,
}

impl Inventory {
    /// Lists what this rank has to save, where there are several; else all.
    fn new(settings: &Settings, held: StateOnDevice, parameters: &Parameters) -> Inventory {
        let layout = held.weights.layout();
        let own = match several(settings) {
            Some(ranks) => layout.own(ranks.rank),
            None => layout.all(),
        };
        let mut inventory = Inventory {
            parameters: parameters.clone(),
            dtype: held.weights.dtype(),
            items: Vec::new(),
            specs: Vec::new(),
            weights: 0,
            bytes: 0,
        };
        let entries = layout.entries().iter().enumerate();
        let own = entries.flat_map(|(index, entry)| {
            let own = own.within(&entry.range()).ranges().to_vec();
            own.into_iter().map(move |range| (index, range))
        });
        let own: Vec<(usize, Range<usize>)> = own.collect();
        for (index, range) in &own {
            inventory.add_weights(held.weights, *index, range);
        }
        inventory.weights = inventory.items.len();
        let is_trained = |index: usize| layout.entries()[index].role.is_trained();
        for (index, range) in own.iter().filter(|(index, _)| is_trained(*index)) {
            inventory.add_states(held.optimizer, *index, range);
        }
        inventory
    }

    fn add_weights(&mut self, weights: &Weights, index: usize, range: &Range<usize>) {
        let entry = &weights.layout().entries()[index];
        let dtype = weights.dtype_of(range);
        let spec = PieceSpec {
            stem: "model".into(),
            name: entry.name.clone(),
            dtype: dtype.into(),
            shape: entry.shape.clone(),
            elements: range.start - entry.offset..range.end - entry.offset,
        };
        let bytes = range.len() * dtype.size_in_bytes();
        self.add(spec, (index, None), range, bytes);
    }

    fn add_states(&mut self, optimizer: &Optimizer, index: usize, range: &Range<usize>) {
        let states = optimizer.named_states(index, range).into_iter();
        // Of a state with few elements, a range of the parameter may have none.
        let states = states.enumerate().filter(|(_, state)| state.bytes() > 0);
        for (number, state) in states {
            let bytes = state.bytes();
            let spec = PieceSpec {
                stem: "optimizer".into(),
                name: state.name,
                dtype: state.dtype.into(),
                shape: vec![state.whole],
                elements: state.elements,
            };
            self.add(spec, (index, Some(number)), range, bytes);
        }
    }

    fn add(
        &mut self,
        spec: PieceSpec,
        (entry, state): (usize, Option<usize>),
        range: &Range<usize>,
        bytes: usize,
    ) {
        self.specs.push(spec);
        self.items.push(Item {
            entry,
            range: range.clone(),
            state,
            bytes: self.bytes..self.bytes + bytes,
        });
        self.bytes += bytes;
    }
}

/// The ranks that save a checkpoint together, if they are several.
pub(crate) fn several(settings: &Settings) -> Option<&Ranks> {
    settings.ranks.as_ref().filter(|ranks| ranks.rank.of > 1)
}

impl StateOnDevice<'_> {
    fn read(&self, item: &Item, bytes: &mut [u8]) -> Result<(), KernelError> {
        match item.state {
            None => self.weights.read(self.kernels, item.range.clone(), bytes),
            Some(state) => {
                let states = self.optimizer.named_states(item.entry, &item.range);
                states[state].read(self.kernels, bytes)
            }
        }
    }

    /// An item's bytes of some of its elements, the first of which begins a block.
    fn chunk(&self, item: &Item, range: Range<usize>) -> io::Result<Vec<u8>> {
        let bytes = match item.state {
            None => range.len() * self.weights.dtype_of(&range).size_in_bytes(),
            Some(state) => self.optimizer.named_states(item.entry, &range)[state].bytes(),
        };
        let mut chunk = host_room(bytes)?;
        let part = Item {
            range,
            bytes: 0..bytes,
            ..*item
        };
        self.read(&part, &mut chunk).map_err(io::Error::other)?;
        Ok(chunk)
    }
}

/// Where the bytes of a state are.
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
    /// The weights, of a process that has all.
    pub fn weights(&self) -> impl TensorSource + '_ {
        let Inventory {
            parameters,
            dtype,
            items,
            ..
        } = &*self.inventory;
        OutgoingWeights::new(parameters, *dtype, move |entry, elements| {
            self.weights_of(&items[entry], elements)
        })
    }

    /// The optimizer's states, of a process that has all.
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

    /// The bytes of some elements of a parameter, whose weights are an item.
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
    /// The state that was copied.
    pub fn state(&self) -> SessionState<'_> {
        SessionState {
            inventory: self.inventory.clone(),
            source: StateSource::Host(self),
        }
    }

    fn part(&self, range: &Range<usize>) -> &[u8] {
        // SAFETY: the range lies within the copy, which nobody writes or frees while this reader is there.
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

    /// Its name and size.
    pub(crate) fn arena(&self) -> (&'static str, u64) {
        ("checkpoint_copy", self.buffer.bytes())
    }

    fn wait(&mut self) {
        if let Some(reader) = self.last_reader.take() {
            // It is sent nothing, so this fails, and does so when the reader is gone.
            let _ = reader.recv();
        }
    }

    pub(crate) fn fill(&mut self, held: StateOnDevice) -> Result<StateOnHost, KernelError> {
        self.wait();
        let bytes = self.buffer.view_mut().slice_mut::<u8>();
        for item in &self.inventory.items {
            held.read(item, &mut bytes[item.bytes.clone()])?;
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
