//! Which rank of several needs most memory: what is decided for all is decided by its plan.

use memory::{Rank, Unit};
use settings::{Config, ConfigError, Settings};
use units::{Ranks, Zero};

/// The rank that keeps most codes of weights for a step, the first of these. None where all ranks keep as many: all else that they lease is
/// equal. They differ under ZeRO 3, with which there are no stages of a pipeline, where only some matrices of a unit are multiplied in FP8.
pub(crate) fn fullest_rank(settings: &Settings) -> Option<Rank> {
    let is_divided = |ranks: &&Ranks| ranks.zero == Zero::Weights && ranks.rank.of > 1;
    let own = settings.ranks.as_ref().filter(is_divided)?.rank;
    settings.fp8.as_ref().filter(|fp8| fp8.keeps_weights)?;
    let architecture = settings.architecture();
    // A session of these settings reports why there is no layout.
    let layout = settings.layout(&architecture).ok()?;
    let matrices = architecture.parameters.matrices_with_step_codes(&layout);
    let has_codes_in_part = |unit: &Unit| {
        let codes = matrices.within_all(&unit.cover).elements();
        codes > 0 && codes < unit.cover.elements()
    };
    if !layout.units().iter().any(has_codes_in_part) {
        return None;
    }
    // The ranks of every shard group have the same shards.
    let ranks = layout.ranks_of_shard_group(Rank { number: 0, ..own });
    let codes = |rank: Rank| matrices.within_all(&layout.shards(rank)).elements();
    let kept: Vec<(Rank, usize)> = ranks.map(|rank| (rank, codes(rank))).collect();
    let least = kept.iter().map(|(_, codes)| *codes).min()?;
    let first_of_most = kept.iter().rev().max_by_key(|(_, codes)| *codes)?;
    (first_of_most.1 > least).then_some(first_of_most.0)
}

/// The configuration as the rank has it that needs most memory, and its settings. The same rank's where all need as much.
///
/// # Errors
/// As [`Settings::new`].
pub fn as_fullest_rank(config: Config) -> Result<(Config, Settings), ConfigError> {
    let settings = Settings::new(&config)?;
    match fullest_rank(&settings) {
        Some(rank) if config.rank != Some(rank) => {
            let config = Config {
                rank: Some(rank),
                ..config
            };
            let settings = Settings::new(&config)?;
            Ok((config, settings))
        }
        _ => Ok((config, settings)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Advice, Choice, Largest, Plan, Room, Sought, choose};
    use kernels::Target;
    use memory::Rank;

    /// Attention in bf16 comes first in a block, so the first rank of four keeps least codes, and the others most.
    fn config(number: usize, of: usize, set: &[&str]) -> Config {
        let mut config = Config::default();
        config.join(Rank { number, of }).unwrap();
        let all = [
            "train.device=cuda",
            "train.dtype=bf16",
            "data.seq=256",
            "collectives.zero=3",
            "fp8.recipe=tensor",
            "fp8.weights=step",
            "fp8.except=[\"*self_attn*\"]",
        ];
        let set = [&all[..], set].concat().into_iter().map(String::from);
        config.with(&set.collect::<Vec<_>>()).unwrap()
    }

    fn fullest(number: usize, of: usize, set: &[&str]) -> Option<usize> {
        let settings = Settings::new(&config(number, of, set)).unwrap();
        fullest_rank(&settings).map(|rank| rank.number)
    }

    fn planned(config: &Config) -> Plan {
        Plan::new(&Settings::new(config).unwrap(), Target::Cuda).unwrap()
    }

    #[test]
    fn the_rank_with_most_codes_needs_most() {
        for number in 0..4 {
            assert_eq!(fullest(number, 4, &[]), Some(1));
            let all_alike: [&[&str]; 2] = [&["fp8.weights=use"], &["collectives.zero=2"]];
            for set in all_alike {
                assert_eq!(fullest(number, 4, set), None, "{set:?}");
            }
            assert_eq!(fullest(number, 4, &["collectives.shard_group=2"]), Some(1));
        }
        // The last shard ends with padding.
        assert_eq!(fullest(3, 4, &["fp8.except=[]"]), Some(0));
        let peaks = [0, 1, 2, 3].map(|number| planned(&config(number, 4, &[])).peak_bytes);
        assert!(peaks.iter().all(|peak| *peak <= peaks[1]), "{peaks:?}");
        assert!(peaks[0] < peaks[1], "{peaks:?}");
    }

    /// Every rank chooses alike with a budget that holds the first rank as it is, but not the second.
    #[test]
    fn what_is_decided_for_all_fits_the_fullest() {
        let ranks = [0, 1, 2, 3].map(|number| config(number, 4, &[]));
        let [least, most] = [0, 1].map(|number| planned(&ranks[number]));
        let budget = most.peak_bytes - 1;
        assert!(least.peak_bytes <= budget);
        let choices = ranks
            .each_ref()
            .map(|config| choose(config, Target::Cuda, budget).unwrap());
        assert!(!choices[0].layers.is_empty());
        for (config, choice) in ranks.iter().zip(&choices) {
            assert_eq!(choice.layers, choices[0].layers);
            let peak = |choice: &Choice| planned(&choice.applied_to(config)).peak_bytes;
            assert!(peak(choice) <= budget);
        }
        let device = most.reserved_bytes + most.device_overhead_bytes - 1;
        assert!(least.reserved_bytes + least.device_overhead_bytes <= device);
        for config in &ranks {
            let largest = Largest::new(
                config,
                Target::Cuda,
                Sought::MicroBatch,
                Room::Limit(budget),
            );
            let micro = config.batch.micro;
            assert!(largest.unwrap().value < Some(micro));
            let advice = Advice::new(config, Target::Cuda, device).unwrap();
            assert!(advice.fits && !advice.rungs.is_empty());
        }
    }
}
