//! How ranks that train together divide what they hold.

use choices::choices;
use memory::Rank;
use serde::{Deserialize, Serialize};

/// The ranks that train together, and how what they hold is divided. Micro-batch `a * n + r` of a step goes to rank `r` of `n`.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranks {
    /// Which one this is, and how many there are. One, too, goes the way of many: its gradients are staged and then added.
    pub rank: Rank,
    /// What is divided.
    pub zero: Zero,
    /// Most bytes that a reduction receives at a time, over all ranks.
    pub bucket_bytes: usize,
    /// When gradients are added up over ranks.
    pub reduce: Reduce,
    /// Whether gradients are exchanged while the backward pass goes on.
    pub overlap_grad_reduce: bool,
    /// Whether weights are gathered ahead of their use, beside the computation.
    pub overlap_param_gather: bool,
    /// Whether gathered weights go after the forward pass, and are gathered again for the backward pass (stage 3).
    pub reshard_after_forward: bool,
}

impl Ranks {
    /// Whether a micro-batch's gradients are staged unit by unit, and the ranks have the sums of their pieces alone; else the
    /// arena of all gradients is the stage.
    pub(crate) fn stages_by_unit(&self) -> bool {
        self.zero >= Zero::Gradients
    }

    /// Whether all ranks get all sums of gradients.
    pub(crate) fn shares_sums(&self) -> bool {
        self.zero == Zero::Replicated
    }

    /// Whether every micro-batch is added up over ranks; else each rank adds up its own first, once a step over ranks.
    pub(crate) fn adds_every_micro_batch(&self) -> bool {
        self.reduce == Reduce::MicroBatch
    }

    /// This rank, of those that divide what is updated; the only one where each updates everything.
    pub fn updating(&self) -> Rank {
        match self.zero {
            Zero::Replicated => Rank::ALONE,
            Zero::States | Zero::Gradients | Zero::Weights => self.rank,
        }
    }
}

/// What ranks divide, each stage with what the one before divides (Rajbhandari et al. 2020). Written as its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Zero {
    /// Nothing: every rank has everything.
    Replicated,
    /// Optimizer states.
    States,
    /// Gradients.
    Gradients,
    /// Weights.
    Weights,
}

impl Zero {
    /// Every stage, in the order of their numbers.
    pub const ALL: [Zero; 4] = [
        Zero::Replicated,
        Zero::States,
        Zero::Gradients,
        Zero::Weights,
    ];

    /// Its number.
    pub fn stage(self) -> u8 {
        self as u8
    }
}

impl From<Zero> for u8 {
    fn from(zero: Zero) -> u8 {
        zero.stage()
    }
}

impl TryFrom<u8> for Zero {
    type Error = String;

    fn try_from(stage: u8) -> Result<Zero, String> {
        let zero = Zero::ALL.get(usize::from(stage)).copied();
        zero.ok_or_else(|| format!("{stage} is no stage of ZeRO; they are 0 to 3"))
    }
}

choices! {
    /// When gradients are added up over ranks.
    Reduce {
        /// After every micro-batch, which continues one sum in the order of micro-batches: the bits do not depend on how many
        /// ranks there are.
        MicroBatch = "micro-batch",
        /// Once a step: each rank adds up its own first. Sends less, with other bits.
        Step = "step",
    }
}
