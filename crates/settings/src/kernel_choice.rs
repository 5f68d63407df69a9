//! Which kernels a configuration takes, where there are several kinds.

use super::choices::{FloatType, KernelChoice};
use super::error::refused;
use super::schema::Config;
use crate::Result;
use kernels::cuda::KernelKind;

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

/// The kernels of experts that a configuration takes on a GPU of this compute capability; none without experts. `before` are those
/// of the run that goes on, which `auto` keeps to where the GPU runs them.
pub fn kernels_of_experts(
    config: &Config,
    capability: (i32, i32),
    before: Option<KernelKind>,
) -> Option<KernelKind> {
    config.model.experts.as_ref()?;
    if config.dtype() != FloatType::Bf16 {
        return Some(KernelKind::Sm80);
    }
    let latest = latest_kind(capability);
    let runs = |kind: &KernelKind| *kind == KernelKind::Sm80 || *kind == latest;
    let kept = config.experts.kernels.kind().or(before).filter(runs);
    Some(kept.unwrap_or(latest))
}

/// Refuses kernels for 9.0 where there are none, whatever the device.
pub(crate) fn built(config: &Config) -> Result {
    match config.attention.kernels {
        KernelChoice::Sm90 => refused(
            "attention.kernels is sm90, and there are no such kernels of attention yet; leave it at auto, or write sm80",
        ),
        KernelChoice::Auto | KernelChoice::Sm80 => Ok(()),
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
    match config.experts.kernels {
        KernelChoice::Sm90 => refused(format!(
            "experts.kernels is sm90, which GPUs of compute capability 9.0 run (H100, H200), and {has}; leave it at auto, which \
             takes what the device runs"
        )),
        KernelChoice::Auto | KernelChoice::Sm80 => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_keeps_to_its_kernels_where_the_gpu_has_them() {
        use KernelKind::{Sm80, Sm90};
        let taken = |set: &str, capability, before| {
            let experts = "model.experts={count=4,chosen=2,ffn=16,normed=true}";
            let set: Vec<String> = [experts, "train.dtype=bf16", set].map(String::from).into();
            let config = Config::default().with(&set).unwrap();
            kernels_of_experts(&config, capability, before)
        };
        let (auto, f32) = ("experts.kernels=auto", "train.dtype=f32");
        for (set, capability, before, kind) in [
            (auto, (9, 0), None, Sm90),
            (auto, (8, 0), None, Sm80),
            (auto, (10, 0), None, Sm80),
            (auto, (9, 0), Some(Sm80), Sm80),
            (auto, (9, 0), Some(Sm90), Sm90),
            (auto, (8, 0), Some(Sm90), Sm80),
            ("experts.kernels=sm80", (9, 0), Some(Sm90), Sm80),
            ("experts.kernels=sm90", (9, 0), Some(Sm80), Sm90),
            (f32, (9, 0), None, Sm80),
        ] {
            let taken = taken(set, capability, before);
            assert_eq!(taken, Some(kind), "{set} {capability:?} {before:?}");
        }
        assert_eq!(kernels_of_experts(&Config::default(), (9, 0), None), None);
    }

    #[test]
    fn kernels_for_hopper_are_refused_elsewhere() {
        let refusal = |kernels: &str, gpu| {
            let config = Config::default().with(&[format!("experts.kernels={kernels}")]);
            let checked = check_kernels(&config.unwrap(), gpu);
            checked.err().map(|error| error.to_string())
        };
        let [ampere, hopper, later] =
            [(8, 0), (9, 0), (10, 0)].map(|capability| Some(("the GPU", capability)));
        for gpu in [None, ampere, hopper, later] {
            for kernels in ["auto", "sm80"] {
                assert_eq!(refusal(kernels, gpu), None, "{kernels} {gpu:?}");
            }
        }
        assert_eq!(refusal("sm90", hopper), None);
        for (gpu, words) in [
            (None, "this run is on the processor; leave it at auto"),
            (ampere, "the GPU has 8.0; leave it at auto"),
            (later, "the GPU has 10.0"),
        ] {
            let said = refusal("sm90", gpu).unwrap();
            assert!(said.contains(words), "{said}");
        }
    }
}
