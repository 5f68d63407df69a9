//! How the ranks that train together divide weights, gradients and states.

use choices::choices;
use memory::Rank;
use serde::{Deserialize, Serialize};

/// The ranks that train together, and how they divide their work. Rank `r` of `n` gets the micro-batches `a * n + r` of
/// a step. In a pipeline each stage has `n` ranks, and stage `s` has the ranks from `s * n` on.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranks {
    /// This rank's number in its stage, and how many the stage has. A single rank adds up its gradients in the same way as many.
    pub rank: Rank,
    /// This rank's stage of the pipeline; [`Rank::ALONE`] without one.
    pub stage: Rank,
    /// How many neighbouring ranks share each sequence, each with parts of its tokens.
    pub sharing: usize,
    /// How many neighbouring parts of each sequence a rank has. A part counts as a micro-batch.
    pub parts_each: usize,
    /// What is divided among ranks.
    pub zero: Zero,
    /// The most bytes that a rank receives at a time to add up, from all ranks together.
    pub bucket_bytes: usize,
    /// When gradients are added up over ranks.
    pub reduce: Reduce,
    /// Whether gradients are exchanged beside the backward pass.
    pub overlap_grad_reduce: bool,
    /// Whether weights are gathered ahead of their use, beside the computation.
    pub overlap_param_gather: bool,
    /// Whether gathered weights are dropped after the forward pass, and gathered again for the backward pass (ZeRO 3).
    pub reshard_after_forward: bool,
    /// How many neighbouring ranks have all weights together (ZeRO 3); none: all ranks of the stage.
    pub shard_group: Option<usize>,
}

impl Ranks {
    /// This rank among those of all stages.
    pub fn of_all(&self) -> Rank {
        Rank {
            number: self.in_stage(self.stage.number),
            of: self.stage.of * self.rank.of,
        }
    }

    /// The number, among all ranks, of the one that has this rank's place in another stage.
    pub fn in_stage(&self, stage: usize) -> usize {
        stage * self.rank.of + self.rank.number
    }

    /// The number, among all ranks, of the first rank of this stage.
    pub fn first_of_stage(&self) -> usize {
        self.stage.number * self.rank.of
    }

    /// This rank among those that share its sequences.
    pub fn of_sharing(&self) -> Rank {
        Rank {
            number: self.rank.number % self.sharing,
            of: self.sharing,
        }
    }

    /// Whether own gradients are leased unit by unit, once for each part of a sequence, and a rank keeps the sums of its pieces apart.
    /// Otherwise an arena has all own gradients. Stages of ZeRO below 2 lease them if there are several parts, since each would take
    /// an arena.
    pub(crate) fn leases_gradients(&self) -> bool {
        self.zero >= Zero::Gradients || self.parts_each > 1
    }

    /// Whether all ranks get the sums of all gradients.
    pub(crate) fn shares_sums(&self) -> bool {
        self.zero == Zero::Replicated
    }

    /// Whether every micro-batch is added up over ranks. Otherwise each rank first adds up its own, and ranks add up
    /// once a step.
    pub(crate) fn adds_every_micro_batch(&self) -> bool {
        self.reduce == Reduce::MicroBatch
    }

    /// This rank among those that divide the update; [`Rank::ALONE`] if every rank updates everything.
    pub fn updating(&self) -> Rank {
        match self.zero {
            Zero::Replicated => Rank::ALONE,
            Zero::States | Zero::Gradients | Zero::Weights => self.rank,
        }
    }
}

/// The stages of ZeRO (Rajbhandari et al. 2020), by what ranks divide: each stage divides also what the one before
/// does. Written as its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Zero {
    /// Nothing is divided: every rank has everything.
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
        /// After every micro-batch: each is added to the same sum, in the order of micro-batches, so the bits do not
        /// depend on the number of ranks.
        MicroBatch = "micro-batch",
        /// Once a step: each rank first adds up its own. This sends less, with other bits.
        Step = "step",
    }
}
