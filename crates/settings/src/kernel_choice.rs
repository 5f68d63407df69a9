//! Refuses kernels that a device does not run.

use super::choices::KernelChoice;
use super::error::refused;
use super::schema::Config;
use crate::Result;

/// The compute capability that [`KernelChoice::Sm90`] is for.
const HOPPER: (i32, i32) = (9, 0);

impl KernelChoice {
    /// Whether a GPU of this compute capability runs kernels for 9.0: code for them runs on no other.
    pub fn sm90_runs_on(capability: (i32, i32)) -> bool {
        capability == HOPPER
    }
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
        Some((_, capability)) if KernelChoice::sm90_runs_on(capability) => return Ok(()),
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
