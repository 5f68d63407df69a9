//! The state of a session as a checkpoint holds it: weights as Hugging Face's files have them, and optimizer states by name
//! ([`optim::NamedState`]), bit by bit. It is read from the device a tensor at a time while training waits, or copied to host
//! memory first, from where it is written while training goes on.

use crate::error::SessionError;
use crate::session::Session;
use files::{TensorSource, TensorSpec};
use kernels::{KernelError, Kernels};
use memory::{Buffer, Category, DType, Layout, Memory, OutOfMemory};
use model::{OutgoingWeights, Parameters};
use optim::AdamW;
use std::borrow::Cow;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use units::Weights;

/// What there is to save, and where each tensor is in a copy.
struct Inventory {
    parameters: Parameters,
    dtype: DType,
    /// Bytes of each parameter, by its index in the layout.
    weights: Vec<Range<usize>>,
    states: Vec<TensorSpec>,
    state_places: Vec<StatePlace>,
    bytes: usize,
}

/// An optimizer state.
struct StatePlace {
    /// Index of its parameter in the layout.
    entry: usize,
    /// Which of the parameter's states it is.
    state: usize,
    bytes: Range<usize>,
}

/// What a state is read from.
#[derive(Clone, Copy)]
struct Held<'a> {
    kernels: &'a dyn Kernels,
    weights: &'a Weights,
    optimizer: &'a AdamW,
}

/// The state of a session between steps, on the device. No update may be pending: see [`Session::finish_step`].
pub struct State<'a> {
    held: Held<'a>,
    inventory: Inventory,
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
    fn new(parameters: &Parameters, layout: &Layout, dtype: DType, optimizer: &AdamW) -> Inventory {
        let mut end = 0;
        let mut place = |elements: usize, dtype: DType| {
            let start = end;
            end += elements * dtype.size_in_bytes();
            start..end
        };
        let entries = layout.entries().iter();
        let weights = entries
            .map(|entry| place(entry.elements(), dtype))
            .collect();
        let (mut states, mut state_places) = (Vec::new(), Vec::new());
        for entry in 0..layout.entries().len() {
            for (state, named) in optimizer.named_states(entry).into_iter().enumerate() {
                let (elements, dtype) = (named.elements(), named.dtype);
                let bytes = place(elements, dtype);
                state_places.push(StatePlace {
                    entry,
                    state,
                    bytes,
                });
                states.push(TensorSpec {
                    name: named.name,
                    dtype: dtype.into(),
                    shape: vec![elements],
                });
            }
        }
        Inventory {
            parameters: parameters.clone(),
            dtype,
            weights,
            states,
            state_places,
            bytes: end,
        }
    }
}

impl Held<'_> {
    fn read_weight(&self, entry: usize, bytes: &mut [u8]) -> Result<(), KernelError> {
        let range = self.weights.layout().entries()[entry].range();
        self.weights.read(self.kernels, range, bytes)
    }

    fn read_state(&self, place: &StatePlace, bytes: &mut [u8]) -> Result<(), KernelError> {
        let states = self.optimizer.named_states(place.entry);
        states[place.state].read(self.kernels, bytes)
    }
}

/// Optimizer states, for [`files::write_tensors`].
struct StateSource<'a, F> {
    inventory: &'a Inventory,
    /// The bytes of a state.
    bytes: F,
}

impl<'a, F: Fn(&StatePlace) -> io::Result<Cow<'a, [u8]>>> TensorSource for StateSource<'a, F> {
    fn tensors(&self) -> &[TensorSpec] {
        &self.inventory.states
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(&(self.bytes)(&self.inventory.state_places[index])?)
    }
}

impl State<'_> {
    /// The weights.
    pub fn weights(&self) -> impl TensorSource + '_ {
        let Inventory {
            parameters, dtype, ..
        } = &self.inventory;
        OutgoingWeights::new(parameters, *dtype, |entry| {
            let mut bytes = vec![0; self.inventory.weights[entry].len()];
            let read = self.held.read_weight(entry, &mut bytes);
            read.map(|()| Cow::Owned(bytes)).map_err(io::Error::other)
        })
    }

    /// The optimizer's states.
    pub fn optimizer(&self) -> impl TensorSource + '_ {
        let bytes = |place: &StatePlace| {
            let mut bytes = vec![0; place.bytes.len()];
            let read = self.held.read_state(place, &mut bytes);
            read.map(|()| Cow::Owned(bytes)).map_err(io::Error::other)
        };
        StateSource {
            inventory: &self.inventory,
            bytes,
        }
    }
}

impl StateOnHost {
    /// The weights.
    pub fn weights(&self) -> impl TensorSource + '_ {
        let Inventory {
            parameters, dtype, ..
        } = &*self.inventory;
        OutgoingWeights::new(parameters, *dtype, |entry| {
            Ok(Cow::Borrowed(self.part(&self.inventory.weights[entry])))
        })
    }

    /// The optimizer's states.
    pub fn optimizer(&self) -> impl TensorSource + '_ {
        StateSource {
            inventory: &self.inventory,
            bytes: |place: &StatePlace| Ok(Cow::Borrowed(self.part(&place.bytes))),
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
        parameters: &Parameters,
        weights: &Weights,
        optimizer: &AdamW,
    ) -> Result<CopyPlace, OutOfMemory> {
        let inventory = Inventory::new(parameters, weights.layout(), weights.dtype(), optimizer);
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

    fn fill(&mut self, held: Held) -> Result<StateOnHost, KernelError> {
        self.wait();
        let bytes = self.buffer.view_mut().slice_mut::<u8>();
        for (entry, range) in self.inventory.weights.iter().enumerate() {
            held.read_weight(entry, &mut bytes[range.clone()])?;
        }
        for place in &self.inventory.state_places {
            held.read_state(place, &mut bytes[place.bytes.clone()])?;
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

impl Session {
    /// The state as it is. No update may be pending: see [`Session::finish_step`].
    pub fn state(&self) -> State<'_> {
        let (model, weights) = (&self.model, &self.weights);
        let parameters = model.architecture().parameters();
        State {
            held: self.held(),
            inventory: Inventory::new(
                parameters,
                weights.layout(),
                weights.dtype(),
                &self.optimizer,
            ),
        }
    }

    /// Copies the state to the host memory that the settings asked for; none if they did not. Waits until the copy before is
    /// gone, so that a thread that holds that itself never returns. No update may be pending.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device failed.
    pub fn copy_state(&mut self) -> Result<Option<StateOnHost>, SessionError> {
        let Some(mut place) = self.copy_place.take() else {
            return Ok(None);
        };
        let copy = place.fill(self.held());
        self.copy_place = Some(place);
        Ok(Some(copy?))
    }

    fn held(&self) -> Held<'_> {
        Held {
            kernels: &*self.kernels,
            weights: &self.weights,
            optimizer: &self.optimizer,
        }
    }
}
