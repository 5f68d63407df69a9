//! The numbers of an update that all calls of a step share.

use crate::adafactor::Adafactor;
use crate::adamw::{AdamW, AdamWAt};
use crate::form::Form;
use crate::muon::Muon;
use crate::rule::{ParameterGroup, Rule, StepNumbers, WholeTensor};
use crate::segment::Segment;
use choices::choices;
use kernels::{Kernels, Result};
use memory::{Buffer, Category, Cover, DType, Entry, In, Layout, Memory, OutOfMemory};

choices! {
    /// The optimizers. A new one is a line here, and in [`Hyperparameters::groups`] the parameters that it updates.
    #[derive(Default)]
    OptimizerKind {
        /// [`AdamW`] for all parameters.
        #[default]
        AdamW = "adamw",
        /// [`Muon`] for the hidden matrices, [`AdamW`] for all other parameters.
        Muon = "muon",
        /// [`Adafactor`] for all parameters.
        Adafactor = "adafactor",
    }
}

/// The optimizer, and its numbers that do not change during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// Which optimizer.
    pub kind: OptimizerKind,
    /// AdamW's numbers.
    pub adamw: AdamW,
    /// Muon's numbers.
    pub muon: Muon,
    /// Adafactor's numbers.
    pub adafactor: Adafactor,
    /// Decoupled weight decay of matrices; vectors have none.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm. Infinity turns clipping off.
    pub clip_norm: f64,
    /// Parameters that AdamW updates at another rate than the others.
    pub faster: Option<Faster>,
}

/// Parameters whose names end alike, and how many times the learning rate they are updated at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faster {
    /// The end of their names.
    pub ending: &'static str,
    /// Their rate over that of other parameters.
    pub ratio: f64,
}

impl Default for Hyperparameters {
    fn default() -> Hyperparameters {
        Hyperparameters {
            kind: OptimizerKind::default(),
            adamw: AdamW::default(),
            muon: Muon::default(),
            adafactor: Adafactor::default(),
            weight_decay: 0.1,
            clip_norm: 1.0,
            faster: None,
        }
    }
}

impl Hyperparameters {
    /// Which rule updates which parameters. `hidden` are the matrices that some optimizers update as a whole.
    pub(crate) fn groups(&self, layout: &Layout, hidden: &[WholeTensor]) -> Vec<ParameterGroup> {
        let adamw = |cover| ParameterGroup {
            rule: Rule::Ranges(Box::new(self.adamw)),
            cover,
            tensors: Vec::new(),
        };
        match self.kind {
            OptimizerKind::AdamW => {
                let Some(faster) = self.faster else {
                    return vec![adamw(layout.trained())];
                };
                let entries = layout.entries().iter();
                let entries = entries.filter(|entry| entry.name.ends_with(faster.ending));
                let cover = Cover::new(entries.map(Entry::padded_range));
                let at_ratio = ParameterGroup {
                    rule: Rule::Ranges(Box::new(AdamWAt {
                        adamw: self.adamw,
                        ratio: faster.ratio,
                    })),
                    cover: cover.clone(),
                    tensors: Vec::new(),
                };
                let tails = Cover::new(layout.tails().iter().cloned());
                vec![
                    adamw(layout.trained().without(&cover).without(&tails)),
                    at_ratio,
                ]
            }
            OptimizerKind::Muon => {
                let entries = layout.entries();
                let ranges = hidden.iter().map(|one| entries[one.entry].padded_range());
                let cover = Cover::new(ranges);
                // Tails, which pad the layout for ranks, have no gradients.
                let tails = Cover::new(layout.tails().iter().cloned());
                let rest = layout.trained().without(&cover).without(&tails);
                let muon = ParameterGroup {
                    rule: Rule::Matrices(Box::new(self.muon)),
                    cover,
                    tensors: hidden.to_vec(),
                };
                vec![muon, adamw(rest)]
            }
            OptimizerKind::Adafactor => self.adafactor.groups(layout),
        }
    }

    /// Says which moments there are, for a sentence; empty for two per parameter.
    pub fn moments_of(&self) -> &'static str {
        match self.kind {
            OptimizerKind::AdamW => "",
            OptimizerKind::Muon => " (one of each matrix that is updated as a whole)",
            OptimizerKind::Adafactor => {
                " (one of each vector, and of rows and columns of matrices)"
            }
        }
    }

    /// The type that its matrix products read and write; none if it has no products.
    pub fn product_dtype(&self) -> Option<DType> {
        match self.kind {
            OptimizerKind::AdamW | OptimizerKind::Adafactor => None,
            OptimizerKind::Muon => Some(self.muon.ns_dtype),
        }
    }
}

/// The numbers that all updates of a step share, on the device.
pub(crate) struct Numbers {
    weight_decay: f64,
    clip_norm: f64,
    /// f32: the rates of each group.
    rates: Vec<Buffer>,
    /// `[2]` f32: gradient norm and clipping factor of the step.
    pub(crate) clip: Buffer,
    /// `[2]` u32: key of the step's random numbers.
    key: Buffer,
}

impl Numbers {
    /// Leases room for the numbers of a step.
    pub(crate) fn lease(
        memory: &Memory,
        hyperparameters: &Hyperparameters,
        form: &Form,
    ) -> Result<Numbers, OutOfMemory> {
        let lease = |name, elements: usize, dtype| {
            memory.lease_persistent(Category::OptimizerState, name, [elements], dtype)
        };
        let groups = form.groups().iter();
        let rates = groups.map(|group| lease("rates", group.rule.rate_count(), DType::F32));
        Ok(Numbers {
            weight_decay: hyperparameters.weight_decay,
            clip_norm: hyperparameters.clip_norm,
            rates: rates.collect::<Result<_, OutOfMemory>>()?,
            clip: lease("clip", 2, DType::F32)?,
            key: lease("key", 2, DType::U32)?,
        })
    }

    /// The global norm that gradients are scaled down to.
    pub(crate) fn clip_norm(&self) -> f64 {
        self.clip_norm
    }

    /// Uploads the numbers that change from step to step.
    pub(crate) fn upload(
        &mut self,
        kernels: &Kernels,
        form: &Form,
        numbers: StepNumbers,
    ) -> Result {
        for (group, rates) in form.groups().iter().zip(&mut self.rates) {
            let values = group.rule.rates(&numbers);
            kernels.upload(rates.view_mut(), bytemuck::cast_slice(&values))?;
        }
        let key = kernels::random::key(numbers.seed, numbers.step as u64, ROUNDING);
        let key = [key as u32, (key >> 32) as u32];
        kernels.upload(self.key.view_mut(), bytemuck::cast_slice(&key))
    }

    /// The rates of a group, f32.
    pub(crate) fn rates(&self, group: usize) -> In<'_> {
        self.rates[group].view()
    }

    /// `[2]` u32: the key of the step's random numbers.
    pub(crate) fn key(&self) -> In<'_> {
        self.key.view()
    }

    /// Decoupled weight decay of a segment.
    pub(crate) fn weight_decay(&self, segment: &Segment) -> f32 {
        match segment.decays {
            true => self.weight_decay as f32,
            false => 0.0,
        }
    }
}

/// The stream of random numbers for stochastic rounding of states and weights.
const ROUNDING: u32 = 1;
