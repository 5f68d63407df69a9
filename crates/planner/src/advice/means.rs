//! What may make a run smaller, as rungs of the advice.

use super::Setup;
use crate::changes::{
    Change, block_inputs_on_host, computed_in_bf16, divided, eight_bit_moments, flash_attention,
    gradients_on_host, narrow_gradients, recompute_anew, recompute_specs, recompute_too,
    released_gradients, shorter_sequences, smaller_micro_batch, split_master, states_on_host,
    tiles, weights_on_host,
};
use kernels::Target;
use settings::Settings;
use units::Zero;

/// A kind of change; where several cost the same, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Means {
    SmallerMicroBatch,
    Bf16,
    Label(&'static str),
    Spec(String),
    Flash,
    EightBitMoments,
    SplitMaster,
    NarrowGradients,
    Divided(Zero),
    InputsOnHost,
    StatesOnHost,
    WeightsOnHost,
    GradientsOnHost,
    Tiles,
    ReleasedGradients,
    ShorterSequences,
}

impl Means {
    pub(super) fn all(settings: &Settings) -> Vec<Means> {
        let specs = recompute_specs(&settings.policy).into_iter();
        let full = specs
            .filter(|spec| spec.starts_with("full"))
            .map(Means::Spec);
        let first = [Means::SmallerMicroBatch, Means::Bf16].into_iter();
        let labels = settings.policy.labels();
        let labels = labels.named().map(|label| Means::Label(label.name()));
        let last = [
            Means::Flash,
            Means::EightBitMoments,
            Means::SplitMaster,
            Means::NarrowGradients,
            Means::Divided(Zero::States),
            Means::Divided(Zero::Gradients),
            Means::Divided(Zero::Weights),
            Means::InputsOnHost,
            Means::StatesOnHost,
            Means::WeightsOnHost,
            Means::GradientsOnHost,
            Means::Tiles,
            Means::ReleasedGradients,
            Means::ShorterSequences,
        ];
        first.chain(labels).chain(full).chain(last).collect()
    }

    /// What it would change of a run.
    pub(super) fn change(
        &self,
        Setup { config, settings }: &Setup,
        target: Target,
    ) -> Option<Change> {
        match self {
            Means::SmallerMicroBatch => smaller_micro_batch(settings),
            Means::Bf16 => computed_in_bf16(settings),
            Means::Label(label) => recompute_too(config, settings, label),
            Means::Spec(spec) => recompute_anew(config, settings, spec),
            Means::Flash => flash_attention(settings),
            Means::EightBitMoments => eight_bit_moments(settings),
            Means::SplitMaster => split_master(settings),
            Means::NarrowGradients => narrow_gradients(settings),
            Means::Divided(zero) => divided(settings, *zero),
            Means::InputsOnHost => block_inputs_on_host(settings, target),
            Means::StatesOnHost => states_on_host(settings, target),
            Means::WeightsOnHost => weights_on_host(settings, target),
            Means::GradientsOnHost => gradients_on_host(settings, target),
            Means::Tiles => tiles(config, settings),
            Means::ReleasedGradients => released_gradients(settings),
            Means::ShorterSequences => shorter_sequences(config, settings),
        }
    }

    /// Whether it takes host memory.
    pub(super) fn is_on_host(&self) -> bool {
        matches!(
            self,
            Means::InputsOnHost
                | Means::StatesOnHost
                | Means::WeightsOnHost
                | Means::GradientsOnHost
        )
    }

    /// Whether the model learns something else, whatever that costs: shorter sequences, or no clipping.
    pub(super) fn is_last(&self) -> bool {
        matches!(self, Means::ReleasedGradients | Means::ShorterSequences)
    }

    /// How often it may help: halves have halves.
    pub(super) fn times(&self, settings: &Settings) -> usize {
        match self {
            Means::SmallerMicroBatch => settings.micro_batch.ilog2() as usize,
            Means::ShorterSequences => settings.seq.ilog2() as usize,
            _ => 1,
        }
    }

    /// The same in words, once it is made.
    pub(super) fn words(&self, made: &Settings) -> String {
        let (micro, accum, seq) = (made.micro_batch, made.accum, made.seq);
        match self {
            Means::SmallerMicroBatch => format!("micro-batches of {micro}, {accum} a step"),
            Means::Bf16 => "computed in bf16".into(),
            Means::Label(label) => format!("{label} recomputed"),
            Means::Spec(spec) => format!("recompute {spec}"),
            Means::Flash => "flash attention".into(),
            Means::EightBitMoments => "8-bit moments".into(),
            Means::SplitMaster => "an exact master in 16 bits more".into(),
            Means::NarrowGradients => "gradients in bf16".into(),
            Means::Divided(zero) => {
                let what = match zero {
                    Zero::Replicated | Zero::States => "optimizer states",
                    Zero::Gradients => "gradients too",
                    Zero::Weights => "weights too",
                };
                format!("{what} divided among ranks (--zero {})", zero.stage())
            }
            Means::InputsOnHost => "recompute full, block inputs on the host".into(),
            Means::StatesOnHost => "optimizer states on the host".into(),
            Means::WeightsOnHost => "weights on the host".into(),
            Means::GradientsOnHost => "gradients on the host".into(),
            Means::Tiles => {
                let tile = made.tile_tokens.unwrap_or_default();
                format!("recompute full, in tiles of {tile} tokens")
            }
            Means::ReleasedGradients => {
                "gradients released in the backward pass, no clipping".into()
            }
            Means::ShorterSequences => format!("sequences of {seq}, {accum} micro-batches a step"),
        }
    }
}
