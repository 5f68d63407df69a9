//! A small training run of any architecture, on the processor or on shapes.

use super::oracle::{Oracle, Vars, gradients, var};
use kernels::cpu::Cpu;
use kernels::meta::{FlopCounter, Meta};
use kernels::{Kernels, Target, Traffic};
use memory::{Buffer, Category, DType, Home, Homes, Memory};
use model::{
    Architecture, Batch, BatchShape, Computation, HeadLoss, KvCache, Model, ModelConfig, Policy,
    Purpose, Randomness, ReplayCounts, SavedActivations, StepLoss, Training, Work,
};
use std::ops::Range;
use std::rc::Rc;
use units::{Gradients, Weights};

/// The micro-batches of every run.
pub const SHAPE: BatchShape = BatchShape { rows: 2, seq: 13 };

/// The vocabulary of every run.
pub const VOCAB: usize = 31;

/// What a run computed and used.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The loss of every step, as bits.
    pub losses: Vec<u32>,
    /// The weights after the last step, as bits.
    pub weights: Vec<u32>,
    /// The peak of the last step.
    pub peak_bytes: u64,
    /// Replays of the last step.
    pub replayed: ReplayCounts,
    /// Bytes that crossed in all steps, uploads of tokens included.
    pub traffic: Traffic,
}

/// A model with everything that a step needs.
pub struct Run {
    memory: Memory,
    kernels: Box<Kernels>,
    /// The model.
    pub model: Model,
    weights: Weights,
    gradients: Gradients,
    saved: SavedActivations,
    loss: Buffer,
}

/// 1 / targets, on the device.
pub fn scale_of(memory: &Memory, kernels: &Kernels, targets: usize) -> Buffer {
    let lease = memory.lease(Category::Input, "gradient_scale", [1], DType::F32);
    let mut scale = lease.unwrap();
    let value = [1.0 / targets as f32];
    kernels
        .upload(scale.view_mut(), bytemuck::cast_slice(&value))
        .unwrap();
    scale
}

impl Run {
    /// A run on the processor, with weights that are noise.
    pub fn on_cpu(architecture: Architecture, policy: &Policy) -> Run {
        let memory = Memory::host();
        let kernels = Box::new(Cpu::new(&memory, DType::F32).unwrap());
        let mut run = Run::new(architecture, policy, memory, kernels);
        for (index, entry) in run.model.layout().clone().entries().iter().enumerate() {
            let values = initial_values(index, &entry.name, entry.elements());
            assert_eq!(run.weights.view(index).elements(), values.len());
            run.set(index, &values);
        }
        run
    }

    /// Sets a parameter.
    pub fn set(&mut self, index: usize, values: &[f32]) {
        let range = self.model.layout().entries()[index].range();
        let bytes = bytemuck::cast_slice(values);
        self.weights.store(&*self.kernels, range, bytes).unwrap();
    }

    /// The same run, planned.
    pub fn on_shapes(architecture: Architecture, policy: &Policy) -> Run {
        let memory = Memory::shapes();
        let meta = Meta::new(&memory, Target::Cpu, DType::F32, FlopCounter::default());
        let kernels = Box::new(meta.unwrap());
        Run::new(architecture, policy, memory, kernels)
    }

    fn new(
        architecture: Architecture,
        policy: &Policy,
        memory: Memory,
        kernels: Box<Kernels>,
    ) -> Run {
        let dtype = DType::F32;
        let layout = Rc::new(architecture.parameters.layout(|_, _| false));
        let computation = Computation {
            dtype,
            seq: SHAPE.seq,
            head_chunk: 7,
        };
        let model = Model::new(
            architecture,
            layout.clone(),
            &memory,
            &*kernels,
            computation,
        );
        let model = model.unwrap();
        let saved = model
            .architecture()
            .lease_saved(
                &memory,
                dtype,
                policy,
                (SHAPE, &[model::HeldBlocks::all(model.layers())]),
            )
            .unwrap();
        let loss = memory.lease_persistent(Category::OptimizerState, "loss", [1], dtype);
        let gradients = Gradients::lease(&memory, &layout, dtype, &Home::Device, None);
        let weights = Weights::lease(&memory, &layout, dtype, &Homes::default(), None);
        Run {
            gradients: gradients.unwrap(),
            loss: loss.unwrap(),
            weights: weights.unwrap(),
            saved,
            model,
            memory,
            kernels,
        }
    }

    /// Forward and backward of one micro-batch as step `step`; with randomness as in training, or without.
    pub fn pass(&mut self, step: u64, is_training: bool) -> ReplayCounts {
        let randomness = Randomness {
            seed: 7,
            step,
            micro_batch: 0,
        };
        self.pass_of(&tokens(step), is_training.then_some(randomness))
    }

    /// Forward and backward of these ids and targets.
    pub fn pass_of(
        &mut self,
        (ids, targets): &(Vec<i32>, Vec<i32>),
        randomness: Option<Randomness>,
    ) -> ReplayCounts {
        self.memory.begin_step();
        self.gradients.begin_step();
        self.saved.begin_step(&*self.kernels).unwrap();
        let mut replayed = self.model.no_replays();
        let (memory, kernels) = (&self.memory, &*self.kernels);
        let mut batch = Batch::upload(memory, kernels, SHAPE, ids, targets).unwrap();
        if let Some(randomness) = randomness {
            let sites = self.model.architecture().dropout_sites();
            let dropped = batch.with_dropout(memory, kernels, &sites, randomness);
            batch = dropped.unwrap();
        }
        let scale = scale_of(memory, kernels, targets.len());
        let loss = StepLoss {
            sums: self.loss.view_mut(),
            are_first: [true; 4],
            micro_batches: 1,
            gradient_scale: scale.view(),
            of_head: HeadLoss::NextTokens,
        };
        let work = Work {
            memory: &self.memory,
            kernels: &*self.kernels,
            weights: &mut self.weights,
            order: Rc::default(),
            saved: &mut self.saved,
            layers: 0..self.model.layers(),
            batches: std::slice::from_ref(&batch),
            purpose: Purpose::Training(Training {
                gradients: &mut self.gradients,
                optimizer: None,
                is_first_micro_batch: true,
                is_last_micro_batch: true,
                losses: vec![loss],
                deferred: None,
                is_stopped: &|| false,
            }),
        };
        self.model.forward_backward(work, &mut replayed).unwrap();
        assert!(self.gradients.missing().is_empty());
        replayed
    }

    /// A cache for sequences of so many tokens.
    pub fn cache(&self, tokens: &[usize]) -> KvCache {
        let shape = self.model.architecture().cache_shape();
        KvCache::lease(&self.memory, shape, DType::F32, tokens).unwrap()
    }

    /// The logits `[rows, VOCAB]` of what follows the last of some tokens, as many of each row, at these positions. Some
    /// sequences of a cache go on there, whose lengths include these tokens.
    pub fn next_logits(
        &mut self,
        (rows, ids, positions): (usize, &[i32], &[i32]),
        cache: Option<(&mut KvCache, Range<usize>, &[usize])>,
    ) -> Vec<f32> {
        let (memory, kernels) = (&self.memory, &*self.kernels);
        let seq = ids.len() / rows;
        let shape = BatchShape { rows, seq };
        let batch = Batch::without_targets(memory, kernels, shape, ids, positions).unwrap();
        let cached = cache.map(|(cache, sequences, lengths)| {
            let cached = cache.sequences(memory, kernels, sequences, lengths);
            cached.unwrap()
        });
        let work = Work {
            memory,
            kernels,
            weights: &mut self.weights,
            order: Rc::default(),
            saved: &mut self.saved,
            layers: 0..self.model.layers(),
            batches: std::slice::from_ref(&batch),
            purpose: Purpose::Inference(cached),
        };
        let logits = self.model.next_logits(work).unwrap();
        logits.view().slice::<f32>().to_vec()
    }

    /// The loss of the last pass.
    pub fn loss(&self) -> f32 {
        self.loss.view().slice::<f32>()[0]
    }

    /// The gradient of a parameter.
    pub fn gradient(&self, index: usize) -> &[f32] {
        self.gradients.view(index).slice()
    }

    /// The number that a stage of a layer has counted in the last pass, if it counts.
    pub fn counted(&self, layer: usize, stage: &str) -> Option<f32> {
        let counts = self.saved.statistics(layer, stage)?;
        Some(counts.slice::<f32>()[0])
    }

    /// Adds to an element of a parameter.
    pub fn change(&mut self, index: usize, element: usize, by: f32) {
        let mut values = self.parameter(index).to_vec();
        values[element] += by;
        let range = self.model.layout().entries()[index].range();
        let bytes = bytemuck::cast_slice(&values);
        self.weights.store(&*self.kernels, range, bytes).unwrap();
    }

    /// The values of a parameter.
    pub fn parameter(&self, index: usize) -> &[f32] {
        self.weights.view(index).slice()
    }

    /// Steps of plain gradient descent; on shapes nothing is computed.
    pub fn train(mut self, steps: u64) -> Outcome {
        let mut losses = Vec::new();
        let mut replayed = None;
        for step in 1..=steps {
            replayed = Some(self.pass(step, true));
            if !self.memory.is_shapes() {
                losses.push(self.loss().to_bits());
                self.descend();
            }
        }
        let weights = match self.memory.is_shapes() {
            true => Vec::new(),
            false => (0..self.model.layout().entries().len())
                .flat_map(|index| self.parameter(index).to_vec())
                .map(f32::to_bits)
                .collect(),
        };
        Outcome {
            losses,
            weights,
            peak_bytes: self.memory.step_memory().peak.bytes,
            replayed: replayed.expect("a run has steps"),
            traffic: self.kernels.traffic(),
        }
    }

    /// A step of plain gradient descent.
    pub fn descend(&mut self) {
        let layout = self.model.layout().clone();
        let entries = layout.entries().iter().enumerate();
        for (index, _) in entries.filter(|(_, entry)| entry.role.is_trained()) {
            let gradients = self.gradient(index).to_vec();
            let weights = self.weights.view(index).slice::<f32>().iter();
            let pairs = weights.zip(gradients);
            let next: Vec<f32> = pairs.map(|(weight, of)| weight - 0.1 * of).collect();
            self.set(index, &next);
        }
    }
}

/// Pseudo-random numbers between -1 and 1 (SplitMix64).
pub fn noise(seed: u64, index: u64) -> f32 {
    let mut value = (seed << 32 | index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^= value >> 31;
    (value >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Values that leave no term of any gradient small: norm weights far from 1, biases far from 0.
pub fn initial_values(index: usize, name: &str, elements: usize) -> Vec<f32> {
    let is_norm = ["norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"];
    let value = |element: usize| {
        let noise = noise(index as u64 + 1, element as u64);
        match name {
            name if is_norm.iter().any(|end| name.ends_with(end)) => 1.0 + 0.5 * noise,
            name if name.ends_with("bias") => 0.5 * noise,
            _ => 0.25 * noise,
        }
    };
    (0..elements).map(value).collect()
}

/// Ids and targets of a micro-batch; every seventh target is masked.
pub fn tokens(seed: u64) -> (Vec<i32>, Vec<i32>) {
    let token = |seed: u64, index: usize| {
        let unit = (noise(seed, index as u64) + 1.0) / 2.0;
        ((unit * VOCAB as f32) as i32).min(VOCAB as i32 - 1)
    };
    let ids = (0..SHAPE.tokens())
        .map(|index| token(seed, index))
        .collect();
    let target = |index: usize| match index % 7 {
        3 => -100,
        _ => token(seed + 1000, index),
    };
    (ids, (0..SHAPE.tokens()).map(target).collect())
}

/// Compares loss and gradients of the pass of step 1, without dropout, with candle's autograd in f64.
pub fn assert_agrees(run: &Run, config: &ModelConfig, is_parallel: bool) {
    let entries = run.model.layout().entries();
    let mut vars = Vars::new();
    for (index, entry) in entries.iter().enumerate() {
        let values = run.parameter(index);
        vars.insert(entry.name.clone(), var(values, &entry.shape).unwrap());
    }
    let oracle = Oracle {
        config,
        vars: &vars,
        is_parallel,
        routers: Default::default(),
    };
    let (ids, targets) = tokens(1);
    let loss = oracle
        .loss_sum(&ids, &targets, (SHAPE.rows, SHAPE.seq))
        .unwrap();
    let expected = loss.to_scalar::<f64>().unwrap();
    assert!((f64::from(run.loss()) / expected - 1.0).abs() < 1e-5);
    let expected = gradients(&(loss / targets.len() as f64).unwrap(), &vars).unwrap();
    let entries = entries.iter().enumerate();
    for (index, entry) in entries.filter(|(_, entry)| entry.role.is_trained()) {
        let expected = &expected[&entry.name];
        let largest = expected
            .iter()
            .fold(0f64, |most, value| most.max(value.abs()));
        let pairs = run.gradient(index).iter().zip(expected);
        let error = pairs.fold(0f64, |most, (a, b)| {
            assert!(a.is_finite(), "{}", entry.name);
            most.max((f64::from(*a) - b).abs())
        });
        assert!(
            error < 2e-5 * largest,
            "{}: {error:e} of {largest:e}",
            entry.name
        );
    }
}
