//! Which kernels compute operations that have several kinds, on the device of a run.

use crate::failure::Result;
use crate::job::Job;
use kernels::cuda::KernelKind;
use serde::{Deserialize, Serialize};
use settings::{Config, Device, KernelChoice, KernelFamily, PerFamily, check_kernels};

#[cfg(feature = "cuda")]
use {
    crate::begin::complete,
    crate::failure::Failure,
    crate::kernel_trial::{Verdict, Widths, kept_at, verdict},
    kernels::cuda::{DeviceFacts, device_facts},
    settings::Resolved,
};

/// The kernels that a run takes, of all families.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct KernelKinds {
    /// Which kinds; none on the processor, and of experts without experts.
    pub(crate) taken: PerFamily<Option<KernelKind>>,
    /// Why another than `auto` takes first, where that was given up.
    given_up: PerFamily<Option<String>>,
}

impl KernelKinds {
    /// Decides before the device is opened: kernels for 9.0 are tried first, in processes of their own. `before` are those of the run
    /// that goes on.
    ///
    /// # Errors
    /// [`Failure::Config`](crate::Failure::Config) if the device runs none of the kind that the configuration names, and
    /// [`Failure::Kernels`](crate::Failure::Kernels) if their trial fails.
    pub(crate) fn decide(
        config: &Config,
        before: PerFamily<Option<KernelKind>>,
    ) -> Result<KernelKinds> {
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

    /// What a run says of kernels, with these in place of `auto`.
    pub(crate) fn named(&self, choices: PerFamily<KernelChoice>) -> PerFamily<KernelChoice> {
        PerFamily::new(|family| self.taken[family].map_or(choices[family], Into::into))
    }

    /// Those that all ranks take: where one has others of a family than Hopper's, none has Hopper's, since they add up in another order.
    ///
    /// # Errors
    /// [`Failure::Ranks`](crate::Failure::Ranks) if ranks are lost.
    pub(crate) fn of_all_ranks(mut self, job: &Job) -> Result<KernelKinds> {
        let all = job.everybodys(&self)?;
        for family in KernelFamily::ALL {
            let is_hopper = self.taken[family] == Some(KernelKind::Sm90);
            if let Some(reason) = reason_against(family, &all).filter(|_| is_hopper) {
                tracing::warn!("{reason}");
                self.give_up(family, reason);
            }
        }
        Ok(self)
    }

    fn give_up(&mut self, family: KernelFamily, reason: String) {
        self.taken[family] = Some(KernelKind::Sm80);
        self.given_up[family] = Some(reason);
    }

    /// Why others than `auto` takes first, where some were given up.
    pub(crate) fn reason(&self) -> Option<String> {
        let reasons = KernelFamily::ALL.map(|family| self.given_up[family].clone());
        let reasons: Vec<String> = reasons.into_iter().flatten().collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }
}

/// Why no rank takes Hopper's kernels of a family: the first rank that does not.
fn reason_against(family: KernelFamily, all: &[KernelKinds]) -> Option<String> {
    let mut others = all.iter().enumerate();
    let (rank, kinds) = others.find(|(_, kinds)| kinds.taken[family] == Some(KernelKind::Sm80))?;
    Some(match &kinds.given_up[family] {
        Some(reason) => format!("rank {rank}: {reason}"),
        None => format!(
            "rank {rank} takes kernels of {} for 8.0 (sm80), and so do all ranks",
            family.name()
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
        for family in KernelFamily::ALL {
            let taken = family.kernels(&config, gpu.capability, None);
            tried(family, &config, &gpu, taken);
        }
    }
}

/// The verdict on kernels that have to be tried, at a run's widths.
#[cfg(feature = "cuda")]
fn tried(
    family: KernelFamily,
    config: &Config,
    gpu: &DeviceFacts,
    taken: Option<KernelKind>,
) -> Option<Verdict> {
    let widths = Widths::of(family, config).filter(|_| taken == Some(KernelKind::Sm90))?;
    Some(verdict(gpu, widths))
}

#[cfg(feature = "cuda")]
fn on_gpu(
    config: &Config,
    gpu: &DeviceFacts,
    before: PerFamily<Option<KernelKind>>,
) -> Result<KernelKinds> {
    check_kernels(config, Some((&gpu.name, gpu.capability)))?;
    let mut kinds = KernelKinds::default();
    for family in KernelFamily::ALL {
        let taken = family.kernels(config, gpu.capability, before[family]);
        kinds.taken[family] = taken;
        let verdict = tried(family, config, gpu, taken);
        let Some(reason) = verdict.and_then(|verdict| against(family, &verdict, gpu)) else {
            continue;
        };
        if family.choice(config) == KernelChoice::Sm90 {
            return Err(Failure::Kernels { family, reason });
        }
        let given_up = format!("{reason}; those for 8.0 (sm80) are taken");
        tracing::warn!("{given_up}");
        kinds.give_up(family, given_up);
    }
    Ok(kinds)
}

/// What a verdict says against kernels, and where it is kept.
#[cfg(feature = "cuda")]
fn against(family: KernelFamily, verdict: &Verdict, gpu: &DeviceFacts) -> Option<String> {
    let (name, reason) = (family.name(), verdict.against()?);
    let file = kept_at(gpu).filter(|file| verdict.is_kept() && file.exists());
    let kept = file.map(|file| {
        format!(
            " (kept in {}, without which they are tried again)",
            file.display()
        )
    });
    let kept = kept.unwrap_or_default();
    Some(format!("kernels of {name} for 9.0 (sm90) {reason}{kept}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use KernelKind::{Sm80, Sm90};

    /// Kernels of one family. Those of the other are Hopper's, which every rank keeps.
    fn kinds(
        family: KernelFamily,
        kind: Option<KernelKind>,
        given_up: Option<&str>,
    ) -> KernelKinds {
        let of_family = |of| if of == family { kind } else { Some(Sm90) };
        let mut kinds = KernelKinds {
            taken: PerFamily::new(of_family),
            ..KernelKinds::default()
        };
        kinds.given_up[family] = given_up.map(String::from);
        kinds
    }

    #[test]
    fn one_rank_gives_up_for_all() {
        for family in KernelFamily::ALL {
            let [hopper, ampere] = [Sm90, Sm80].map(|kind| kinds(family, Some(kind), None));
            let given_up = kinds(family, Some(Sm80), Some("they were wrong"));
            let none = kinds(family, None, None);
            for (ranks, reason) in [
                ([&hopper, &hopper], None),
                ([&none, &none], None),
                ([&hopper, &given_up], Some("rank 1: they were wrong")),
                ([&ampere, &hopper], Some("rank 0 takes")),
            ] {
                let of_ranks = ranks.map(Clone::clone);
                let agreed = crate::job::tests::on_ranks(2, |job| {
                    let own = of_ranks[job.rank().unwrap().number].clone();
                    own.of_all_ranks(job).unwrap()
                });
                match reason {
                    None => assert_eq!(agreed, of_ranks),
                    Some(reason) => {
                        let taken = kinds(family, Some(Sm80), None).taken;
                        assert!(agreed.iter().all(|kinds| kinds.taken == taken));
                        let told = agreed.iter().filter_map(KernelKinds::reason);
                        assert!(told.into_iter().any(|said| said.starts_with(reason)));
                    }
                }
            }
        }
    }
}
