//! What a key may be for: a run that has nothing of it has no use for the key.

use super::error::ConfigError;
use super::key::Key;
use super::schema::Config;
use memory::{Home, Homes};
use optim::{OptimizerKind, ScheduleKind};
use units::Zero;

/// What a key is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Need {
    /// An automatic choice of what to recompute.
    Auto,
    /// Evaluations while training.
    Evaluations,
    /// Checkpoints between steps.
    Checkpoints,
    /// Ranks that train together.
    Ranks,
    /// Weights that ranks gather.
    GatheredWeights,
    /// Weights that ranks divide.
    DividedWeights,
    /// This optimizer.
    Optimizer(OptimizerKind),
    /// A learning rate that falls.
    FallingRate,
    /// Updates of what is offloaded.
    OffloadedUpdates,
    /// Optimizer states that are offloaded.
    OffloadedStates,
    /// Weights that are offloaded.
    OffloadedWeights,
}

/// What becomes of a key whose need a run has nothing of.
pub(crate) enum Without {
    /// A warning, with what the key is for: another setting of the same command line may have taken its place.
    Warning(&'static str),
    /// An error, with what is wrong and what to add.
    Error(String, String),
}

impl Need {
    fn is_met(self, config: &Config, homes: &Homes) -> bool {
        match self {
            Need::Auto => config.chooses(),
            Need::Evaluations => config.eval.every.is_some(),
            Need::Checkpoints => config.checkpoint.interval().is_some(),
            Need::Ranks => config.zero().is_some(),
            Need::GatheredWeights => config.zero() >= Some(Zero::States),
            Need::DividedWeights => config.zero() >= Some(Zero::Weights),
            Need::Optimizer(kind) => config.optim.kind == kind,
            Need::FallingRate => config.lr.schedule != ScheduleKind::Constant,
            Need::OffloadedUpdates => homes.streams_updates(),
            Need::OffloadedStates => homes.states != Home::Device,
            Need::OffloadedWeights => homes.weights != Home::Device,
        }
    }

    /// What to say where it is not met.
    pub(crate) fn without(self, config: &Config) -> Without {
        let error = |wrong: &str, add: &str| Without::Error(wrong.into(), add.into());
        match self {
            Need::Auto => Without::Warning("--recompute auto"),
            Need::Evaluations => Without::Warning("--eval-every"),
            Need::Checkpoints => Without::Warning("--save-every"),
            Need::Ranks => {
                Without::Warning("several ranks, under mpirun, srun or torchrun, or for --zero")
            }
            Need::GatheredWeights => {
                Without::Warning("ranks that gather weights, from --zero 1 on")
            }
            Need::DividedWeights => Without::Warning("--zero 3"),
            Need::Optimizer(kind) => Without::Error(
                format!(
                    "is a number of {kind}, and the optimizer is {}",
                    config.optim.kind
                ),
                format!("--optimizer {kind}"),
            ),
            Need::FallingRate => error(
                "says how the learning rate falls, and the schedule is constant",
                "--schedule linear, cosine or wsd",
            ),
            Need::OffloadedUpdates => error(
                "says how what is offloaded is updated, and nothing is",
                "--offload-optimizer pinned",
            ),
            Need::OffloadedStates => error(
                "says how much of the optimizer's states is offloaded, and none of it is",
                "--offload-optimizer pinned",
            ),
            Need::OffloadedWeights => error(
                "says how many units of offloaded weights are on the device, and weights are not offloaded",
                "--offload-parameters pinned",
            ),
        }
    }

    /// The keys that decide whether it is met; none where a key without it is a warning.
    fn decided_by(self) -> &'static [&'static str] {
        match self {
            Need::Optimizer(_) => &["optim.kind"],
            Need::FallingRate => &["lr.schedule"],
            Need::OffloadedUpdates | Need::OffloadedStates | Need::OffloadedWeights => &[
                "offload.optimizer",
                "offload.parameters",
                "offload.gradients",
            ],
            _ => &[],
        }
    }
}

impl Config {
    /// Keys that are set to something else than their defaults, and what they need, where the run has nothing of it.
    ///
    /// # Errors
    /// Places of the optimizer's states that contradict.
    pub(crate) fn set_in_vain(&self) -> Result<Vec<(&'static Key, Need)>, ConfigError> {
        let homes = self.homes()?;
        let set = self.differences(&Config::default())?.into_iter();
        let in_vain = set.filter_map(|(key, ..)| {
            let lacking = key.needs.filter(|need| !need.is_met(self, &homes))?;
            Some((key, lacking))
        });
        Ok(in_vain.collect())
    }

    /// Keys that are set and have no effect, each with what they are for.
    pub fn unused(&self) -> Vec<(&'static str, &'static str)> {
        let in_vain = self.set_in_vain().unwrap_or_default().into_iter();
        let unused = in_vain.filter_map(|(key, need)| match need.without(self) {
            Without::Warning(what) => Some((key.name, what)),
            Without::Error(..) => None,
        });
        let offload = (self.chooses_offload() && !self.chooses())
            .then_some(("offload.activations auto", "--recompute auto"));
        unused.chain(offload).collect()
    }

    /// Refuses keys that say something of what the run does not have.
    ///
    /// # Errors
    /// The first such key, with what to add.
    pub(crate) fn refuse_in_vain(&self) -> Result<(), ConfigError> {
        for (key, need) in self.set_in_vain()? {
            if let Without::Error(wrong, add) = need.without(self) {
                return Err(ConfigError::Contradiction(format!(
                    "`{}` {wrong}; add {add}, or leave it out",
                    key.name
                )));
            }
        }
        Ok(())
    }

    /// Keys of a file that an argument of the command line left without what they need: `is_set` says which keys it sets.
    pub(crate) fn left_without_need(&self, is_set: impl Fn(&str) -> bool) -> Vec<&'static Key> {
        let in_vain = self.set_in_vain().unwrap_or_default().into_iter();
        let left = in_vain.filter(|(key, need)| {
            !is_set(key.name) && need.decided_by().iter().any(|key| is_set(key))
        });
        left.map(|(key, _)| key).collect()
    }
}
