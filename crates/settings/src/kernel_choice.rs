//! Which kernels a configuration takes, where there are several kinds.

use super::attention::attention;
use super::choices::{FloatType, KernelChoice};
use super::error::refused;
use super::schema::Config;
use crate::Result;
use kernels::cuda::{KernelKind, flash_has_sm90};
use model::Attention;
use serde::{Deserialize, Serialize};
use std::ops::{Index, IndexMut};

/// Operations that have several kinds of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelFamily {
    /// Flash attention in bf16.
    Attention,
    /// Products of experts in bf16.
    Experts,
}

/// Something for each [`KernelFamily`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerFamily<T> {
    /// For [`KernelFamily::Attention`].
    pub attention: T,
    /// For [`KernelFamily::Experts`].
    pub experts: T,
}

impl<T> PerFamily<T> {
    /// Makes both.
    pub fn new(make: impl Fn(KernelFamily) -> T) -> PerFamily<T> {
        PerFamily {
            attention: make(KernelFamily::Attention),
            experts: make(KernelFamily::Experts),
        }
    }
}

impl PerFamily<KernelKind> {
    /// Kernels that every GPU runs.
    pub const SM80: PerFamily<KernelKind> = PerFamily {
        attention: KernelKind::Sm80,
        experts: KernelKind::Sm80,
    };
}

impl<T> Index<KernelFamily> for PerFamily<T> {
    type Output = T;

    fn index(&self, family: KernelFamily) -> &T {
        match family {
            KernelFamily::Attention => &self.attention,
            KernelFamily::Experts => &self.experts,
        }
    }
}

impl<T> IndexMut<KernelFamily> for PerFamily<T> {
    fn index_mut(&mut self, family: KernelFamily) -> &mut T {
        match family {
            KernelFamily::Attention => &mut self.attention,
            KernelFamily::Experts => &mut self.experts,
        }
    }
}

impl From<KernelKind> for KernelChoice {
    fn from(kind: KernelKind) -> KernelChoice {
        match kind {
            KernelKind::Sm80 => KernelChoice::Sm80,
            KernelKind::Sm90 => KernelChoice::Sm90,
        }
    }
}

impl KernelChoice {
    /// The kind that is named; none for `auto`.
    pub fn kind(self) -> Option<KernelKind> {
        match self {
            KernelChoice::Auto => None,
            KernelChoice::Sm80 => Some(KernelKind::Sm80),
            KernelChoice::Sm90 => Some(KernelKind::Sm90),
        }
    }
}

/// The latest kind that a GPU of this compute capability runs.
pub fn latest_kind(capability: (i32, i32)) -> KernelKind {
    match capability {
        (9, 0) => KernelKind::Sm90,
        _ => KernelKind::Sm80,
    }
}

impl KernelFamily {
    /// All of them.
    pub const ALL: [KernelFamily; 2] = [KernelFamily::Attention, KernelFamily::Experts];

    /// The name, in keys and records.
    pub fn name(self) -> &'static str {
        match self {
            KernelFamily::Attention => "attention",
            KernelFamily::Experts => "experts",
        }
    }

    /// The key that says which kernels compute them.
    pub fn key(self) -> &'static str {
        match self {
            KernelFamily::Attention => "attention.kernels",
            KernelFamily::Experts => "experts.kernels",
        }
    }

    /// What a configuration says of their kernels.
    pub fn choice(self, config: &Config) -> KernelChoice {
        match self {
            KernelFamily::Attention => config.attention.kernels,
            KernelFamily::Experts => config.experts.kernels,
        }
    }

    /// Whether kernels for 9.0 compute something in a configuration, on a GPU that runs them.
    pub fn has_sm90(self, config: &Config) -> bool {
        let (model, dtype) = (&config.model, config.dtype());
        match self {
            KernelFamily::Attention => {
                let shape = model.attention(0).shape(1, 1);
                attention(config) == Attention::Flash && flash_has_sm90(shape, dtype.into())
            }
            KernelFamily::Experts => model.experts.is_some() && dtype == FloatType::Bf16,
        }
    }

    /// What a configuration says of their kernels; kernels for 8.0 where there are no others.
    pub fn effective_choice(self, config: &Config) -> KernelChoice {
        match self.has_sm90(config) {
            true => self.choice(config),
            false => KernelChoice::Sm80,
        }
    }

    /// The kernels that a configuration takes on a GPU of this compute capability; none for experts that the model does not have.
    /// `before` are those of the run that goes on, which `auto` keeps to where the GPU runs them.
    pub fn kernels(
        self,
        config: &Config,
        capability: (i32, i32),
        before: Option<KernelKind>,
    ) -> Option<KernelKind> {
        if self == KernelFamily::Experts && config.model.experts.is_none() {
            return None;
        }
        if !self.has_sm90(config) {
            return Some(KernelKind::Sm80);
        }
        let latest = latest_kind(capability);
        let runs = |kind: &KernelKind| *kind == KernelKind::Sm80 || *kind == latest;
        let kept = self.choice(config).kind().or(before).filter(runs);
        Some(kept.unwrap_or(latest))
    }
}

/// Refuses kernels that a device does not run. `gpu` has its name and its compute capability; none is the CPU.
///
/// # Errors
/// [`ConfigError::Contradiction`](crate::ConfigError::Contradiction) with what to do.
pub fn check_kernels(config: &Config, gpu: Option<(&str, (i32, i32))>) -> Result {
    let has = match gpu {
        Some((_, capability)) if latest_kind(capability) == KernelKind::Sm90 => return Ok(()),
        Some((name, (major, minor))) => format!("{name} has {major}.{minor}"),
        None => "this run is on the processor".into(),
    };
    let named = |family: &KernelFamily| family.choice(config) == KernelChoice::Sm90;
    match KernelFamily::ALL.into_iter().find(named) {
        Some(family) => refused(format!(
            "{} is sm90, which GPUs of compute capability 9.0 run (H100, H200), and {has}; leave it at auto, which \
             takes what the device runs",
            family.key()
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of two kinds of operations that 9.0 has kernels for, changed by `set`.
    fn config(set: &[&str]) -> Config {
        let both = [
            "model.experts={count=4,chosen=2,ffn=16,normed=true}",
            "model.head_dim=64",
            "attention.backend=flash",
            "train.dtype=bf16",
        ];
        let set: Vec<String> = both.iter().chain(set).map(ToString::to_string).collect();
        Config::default().with(&set).unwrap()
    }

    #[test]
    fn a_run_keeps_to_its_kernels_where_the_gpu_has_them() {
        use KernelKind::{Sm80, Sm90};
        for family in KernelFamily::ALL {
            let named = |kernels: &str| format!("{}={kernels}", family.key());
            let [auto, sm80, sm90] = ["auto", "sm80", "sm90"].map(named);
            for (set, capability, before, kind) in [
                (auto.as_str(), (9, 0), None, Sm90),
                (&auto, (8, 0), None, Sm80),
                (&auto, (10, 0), None, Sm80),
                (&auto, (9, 0), Some(Sm80), Sm80),
                (&auto, (9, 0), Some(Sm90), Sm90),
                (&auto, (8, 0), Some(Sm90), Sm80),
                (&sm80, (9, 0), Some(Sm90), Sm80),
                (&sm90, (9, 0), Some(Sm80), Sm90),
                ("train.dtype=f32", (9, 0), None, Sm80),
            ] {
                let taken = family.kernels(&config(&[set]), capability, before);
                assert_eq!(taken, Some(kind), "{set:?} {capability:?} {before:?}");
            }
        }
    }

    /// Attention has others for wide heads that it computes fused, and a model without experts has no kernels of them.
    #[test]
    fn what_has_no_other_kernels_keeps_those_for_8_0() {
        let taken = |set: &[&str]| {
            let config = config(set);
            KernelFamily::ALL.map(|family| family.kernels(&config, (9, 0), None))
        };
        let [sm80, sm90] = [KernelKind::Sm80, KernelKind::Sm90].map(Some);
        for (set, expected) in [
            (&[][..], [sm90, sm90]),
            (&["model.head_dim=34"], [sm90, sm90]),
            (&["model.head_dim=32"], [sm80, sm90]),
            (&["attention.backend=eager"], [sm80, sm90]),
        ] {
            assert_eq!(taken(set), expected, "{set:?}");
        }
        let dense =
            KernelFamily::ALL.map(|family| family.kernels(&Config::default(), (9, 0), None));
        assert_eq!(dense, [sm80, None]);
    }

    #[test]
    fn kernels_for_hopper_are_refused_elsewhere() {
        let refusal = |family: KernelFamily, kernels: &str, gpu| {
            let config = Config::default().with(&[format!("{}={kernels}", family.key())]);
            let checked = check_kernels(&config.unwrap(), gpu);
            checked.err().map(|error| error.to_string())
        };
        let [ampere, hopper, later] =
            [(8, 0), (9, 0), (10, 0)].map(|capability| Some(("the GPU", capability)));
        for family in KernelFamily::ALL {
            for gpu in [None, ampere, hopper, later] {
                for kernels in ["auto", "sm80"] {
                    assert_eq!(refusal(family, kernels, gpu), None, "{kernels} {gpu:?}");
                }
            }
            assert_eq!(refusal(family, "sm90", hopper), None);
            for (gpu, words) in [
                (None, "this run is on the processor; leave it at auto"),
                (ampere, "the GPU has 8.0; leave it at auto"),
                (later, "the GPU has 10.0"),
            ] {
                let said = refusal(family, "sm90", gpu).unwrap();
                assert!(
                    said.starts_with(family.key()) && said.contains(words),
                    "{said}"
                );
            }
        }
    }
}
