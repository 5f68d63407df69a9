//! The matrix products of a step on CUDA, for the rehearsal before the first one.

use crate::{Session, SessionError};
use data::{MicroBatch, Packing, StepBatch, padded_lengths};
use kernels::cuda::{Cuda, Gemm, LibraryAttention, Listing};
use settings::{Settings, StatesPlace};

/// What a step, and what is computed between steps, asks NVIDIA's libraries for, in order.
#[derive(Clone, Debug, Default)]
pub struct LibraryCalls {
    /// Matrix products, which are cuBLASLt's: first those of the step.
    pub products: Vec<Gemm>,
    /// How many of them are the step's.
    of_step: usize,
    /// Attention that is computed by cuDNN.
    pub attentions: Vec<LibraryAttention>,
}

impl LibraryCalls {
    /// The products that training takes. What runs between steps changes no bit of them, and may be other when a run goes on.
    pub fn products_of_step(&self) -> &[Gemm] {
        &self.products[..self.of_step]
    }
}

/// Lists what a step asks libraries for. Nothing is computed or allocated.
///
/// # Errors
/// [`SessionError::Config`] for settings that make no session.
pub fn library_calls(settings: &Settings) -> Result<LibraryCalls, SessionError> {
    let (memory, listing) = (Listing::memory(), Listing::of_rank(settings.member().0));
    let mut settings = settings.clone();
    // No product depends on where states are, and no file is to be made for this.
    if let StatesPlace::Disk(_) = settings.offload.states {
        settings.offload.states = StatesPlace::Pinned;
    }
    let kernels = Cuda::new(listing.clone(), &memory, settings.narrowest_dtype())?;
    let batch = shape_of_a_step(&settings, settings.seq);
    let mut session = Session::on_kernels(settings, &memory, Box::new(kernels))?;
    session.step(&batch)?;
    let of_step = listing.products().len();
    session.between_steps_on_shapes()?;
    Ok(LibraryCalls {
        products: listing.products(),
        of_step,
        attentions: listing.attentions(),
    })
}

/// The second micro-batch meets what the first leaves behind; later ones meet the same.
pub const MICRO_BATCHES_MAX: usize = 2;

/// A step of sequences of `seq` tokens, of at most [`MICRO_BATCHES_MAX`] micro-batches, with nothing in it: for sessions
/// that compute nothing. Those of other ranks have no rows.
pub fn shape_of_a_step(settings: &Settings, seq: usize) -> StepBatch {
    let (rank, size) = settings.member();
    let rows = |number: usize| match number % size == rank {
        true => settings.micro_batch,
        false => 0,
    };
    let numbers = 0..settings.accum.min(MICRO_BATCHES_MAX) * size;
    let micro = numbers.map(|number| shape_of_a_micro_batch(settings, rows(number), seq));
    StepBatch {
        micro: micro.collect(),
    }
}

/// The lengths of micro-batches, the longest first.
pub(crate) fn lengths(settings: &Settings) -> Vec<usize> {
    match settings.packing {
        Packing::Pad => {
            let mut lengths: Vec<usize> = padded_lengths(settings.seq).collect();
            lengths.reverse();
            lengths
        }
        Packing::Concatenate | Packing::FirstFit => vec![settings.seq],
    }
}

/// A micro-batch of `rows` sequences of `seq` tokens, with nothing in it.
pub fn shape_of_a_micro_batch(settings: &Settings, rows: usize, seq: usize) -> MicroBatch {
    MicroBatch {
        input_ids: vec![0; rows * seq],
        targets: vec![0; rows * seq],
        rows,
        seq,
        documents: (settings.packing == Packing::FirstFit).then(|| vec![0; rows * seq]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use settings::Config;
    use std::collections::HashSet;

    /// A product by sizes alone, with whether it is added to something.
    fn sizes(gemms: &[Gemm]) -> HashSet<([usize; 3], bool)> {
        let of = |gemm: &Gemm| (gemm.sizes, gemm.init.is_some());
        gemms.iter().map(of).collect()
    }

    /// Those of gate and up, which are one, and of what follows them: forward with tokens, backward with its data and its weight; weight gradients of the
    /// second micro-batch are added to those of the first.
    #[test]
    fn all_products_of_a_linear_layer_are_listed() {
        let mut config = Config::default();
        (config.model.hidden, config.model.ffn) = (64, 176);
        config.batch.accum = 3;
        let settings = Settings::new(&config).unwrap();
        let gemms = library_calls(&settings).unwrap().products;
        let tokens = settings.micro_batch * settings.seq;
        let listed = sizes(&gemms);
        for expected in [
            ([tokens, 64, 352], false),
            ([tokens, 176, 64], true),
            ([352, tokens, 64], false),
            ([352, tokens, 64], true),
        ] {
            assert!(listed.contains(&expected), "{expected:?} of {listed:?}");
        }
        let once = Settings {
            accum: 1,
            ..settings
        };
        let of_one = library_calls(&once).unwrap().products;
        assert_eq!(gemms.len(), 2 * of_one.len());
        assert!(!sizes(&of_one).contains(&([352, tokens, 64], true)));
    }

    /// What a run does between steps is rehearsed, and leaves the name of what its steps compute as it is.
    #[test]
    fn products_of_the_step_are_those_of_a_run_with_nothing_between_steps() {
        let mut config = Config::default();
        (config.eval.every, config.eval.micro_batch) = (Some(1), Some(1));
        let evaluating = library_calls(&Settings::new(&config).unwrap()).unwrap();
        config.eval.every = None;
        let alone = library_calls(&Settings::new(&config).unwrap()).unwrap();
        let all_of = |gemms: &[Gemm]| format!("{gemms:?}");
        assert!(evaluating.products.len() > alone.products.len());
        assert_eq!(
            all_of(evaluating.products_of_step()),
            all_of(&alone.products)
        );
    }
}
