//! The feature that a key needs. Without it, the key has no effect.

use super::choices::{BaseType, FloatType, Fp8Recipe, Objective};
use super::device::Device;
use super::error::ConfigError;
use super::kernel_choice::KernelFamily;
use super::key::Key;
use super::schedule::PipelineSchedule;
use super::schema::Config;
use crate::Result;
use data::Inputs;
use memory::{Home, Homes};
use model::{ActivationFunction, PositionKind};
use optim::{MomentFormat, OptimizerKind, ScheduleKind};
use units::Zero;

/// The condition under which a key has an effect, and what happens otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    is_met: fn(&Config, &Homes) -> bool,
    without: Without,
}

/// What happens to a key whose need is not met.
#[derive(Clone, Copy, Debug)]
enum Without {
    /// A warning, with what the key is for. Another setting of the same command line may have removed the need.
    Warning(&'static str),
    /// An error, with what is wrong and what to add. But if the command line sets one of these keys, the file's value
    /// of the key is dropped instead.
    Error(&'static str, &'static str, &'static [&'static str]),
}

use Without::{Error, Warning};

const PLACES: &[&str] = &[
    "offload.optimizer",
    "offload.parameters",
    "offload.gradients",
];

/// The needs that rows name.
#[rustfmt::skip]
mod rows {
    use super::*;

    pub(crate) const AUTO: Need = need(|run, _| run.chooses(), Warning("--recompute auto"));
    pub(crate) const EVALUATIONS: Need = need(|run, _| run.eval.every.is_some(), Warning("--eval-every"));
    pub(crate) const CHECKPOINTS: Need = need(|run, _| run.checkpoint.interval().is_some(), Warning("--save-every"));
    pub(crate) const RANKS: Need = need(|run, _| run.zero().is_some(),
        Warning("several ranks, under mpirun, srun or torchrun, or for --zero"));
    pub(crate) const GATHERED_WEIGHTS: Need = need(|run, _| run.zero() >= Some(Zero::States),
        Warning("ranks that gather weights, from --zero 1 on"));
    pub(crate) const DIVIDED_WEIGHTS: Need = need(|run, _| run.zero() >= Some(Zero::Weights), Warning("--zero 3"));
    pub(crate) const UNITS: Need = need(
        |run, homes| homes.weights != Home::Device || homes.gradients == Home::Pinned || run.zero() >= Some(Zero::Gradients),
        Warning("weights or gradients that come and go: --zero 2 or 3, --offload-parameters, --offload-gradients"));
    pub(crate) const DELTA: Need = need(|run, _| run.model.delta.is_some(), Warning("layers of the gated delta rule (model.delta)"));
    pub(crate) const LORA: Need = need(|run, _| run.lora.rank.is_some(),
        Error("says what adapters are like, and there are none", "--lora RANK", &["lora.rank"]));
    pub(crate) const FP8: Need = need(|run, _| run.fp8.recipe != Fp8Recipe::Off,
        Error("says how products in FP8 are made, and fp8.recipe is off", "--fp8 tensor", &["fp8.recipe"]));
    pub(crate) const PIPELINE: Need = need(|run, _| run.parallel.pipeline > 1,
        Error("says how stages of a pipeline work, and there is one", "--pp N", &["parallel.pipeline"]));
    pub(crate) const INTERLEAVED: Need = need(|run, _| run.parallel.schedule == PipelineSchedule::Interleaved,
        Error("says how many blocks interleaved stages take in turn, and parallel.schedule is another", "--pipeline-schedule interleaved",
            &["parallel.schedule"]));
    pub(crate) const DPO: Need = need(|run, _| run.train.objective == Objective::Dpo,
        Error("says how preferences are learnt, and train.objective is another", "--objective dpo", &["train.objective"]));
    pub(crate) const MUON: Need = need(|run, _| run.optim.kind == OptimizerKind::Muon,
        Error("is a number of muon, which is not the optimizer", "--optimizer muon", &["optim.kind"]));
    pub(crate) const ADAFACTOR: Need = need(|run, _| run.optim.kind == OptimizerKind::Adafactor,
        Error("is a number of adafactor, which is not the optimizer", "--optimizer adafactor", &["optim.kind"]));
    pub(crate) const FALLING_RATE: Need = need(|run, _| run.lr.schedule != ScheduleKind::Constant,
        Error("says how the learning rate falls, and the schedule is constant", "--schedule linear, cosine or wsd", &["lr.schedule"]));
    pub(crate) const OFFLOADED_UPDATES: Need = need(|_, homes| homes.streams_updates(),
        Error("says how what is offloaded is updated, and nothing is", "--offload-optimizer pinned", PLACES));
    pub(crate) const OFFLOADED_STATES: Need = need(|_, homes| homes.states != Home::Device,
        Error("says how much of the optimizer's states is offloaded, and none of it is", "--offload-optimizer pinned", &["offload.optimizer"]));
    pub(crate) const OFFLOADED_WEIGHTS: Need = need(|_, homes| homes.weights != Home::Device,
        Error("says how many units of offloaded weights are on the device, and weights are not offloaded",
            "--offload-parameters pinned", &["offload.parameters"]));

    pub(crate) const DATA: Need = need(|run, _| run.data.path.is_some(), Warning("--data"));
    pub(crate) const FALLING_MINIMUM: Need = need(|run, _| run.lr.schedule != ScheduleKind::Constant,
        Warning("--schedule linear, cosine or wsd"));
    pub(crate) const MOMENTS: Need = need(|run, _| run.optim.kind != OptimizerKind::Adafactor, Warning("--optimizer adamw and muon"));
    pub(crate) const EIGHT_BITS: Need = need(|run, _| run.optim.state_dtype == MomentFormat::Quantised, Warning("--state-dtype 8bit"));
    pub(crate) const BF16_WEIGHTS: Need = need(|run, _| run.dtype() == FloatType::Bf16, Warning("bf16 weights (--dtype bf16)"));
    pub(crate) const GPU: Need = need(|run, _| run.device() != Device::Cpu, Warning("--device cuda"));
    pub(crate) const BF16_EXPERTS: Need = need(|run, _| KernelFamily::Experts.has_sm90(run), Warning("experts in bf16"));
    pub(crate) const BF16_FLASH: Need = need(|run, _| KernelFamily::Attention.has_sm90(run),
        Warning("flash attention in bf16 with heads wider than 32"));
    pub(crate) const CODES: Need = need(|run, _| matches!(run.lora.base_dtype, Some(BaseType::EightBit | BaseType::Nf4 | BaseType::Mxfp4)),
        Warning("--base-dtype 8bit, nf4 and mxfp4"));
    pub(crate) const NEXT_TOKENS: Need = need(|run, _| run.train.objective == Objective::NextToken,
        Warning("--objective next-token: preferences and policies are learnt without dropout"));
    pub(crate) const BALANCE: Need = need(|run, _| run.model.router_aux > 0.0, Warning("model.router_aux above 0"));
    pub(crate) const QK_NORM: Need = need(|run, _| run.model.qk_norm, Warning("model.qk_norm"));
    pub(crate) const CLAMPED_SWIGLU: Need = need(|run, _| run.model.activation == ActivationFunction::ClampedSwiglu,
        Warning("model.activation clamped_swiglu"));
    pub(crate) const ROTARY: Need = need(|run, _| run.model.positions == PositionKind::Rotary, Warning("rotary positions"));
    pub(crate) const SAMPLES: Need = need(|run, _| run.log.sample_every.is_some(), Warning("--sample-every"));

    const fn need(is_met: fn(&Config, &Homes) -> bool, without: Without) -> Need {
        Need { is_met, without }
    }
}
pub(crate) use rows::*;

impl Config {
    /// Keys that differ from their defaults although their needs are not met, and how to treat each.
    fn set_in_vain(&self) -> Result<Vec<(&'static Key, Without)>> {
        let homes = self.homes()?;
        let set = self.differences(&Config::default())?.into_iter();
        let in_vain = set.filter_map(|(key, ..)| {
            let mut needs = key.needs.into_iter().flatten();
            let unmet = needs.find(|need| !(need.is_met)(self, &homes))?;
            Some((key, unmet.without))
        });
        Ok(in_vain.collect())
    }

    /// Keys that are set without effect, each with what it is for: those that are warned of, and those that are refused.
    pub fn in_vain(&self) -> Vec<(&'static str, &'static str)> {
        let in_vain = self.set_in_vain().unwrap_or_default().into_iter();
        let named = in_vain.map(|(key, Warning(what) | Error(_, what, _))| (key.name, what));
        named.collect()
    }

    /// What is set without effect and not refused, each with what it is for.
    pub fn allowed_in_vain(&self) -> Vec<(&'static str, &'static str)> {
        let in_vain = self.set_in_vain().unwrap_or_default().into_iter();
        let allowed = in_vain.filter_map(|(key, without)| match without {
            Warning(what) => Some((key.name, what)),
            Error(..) => None,
        });
        let offload = (self.chooses_offload() && !self.chooses())
            .then_some(("offload.activations auto", "--recompute auto"));
        let inputs = self.data.path.iter().flat_map(Inputs::weights);
        let weight = (inputs.count() == 1).then_some((
            "the weight of data.path",
            "several inputs, which it mixes, and there is one",
        ));
        allowed.chain(offload).chain(weight).collect()
    }

    /// Refuses keys whose needs are not met, if that is an error.
    ///
    /// # Errors
    /// For the first such key, with what to add.
    pub(crate) fn refuse_in_vain(&self) -> Result {
        for (key, without) in self.set_in_vain()? {
            if let Error(wrong, add, _) = without {
                return Err(ConfigError::Contradiction(format!(
                    "`{}` {wrong}; add {add}, or leave it out",
                    key.name
                )));
            }
        }
        Ok(())
    }

    /// Keys of a file whose needs the command line has removed. `sets` reports whether it sets a key.
    pub(crate) fn left_in_vain(&self, sets: impl Fn(&str) -> bool) -> Vec<&'static Key> {
        let in_vain = self.set_in_vain().unwrap_or_default().into_iter();
        let left = in_vain.filter(|(key, without)| match without {
            Warning(_) => false,
            Error(.., decided_by) => !sets(key.name) && decided_by.iter().any(|key| sets(key)),
        });
        left.map(|(key, _)| key).collect()
    }
}
