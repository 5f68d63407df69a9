//! Which kernels compute operations that have several kinds, on the device of a run.

use crate::failure::Result;
use crate::job::Job;
use kernels::cuda::KernelKind;
use serde::{Deserialize, Serialize};
use settings::{Config, Device, check_kernels};

#[cfg(feature = "cuda")]
use {
    crate::begin::complete,
    crate::failure::Failure,
    crate::kernel_trial::{ExpertWidths, Verdict, kept_at, verdict},
    kernels::cuda::{DeviceFacts, device_facts},
    settings::{KernelChoice, Resolved, kernels_of_experts},
};

/// The kinds of kernels that a run takes; none on the processor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct KernelKinds {
    /// Of attention.
    pub(crate) attention: Option<KernelKind>,
    /// Of products of experts in bf16; none without experts.
    pub(crate) experts: Option<KernelKind>,
    /// Why others than `auto` takes first, where some were given up.
    pub(crate) given_up: Option<String>,
}

impl KernelKinds {
    /// Decides before the device is opened: kernels for 9.0 are tried first, in a process of their own. `before` are those of experts in
    /// the run that goes on.
    ///
    /// # Errors
    /// [`Failure::Config`](crate::Failure::Config) if the device runs none of the kind that the configuration names, and
    /// [`Failure::Kernels`](crate::Failure::Kernels) if their trial fails.
    pub(crate) fn decide(config: &Config, before: Option<KernelKind>) -> Result<KernelKinds> {
        match config.device() {
            Device::Cpu => {
                check_kernels(config, None)?;
                Ok(KernelKinds::default())
            }
            #[cfg(feature = "cuda")]
            Device::Cuda { index } => match device_facts(index) {
                Ok(gpu) => on_gpu(config, &gpu, before),
                // Opening it says what is wrong.
                Err(_) => Ok(KernelKinds::default()),
            },
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { .. } => {
                let _ = before;
                Ok(KernelKinds::default())
            }
        }
    }

    /// Those that all ranks take: where one has others than Hopper's, none has Hopper's, since they add up in another order.
    ///
    /// # Errors
    /// [`Failure::Ranks`](crate::Failure::Ranks) if ranks are lost.
    pub(crate) fn of_all_ranks(self, job: &Job) -> Result<KernelKinds> {
        let all = job.everybodys(&self)?;
        let Some(reason) = reason_against(&all).filter(|_| self.experts == Some(KernelKind::Sm90))
        else {
            return Ok(self);
        };
        tracing::warn!("{reason}");
        Ok(KernelKinds {
            experts: Some(KernelKind::Sm80),
            given_up: Some(reason),
            ..self
        })
    }
}

/// Why no rank takes Hopper's kernels of experts: the first rank that does not.
fn reason_against(all: &[KernelKinds]) -> Option<String> {
    let others = || all.iter().enumerate();
    let mut others = others().filter(|(_, kinds)| kinds.experts == Some(KernelKind::Sm80));
    let (rank, kinds) = others.next()?;
    Some(match &kinds.given_up {
        Some(reason) => format!("rank {rank}: {reason}"),
        None => format!(
            "rank {rank} computes products of experts by kernels for 8.0 (sm80), and so do all ranks"
        ),
    })
}

/// Tries the kernels that a rank will take, as far as its command says: the engine between ranks opens the GPU before all else is known,
/// and a GPU may be one process's alone.
#[cfg(feature = "cuda")]
pub(crate) fn try_before_ranks_meet(resolved: &Resolved) {
    // What is wrong is said where it is needed.
    let (Device::Cuda { index }, Ok(completed)) = (resolved.device(), complete(resolved.clone()))
    else {
        return;
    };
    let config = completed.decided(completed.config.data.seq);
    if let Ok(gpu) = device_facts(index) {
        let taken = kernels_of_experts(&config, gpu.capability, None);
        tried(&config, &gpu, taken);
    }
}

/// The verdict on kernels that have to be tried, at a run's widths.
#[cfg(feature = "cuda")]
fn tried(config: &Config, gpu: &DeviceFacts, taken: Option<KernelKind>) -> Option<Verdict> {
    let widths = ExpertWidths::of(config).filter(|_| taken == Some(KernelKind::Sm90))?;
    Some(verdict(gpu, widths))
}

#[cfg(feature = "cuda")]
fn on_gpu(config: &Config, gpu: &DeviceFacts, before: Option<KernelKind>) -> Result<KernelKinds> {
    check_kernels(config, Some((&gpu.name, gpu.capability)))?;
    let taken = kernels_of_experts(config, gpu.capability, before);
    let against = tried(config, gpu, taken).and_then(|verdict| against(&verdict, gpu));
    if config.experts.kernels == KernelChoice::Sm90
        && let Some(reason) = against
    {
        return Err(Failure::Kernels(reason));
    }
    let given_up = against.map(|reason| format!("{reason}; those for 8.0 (sm80) are taken"));
    if let Some(reason) = &given_up {
        tracing::warn!("{reason}");
    }
    Ok(KernelKinds {
        attention: Some(KernelKind::Sm80),
        experts: given_up.as_ref().map_or(taken, |_| Some(KernelKind::Sm80)),
        given_up,
    })
}

/// What a verdict says against kernels, and where it is kept.
#[cfg(feature = "cuda")]
fn against(verdict: &Verdict, gpu: &DeviceFacts) -> Option<String> {
    let against = format!("kernels of experts for 9.0 (sm90) {}", verdict.against()?);
    let file = kept_at(gpu).filter(|file| verdict.is_kept() && file.exists());
    let kept = file.map(|file| {
        format!(
            " (kept in {}, without which they are tried again)",
            file.display()
        )
    });
    Some(against + &kept.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use KernelKind::{Sm80, Sm90};

    fn kinds(experts: Option<KernelKind>, given_up: Option<&str>) -> KernelKinds {
        KernelKinds {
            attention: Some(Sm80),
            experts,
            given_up: given_up.map(String::from),
        }
    }

    #[test]
    fn one_rank_gives_up_for_all() {
        let [hopper, ampere] = [Sm90, Sm80].map(|kind| kinds(Some(kind), None));
        let given_up = kinds(Some(Sm80), Some("they were wrong"));
        let none = kinds(None, None);
        for (ranks, reason) in [
            ([&hopper, &hopper], None),
            ([&none, &none], None),
            ([&hopper, &given_up], Some("rank 1: they were wrong")),
            ([&ampere, &hopper], Some("rank 0 computes")),
        ] {
            let of_ranks = ranks.map(Clone::clone);
            let agreed = crate::job::tests::on_ranks(2, |job| {
                let own = of_ranks[job.rank().unwrap().number].clone();
                own.of_all_ranks(job).unwrap()
            });
            assert_eq!(agreed[0].experts, agreed[1].experts);
            match reason {
                None => assert_eq!(agreed, of_ranks),
                Some(reason) => {
                    assert_eq!(agreed[0].experts, Some(Sm80));
                    let told = agreed.iter().filter_map(|kinds| kinds.given_up.as_ref());
                    assert!(told.clone().any(|said| said.starts_with(reason)));
                }
            }
        }
    }
}
