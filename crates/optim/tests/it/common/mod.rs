//! An optimizer with weights and gradients that live wherever a test says, and steps made of noise.

use fakes::scheduled::{Scheduled, Waits};
use files::Parts;
use kernels::cpu::Cpu;
use kernels::{BiasBackward, BlockFile, Kernels};
use memory::{Buffer, Category, DType, Home, Homes, Layer, Layout, LayoutBuilder, Memory};
use optim::{
    Hyperparameters, MasterFormat, MomentFormat, Optimizer, Recipe, RestoreError, SavedState,
    StepNumbers, WholeTensor,
};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use units::{Gradients, Weights};

/// Type of the weights, and formats of the states.
pub type Formats = (DType, MomentFormat, MasterFormat);

/// What was saved, by name.
pub type Saved = BTreeMap<String, (DType, Vec<u8>)>;

/// Precise and quantisable matrices and vectors, none of them a whole number of blocks, in three parts.
pub fn layout() -> Rc<Layout> {
    layout_for(None)
}

/// The same, divided among ranks.
pub fn layout_for(ranks: Option<usize>) -> Rc<Layout> {
    let mut builder = LayoutBuilder::default().for_ranks(ranks);
    let shapes: [(Layer, &str, &[usize]); 6] = [
        (Layer::Embedding, "embed", &[70, 90]),
        (Layer::Block(0), "small", &[5, 7]),
        (Layer::Block(0), "large", &[90, 60]),
        (Layer::Block(0), "norm", &[60]),
        (Layer::Head, "head", &[65, 64]),
        (Layer::Head, "bias", &[5001]),
    ];
    for (part, name, shape) in shapes {
        builder.add(part, name, shape);
    }
    Rc::new(builder.build_precise(|name, elements| name == "embed" || elements < 4096))
}

/// The matrices, those that are large and small.
pub fn matrices(layout: &Layout) -> Vec<WholeTensor> {
    let entries = layout.entries().iter().enumerate();
    let hidden = entries.filter(|(_, entry)| ["small", "large"].contains(&&entry.name[..]));
    let matrices = hidden.map(|(index, entry)| {
        let shape = [entry.shape[0], entry.shape[1]];
        WholeTensor {
            entry: index,
            count: 1,
            shape,
            stored: shape,
        }
    });
    matrices.collect()
}

pub fn noise(seed: usize, index: usize) -> f32 {
    let random = kernels::random::random_u32(seed as u64, index as u64);
    random as f32 / u32::MAX as f32 - 0.5
}

/// Everything on the device but the states.
pub fn homes(states: Home) -> Homes {
    Homes {
        states,
        chunk_bytes: 16_000,
        chunk_slots: 2,
        ..Homes::default()
    }
}

/// A disk whose files are [`MemoryFile`]s.
pub fn disk() -> Home {
    Home::Disk("memory".into())
}

/// An optimizer that takes gradients as they are.
pub fn unclipped(hyperparameters: Hyperparameters) -> Hyperparameters {
    Hyperparameters {
        clip_norm: f64::INFINITY,
        ..hyperparameters
    }
}

/// A file in memory, for states that go to disk.
#[derive(Debug)]
pub struct MemoryFile(pub Mutex<Vec<u8>>);

/// The bytes of a file that a copy covers, which must be whole blocks.
fn blocks(offset: u64, bytes: &[u8]) -> std::ops::Range<usize> {
    assert!(offset.is_multiple_of(4096) && bytes.len().is_multiple_of(4096));
    assert!((bytes.as_ptr() as usize).is_multiple_of(4096));
    offset as usize..offset as usize + bytes.len()
}

impl BlockFile for MemoryFile {
    fn path(&self) -> &Path {
        Path::new("memory")
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let place = blocks(offset, bytes);
        bytes.copy_from_slice(&self.0.lock().unwrap()[place]);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap()[blocks(offset, bytes)].copy_from_slice(bytes);
        Ok(())
    }
}

/// An optimizer with its weights.
pub struct Training {
    /// Dropped first, with all work that is under way.
    pub kernels: Box<Kernels>,
    pub layout: Rc<Layout>,
    pub weights: Weights,
    pub gradients: Gradients,
    pub optimizer: Optimizer,
    noise: Buffer,
    /// What is not finite in the noise of the next step.
    spoiled: Option<usize>,
    loss: Buffer,
}

impl Training {
    /// On the processor, with everything on the device.
    pub fn new(formats: Formats) -> Training {
        Training::elsewhere(formats, &Homes::default())
    }

    pub fn elsewhere(formats: Formats, homes: &Homes) -> Training {
        Training::by(Hyperparameters::default(), formats, homes)
    }

    /// By an optimizer of the test's choice.
    pub fn by(hyperparameters: Hyperparameters, formats: Formats, homes: &Homes) -> Training {
        let memory = Memory::host();
        let kernels = Cpu::new(&memory, DType::BF16).unwrap();
        Training::on(Box::new(kernels), memory, hyperparameters, (formats, homes))
    }

    /// Under a random schedule of all queues, without the waits that have this reason.
    pub fn scheduled(
        schedule: (u64, Option<&'static str>),
        formats: Formats,
        homes: &Homes,
    ) -> (Training, Waits) {
        Training::scheduled_by(schedule, Hyperparameters::default(), formats, homes)
    }

    /// The same, by an optimizer of the test's choice.
    pub fn scheduled_by(
        (seed, ignored): (u64, Option<&'static str>),
        hyperparameters: Hyperparameters,
        formats: Formats,
        homes: &Homes,
    ) -> (Training, Waits) {
        let memory = Memory::host();
        let cpu = Cpu::new(&memory, DType::BF16).unwrap();
        let kernels = Scheduled::new(cpu, seed, ignored);
        let waits = kernels.backend().waits();
        let training = Training::on(Box::new(kernels), memory, hyperparameters, (formats, homes));
        (training, waits)
    }

    fn on(
        kernels: Box<Kernels>,
        memory: Memory,
        hyperparameters: Hyperparameters,
        ((dtype, moments, master), homes): (Formats, &Homes),
    ) -> Training {
        let layout = layout();
        let hyperparameters = match homes.gradients {
            Home::Released => unclipped(hyperparameters),
            _ => hyperparameters,
        };
        let formats = (moments, master);
        let optimizer = Optimizer::lease(
            &memory,
            &layout,
            &Recipe {
                hyperparameters,
                matrices: matrices(&layout),
                formats,
                weights: dtype,
                gradients: DType::F32,
            },
            homes,
            None,
        );
        let persistent = |name, elements: usize| {
            let category = Category::Temporary;
            let lease = memory.lease_persistent(category, name, [elements], DType::F32);
            lease.unwrap()
        };
        // Where waits are left out, leases of the step are used after their end: they must be there all the same.
        memory.reserve_slab(1 << 20).unwrap();
        let gradients = Gradients::lease(&memory, &layout, DType::F32, &homes.gradients, None);
        let mut training = Training {
            noise: persistent("noise", layout.elements()),
            loss: persistent("loss", 1),
            spoiled: None,
            weights: Weights::lease(&memory, &layout, dtype, homes, None).unwrap(),
            gradients: gradients.unwrap(),
            optimizer: optimizer.unwrap(),
            kernels,
            layout: layout.clone(),
        };
        if let Some(bytes) = training.optimizer.disk_bytes() {
            let zeros = MemoryFile(Mutex::new(vec![0; bytes as usize]));
            training.optimizer.use_file(Arc::new(zeros));
        }
        for entry in layout.entries() {
            let values: Vec<f32> = entry.range().map(|index| noise(1, index)).collect();
            training.set_weights(entry.offset, &values);
        }
        training
    }

    pub fn set_weights(&mut self, offset: usize, values: &[f32]) {
        let (kernels, weights) = (&*self.kernels, &mut self.weights);
        let set = self.optimizer.set_weights(kernels, weights, offset, values);
        set.unwrap();
    }

    /// Makes one element of the next step's gradients not a number.
    pub fn spoil(&mut self, element: usize) {
        self.spoiled = Some(element);
    }

    /// The sum of losses of all steps from now on.
    pub fn set_loss(&mut self, loss: f32) {
        let bytes = loss.to_le_bytes();
        self.kernels.upload(self.loss.view_mut(), &bytes).unwrap();
    }

    /// Steps, each of which updates what the one before has left while it goes forward.
    pub fn steps(&mut self, steps: impl IntoIterator<Item = usize>) {
        for step in steps {
            self.update_pending();
            self.step(step);
        }
        self.update_pending();
        let done = self.kernels.record(kernels::Queue::Compute).unwrap();
        self.kernels.finish(done).unwrap();
    }

    /// As a forward pass does, part by part.
    fn update_pending(&mut self) {
        let kernels = &*self.kernels;
        let (weights, gradients) = (&mut self.weights, &self.gradients);
        weights.begin_pass(&(0..self.layout.units().len()).collect());
        for (index, unit) in self.layout.units().iter().enumerate() {
            weights.use_unit(kernels, index).unwrap();
            let optimizer = &mut self.optimizer;
            let updated = optimizer.before_forward(kernels, weights, gradients, unit.part);
            updated.unwrap();
            weights.look_ahead(kernels).unwrap();
        }
        weights.end_pass(kernels).unwrap();
        assert!(!self.optimizer.is_pending(), "all parts have been updated");
    }

    /// Gradients of noise and weights, and the update as far as it does not wait for the next step.
    fn step(&mut self, step: usize) {
        let numbers = StepNumbers {
            step,
            update: step,
            learning_rate: 1e-2,
            matrix_rate: 1e-2,
            seed: 3,
        };
        let mut values: Vec<f32> = (0..self.layout.elements())
            .map(|at| noise(100 + step, at))
            .collect();
        if let Some(spoiled) = self.spoiled.take() {
            values[spoiled] = f32::NAN;
        }
        let bytes = bytemuck::cast_slice(&values);
        self.kernels.upload(self.noise.view_mut(), bytes).unwrap();
        self.gradients.begin_step();
        self.optimizer.begin_step(&*self.kernels, numbers).unwrap();
        self.optimizer.before_backward(&*self.kernels).unwrap();
        self.backward();
        let vectors =
            (0..self.layout.entries().len()).filter(|entry| self.layout.unit_of(*entry).is_none());
        vectors
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|entry| self.contribute(entry));
        let (kernels, loss) = (&*self.kernels, self.loss.view());
        let (weights, gradients) = (&mut self.weights, &mut self.gradients);
        gradients.add_up_vectors(kernels, true).unwrap();
        gradients.end_pass(kernels, true).unwrap();
        let optimizer = &mut self.optimizer;
        let ended = optimizer.end_step(kernels, weights, gradients, loss, numbers);
        ended.unwrap();
    }

    /// Goes over the units in reverse; updates each where gradients are released.
    fn backward(&mut self) {
        let layout = self.layout.clone();
        self.weights
            .begin_pass(&(0..layout.units().len()).rev().collect());
        for (index, unit) in layout.units().iter().enumerate().rev() {
            self.weights.use_unit(&*self.kernels, index).unwrap();
            let open = self.gradients.open(&*self.kernels, index).unwrap();
            unit.entries
                .iter()
                .for_each(|entry| self.contribute(*entry));
            let (kernels, loss) = (&*self.kernels, self.loss.view());
            let (weights, gradients) = (&mut self.weights, &mut self.gradients);
            let (optimizer, part) = (&mut self.optimizer, unit.part);
            gradients.close(kernels, open, (true, true)).unwrap();
            let updated = optimizer.after_backward(kernels, weights, gradients, part, loss);
            updated.unwrap();
            weights.look_ahead(kernels).unwrap();
        }
        self.weights.end_pass(&*self.kernels).unwrap();
    }

    /// Adds the weights and the noise to a gradient.
    fn contribute(&mut self, entry: usize) {
        let tensor = &self.layout.entries()[entry];
        let noise = self.noise.view().rows(tensor.range());
        for dy in [self.weights.view(entry), noise] {
            let (out, init) = self.gradients.accumulate(entry);
            let contribution = BiasBackward {
                out: out.reshape([tensor.elements()]).into(),
                dy: dy.reshape([1, tensor.elements()]),
                init,
            };
            self.kernels.run(contribution).unwrap();
        }
    }

    pub fn save(&self) -> Saved {
        let entries = 0..self.layout.entries().len();
        let states = entries.flat_map(|index| {
            let whole = self.layout.entries()[index].range();
            self.optimizer.named_states(index, &whole)
        });
        let bytes = states.map(|state| {
            let mut bytes = vec![0; state.bytes()];
            state.read(&*self.kernels, &mut bytes).unwrap();
            (state.name, (state.dtype, bytes))
        });
        bytes.collect()
    }

    /// The bits of all weights, widened to f32, where the layout has them.
    pub fn weights(&self) -> Vec<u32> {
        let dtype = self.weights.dtype();
        let mut all = vec![0; self.layout.elements()];
        for entry in self.layout.entries() {
            let mut bytes = vec![0; entry.elements() * dtype.size_in_bytes()];
            let read = self.weights.read(&*self.kernels, entry.range(), &mut bytes);
            read.unwrap();
            let bits: Vec<u32> = match dtype {
                DType::BF16 => {
                    let halves: &[u16] = bytemuck::cast_slice(&bytes);
                    halves.iter().map(|bits| u32::from(*bits) << 16).collect()
                }
                _ => bytemuck::cast_slice(&bytes).to_vec(),
            };
            all[entry.range()].copy_from_slice(&bits);
        }
        all
    }

    /// The weights of `other`, and the states that were saved.
    pub fn restore(&mut self, other: &Training, saved: &Saved) -> Result<(), RestoreError> {
        let weights: Vec<f32> = other.weights().into_iter().map(f32::from_bits).collect();
        let find = |name: &str| {
            let (dtype, bytes) = saved.get(name)?;
            Some(SavedState {
                dtype: *dtype,
                bytes: Parts::new([&bytes[..]]),
            })
        };
        for (index, entry) in self.layout.clone().entries().iter().enumerate() {
            self.set_weights(entry.offset, &weights[entry.range()]);
            let (kernels, weights) = (&*self.kernels, &mut self.weights);
            self.optimizer.restore(kernels, weights, index, &find)?;
        }
        Ok(())
    }
}

/// Three steps in a format.
pub fn trained(formats: Formats) -> Training {
    let mut training = Training::new(formats);
    training.steps(1..=3);
    training
}
