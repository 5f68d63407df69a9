//! `recompute.state_interval` is chosen with the policy: each interval that is worth trying has a [`Chooser`].

use super::{AutoError, Choice, Chooser, Preset, at_most_as_slow};
use crate::levers::balanced_interval;
use kernels::Target;
use session::Result;
use settings::Config;

/// Chooses a policy for a configuration that asks for it, by the plan of the rank that needs most memory: all ranks choose alike, and each
/// is within the budget.
///
/// # Errors
/// [`AutoError`]: no policy fits, or a file of costs cannot be used.
pub fn choose(config: &Config, target: Target, budget: u64) -> Result<Choice, AutoError> {
    Choosers::new(config, target)?.choose(budget)
}

/// The choosers of all intervals to try. They do not depend on the budget.
pub(super) struct Choosers(Vec<Chooser>);

impl Choosers {
    pub(super) fn new(config: &Config, target: Target) -> Result<Choosers, AutoError> {
        let of = |interval| {
            let mut config = config.clone();
            config.recompute.state_interval = interval;
            Chooser::new(&config, target)
        };
        let choosers = intervals(config).into_iter().map(of);
        Ok(Choosers(choosers.collect::<Result<_, _>>()?))
    }

    /// The fastest policy and interval within a budget; of equally fast ones, those with the lowest peak.
    pub(super) fn choose(&self, budget: u64) -> Result<Choice, AutoError> {
        let mut choices = Vec::new();
        for chooser in &self.0 {
            choices.extend(chooser.within(budget)?);
        }
        let slowest = at_most_as_slow(choices.iter().map(|choice| choice.step_ms));
        choices.retain(|choice| slowest.is_some_and(|slowest| choice.step_ms <= slowest));
        let best = choices.into_iter().min_by_key(|choice| choice.peak_bytes);
        match best {
            Some(choice) => Ok(Choice {
                keep_all_step_ms: 1e3 * self.0[0].keep_all.seconds,
                ..choice
            }),
            None => Err(self.infeasible(budget)?),
        }
    }

    /// The error for a budget that nothing fits.
    fn infeasible(&self, budget: u64) -> Result<AutoError> {
        let mut least = (u64::MAX, &self.0[0]);
        for chooser in &self.0 {
            let peak = chooser.smallest()?.peak;
            if peak < least.0 {
                least = (peak, chooser);
            }
        }
        least.1.infeasible(budget)
    }

    /// The lowest peak, and that of keeping everything.
    pub(super) fn peaks(&self) -> Result<[u64; 2]> {
        let least = self.0.iter().map(|chooser| Ok(chooser.smallest()?.peak));
        let least = least.collect::<Result<Vec<u64>>>()?.into_iter().min();
        let most = self.0[0].keep_all.peak.bytes;
        Ok([least.unwrap_or(most), most])
    }

    /// The specifications that plans compare, with the first interval.
    pub(super) fn presets(&self) -> &[Preset] {
        &self.0[0].presets
    }
}

/// That of the configuration. Where it leaves the interval of a hybrid open: 1, at most 4, and the balanced one. Measured times are those
/// of one interval.
fn intervals(config: &Config) -> Vec<Option<usize>> {
    let set = config.recompute.state_interval;
    let is_measured = config.recompute.costs.is_some();
    if set.is_some() || is_measured || config.model.delta.is_none() {
        return vec![set];
    }
    let balanced = balanced_interval(config.data.seq);
    let mut intervals = vec![1, balanced.min(4), balanced];
    intervals.dedup();
    intervals.into_iter().map(Some).collect()
}

#[cfg(test)]
mod tests {
    use super::super::MeasuredFor;
    use super::super::tests::config;
    use super::*;
    use crate::Plan;
    use settings::Settings;

    /// A hybrid whose sequences have eight chunks.
    fn hybrid(set: &[&str]) -> Config {
        let delta = [
            "model.delta.key_heads=2",
            "model.delta.value_heads=4",
            "model.delta.key_head_dim=128",
            "model.delta.value_head_dim=128",
            "model.attention_gate=true",
            "model.qk_norm=true",
            "model.zero_centered_norm=true",
            "data.seq=2048",
            "batch.micro=1",
            "train.dtype=bf16",
        ];
        config(&[&delta[..], set].concat())
    }

    #[test]
    fn states_are_made_again_where_nothing_else_fits_or_all_else_is_slower() {
        for target in [Target::Cpu, Target::Cuda] {
            let open = hybrid(&[]);
            let any = Choosers::new(&open, target).unwrap();
            let all_kept = hybrid(&["recompute.state_interval=1"]);
            let all_kept = Choosers::new(&all_kept, target).unwrap();
            let [least, most] = any.peaks().unwrap();
            let mut fit_alone = 0;
            for step in 0..=8 {
                let budget = least + (most - least) * step / 8;
                let choice = any.choose(budget).unwrap();
                let written = choice.applied_to(&open);
                assert_eq!(written.recompute.state_interval, choice.state_interval);
                let plan = Plan::new(&Settings::new(&written).unwrap(), target).unwrap();
                assert_eq!(plan.peak_bytes, choice.peak_bytes);
                match (all_kept.choose(budget), choice.state_interval) {
                    (Ok(without), Some(_)) => assert!(choice.step_ms < without.step_ms),
                    (Ok(without), None) => assert_eq!(choice.step_ms, without.step_ms),
                    (Err(_), interval) => {
                        assert!(interval.is_some());
                        fit_alone += 1;
                    }
                }
            }
            assert!((1..8).contains(&fit_alone), "{fit_alone}");
            assert_eq!(any.choose(most).unwrap().state_interval, None);
            let set = hybrid(&["recompute.state_interval=4"]);
            let choice = Choosers::new(&set, target).unwrap().choose(most).unwrap();
            assert_eq!(choice.state_interval, Some(4));
        }
    }

    #[test]
    fn measured_times_are_those_of_one_interval() {
        let mut measured = hybrid(&[]);
        assert_eq!(intervals(&measured), [Some(1), Some(4), Some(8)]);
        measured.recompute.costs = Some("profile.json".into());
        assert_eq!(intervals(&measured), [None]);
        let measured_for = |set: &[&str]| {
            let settings = Settings::new(&hybrid(set)).unwrap();
            MeasuredFor::new(&settings, Target::Cuda)
        };
        let plain = "recompute.spec=none";
        let [all, some] = ["1", "4"].map(|interval| {
            measured_for(&[plain, &format!("recompute.state_interval={interval}")])
        });
        assert_eq!(all, measured_for(&[plain]));
        assert_ne!(all, some);
    }
}
