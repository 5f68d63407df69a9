//! The optimizers: which states each keeps of a parameter, and which parameters it updates. Where states live, and how
//! they reach the device, is the same for all.

use crate::adafactor::{self, Adafactor, AdafactorGroup};
use crate::adamw::{self, AdamW};
use crate::moment::Moment;
use crate::muon::{self, Muon};
use crate::update::{StepNumbers, WholeTensor};
use choices::choices;
use memory::{Cover, DType, Entry, Layout};

choices! {
    /// The optimizers. A new one is a line here and in [`Rule`], and in [`Hyperparameters::groups`] the parameters that it updates.
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

/// An optimizer of some parameters: which states it keeps of them, and the numbers of their updates.
pub(crate) enum Rule {
    /// Updates any range by itself, at `ratio` times the learning rate.
    AdamW { numbers: AdamW, ratio: f64 },
    /// Updates matrices as a whole.
    Muon(Muon),
    /// Updates tensors by sums over each.
    Adafactor(AdafactorGroup),
}

impl Rule {
    /// The states that it keeps of every parameter, besides the master states.
    pub(crate) fn moments(&self) -> &'static [Moment] {
        match self {
            Rule::AdamW { .. } => &adamw::MOMENTS,
            Rule::Muon(_) => &muon::MOMENTUM,
            Rule::Adafactor(group) if group.is_factored => &[],
            Rule::Adafactor(_) => &adafactor::VARIANCE,
        }
    }

    /// The f32 states that it keeps of a tensor as a whole, each with its name and its number of elements. Every rank
    /// has all of them on its device.
    pub(crate) fn tensor_states(&self, tensor: &WholeTensor) -> Vec<(&'static str, usize)> {
        match self {
            Rule::Adafactor(group) if group.is_factored => {
                let shape = adafactor::shape(tensor);
                let (rows, columns) = (shape.all_rows(), shape.all_columns());
                vec![("row_variance", rows), ("column_variance", columns)]
            }
            _ => Vec::new(),
        }
    }

    /// The f32 numbers that it needs on the device in each step.
    pub(crate) fn rates(&self, step: &StepNumbers) -> Vec<f32> {
        let rates: &[f64] = match self {
            Rule::AdamW { numbers, ratio } => &numbers.rates(step.learning_rate * ratio, step),
            Rule::Muon(_) => &[step.matrix_rate],
            Rule::Adafactor(group) => &group.rates(step),
        };
        rates.iter().map(|rate| *rate as f32).collect()
    }
}

/// Parameters that one rule updates.
pub(crate) struct ParameterGroup {
    pub(crate) rule: Rule,
    pub(crate) cover: Cover,
    /// The tensors of the cover, padding included, if the rule updates tensors as a whole.
    pub(crate) tensors: Vec<WholeTensor>,
}

impl ParameterGroup {
    fn of_tensors(layout: &Layout, rule: Rule, tensors: Vec<WholeTensor>) -> ParameterGroup {
        let entries = tensors.iter().map(|one| &layout.entries()[one.entry]);
        ParameterGroup {
            rule,
            cover: Cover::new(entries.map(Entry::padded_range)),
            tensors,
        }
    }
}

impl Hyperparameters {
    /// Which rule updates which parameters. `hidden` are the matrices that some optimizers update as a whole.
    pub(crate) fn groups(&self, layout: &Layout, hidden: &[WholeTensor]) -> Vec<ParameterGroup> {
        let adamw = |ratio, cover| ParameterGroup {
            rule: Rule::AdamW {
                numbers: self.adamw,
                ratio,
            },
            cover,
            tensors: Vec::new(),
        };
        let own = match (self.kind, self.faster) {
            (OptimizerKind::Adafactor, _) => return self.adafactor_groups(layout),
            (OptimizerKind::AdamW, None) => return vec![adamw(1.0, layout.trained())],
            (OptimizerKind::AdamW, Some(faster)) => {
                let entries = layout.entries().iter();
                let entries = entries.filter(|entry| entry.name.ends_with(faster.ending));
                adamw(faster.ratio, Cover::new(entries.map(Entry::padded_range)))
            }
            (OptimizerKind::Muon, _) => {
                ParameterGroup::of_tensors(layout, Rule::Muon(self.muon), hidden.to_vec())
            }
        };
        // Tails, which pad the layout for ranks, have no gradients.
        let tails = Cover::new(layout.tails().iter().cloned());
        let rest = layout.trained().without(&own.cover).without(&tails);
        let rest = adamw(1.0, rest);
        match self.kind {
            OptimizerKind::AdamW => vec![rest, own],
            _ => vec![own, rest],
        }
    }

    /// Matrices, whose variances are factored, and vectors.
    fn adafactor_groups(&self, layout: &Layout) -> Vec<ParameterGroup> {
        let trained = layout.entries().iter().enumerate();
        let trained = trained.filter(|(_, entry)| entry.role.is_trained());
        let (matrices, vectors): (Vec<_>, Vec<_>) =
            trained.partition(|(_, entry)| entry.is_matrix());
        let groups = [(true, matrices), (false, vectors)].map(|(is_factored, tensors)| {
            let tensors = tensors.into_iter().map(WholeTensor::of_entry).collect();
            let rule = Rule::Adafactor(AdafactorGroup {
                numbers: self.adafactor,
                is_factored,
            });
            ParameterGroup::of_tensors(layout, rule, tensors)
        });
        groups.into()
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
