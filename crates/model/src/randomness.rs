//! Where dropout's random numbers come from.

use kernels::random;

/// What tells the random numbers of one micro-batch from those of others. A mask is a function of these, of the layer and
/// of the site in it, so that a replay and a resumed run drop the same elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Randomness {
    /// The run's seed.
    pub seed: u64,
    /// The step, from 1.
    pub step: u64,
    /// The micro-batch within the step.
    pub micro_batch: u64,
}

/// Names the stream among those that the seed serves: the optimizer's rounding has others.
const DROPOUT: u32 = 0x6472_6f70;

impl Randomness {
    /// The key of the numbers of one site of the model.
    pub(crate) fn key(self, site: u64) -> u64 {
        let of_step = random::key(self.seed, self.step, DROPOUT);
        let of_micro_batch = random::key(of_step, self.micro_batch, DROPOUT);
        random::key(of_micro_batch, site, DROPOUT)
    }
}
