//! The ranks of a configuration.

use super::choices::{HostPlace, RankEngine, Release};
use super::error::{ConfigError, refused};
use super::pipeline;
use super::schema::Config;
use super::sharing;
use super::size::Size;
use crate::Result;
use memory::{OwnParts, Rank};
use units::{Ranks, Reduce, Zero};

impl Config {
    /// Makes this the configuration of one of several ranks, unless `collectives.engine` is `alone`.
    ///
    /// # Errors
    /// If `rank` is not among the ranks, or if settings are not valid with ranks.
    pub fn join(&mut self, rank: Rank) -> Result {
        let Rank { number, of } = rank;
        if number >= of {
            return Err(ConfigError::Contradiction(format!(
                "rank {number} is none of {of} {}: they are counted from 0",
                if of == 1 { "rank" } else { "ranks" }
            )));
        }
        let is_alone = self.collectives.engine == RankEngine::Alone;
        self.rank = (!is_alone).then_some(rank);
        check(self)
    }

    /// Micro-batches of a step, of all ranks together. Ranks that share sequences have parts of the same micro-batches.
    pub fn micro_batches(&self) -> usize {
        let apart = self
            .ranks()
            .map_or(1, |ranks| ranks.rank.of / ranks.sharing);
        self.batch.accum * apart
    }

    /// The parts that this rank has of each sequence.
    pub fn own_parts(&self) -> OwnParts {
        sharing::ranks(self.ranks().as_ref()).own_parts()
    }

    /// Equal parts of each sequence.
    pub fn parts(&self) -> usize {
        self.own_parts().of
    }

    /// Tokens of a part of a sequence.
    pub fn part_seq(&self) -> usize {
        self.data.seq / self.parts()
    }

    /// This process's rank in its group; none without a group. If a ZeRO stage or several parts of sequences are set but there is no
    /// launcher, the process is a group of one.
    pub(crate) fn rank_in_group(&self) -> Option<Rank> {
        let has_parts = self.parallel.context_parts.is_some_and(|parts| parts > 1);
        let asked = self.collectives.zero.is_some() || has_parts;
        self.rank.or(asked.then_some(Rank::ALONE))
    }

    /// The ZeRO stage of the ranks; none without a group.
    pub(crate) fn zero(&self) -> Option<Zero> {
        let zero = self.collectives.zero.unwrap_or(Zero::States);
        self.rank_in_group().map(|_| zero)
    }

    /// How many neighbours of so many ranks have all weights together; none: all of them. One rank has them all, whatever a checkpoint
    /// says.
    fn shard_group(&self, ranks: usize) -> Option<usize> {
        let is_divided = self.zero() == Some(Zero::Weights) && ranks > 1;
        let group = self.collectives.shard_group;
        group.filter(|group| is_divided && *group != ranks)
    }

    /// The ranks that train together, and how they divide their work; none without a group.
    pub fn ranks(&self) -> Option<Ranks> {
        let collectives = &self.collectives;
        let (rank, stage) = pipeline::places(self.rank_in_group()?, self.parallel.pipeline);
        Some(Ranks {
            rank,
            stage,
            sharing: self.parallel.context,
            parts_each: self.parallel.parts() / self.parallel.context,
            zero: self.zero()?,
            bucket_bytes: match collectives.bucket_size {
                Size::Bytes(bytes) => bytes as usize,
                Size::Percent(_) => {
                    unreachable!("the configuration was refused: no device's share")
                }
            },
            reduce: collectives.reduce,
            overlap_grad_reduce: collectives.overlap_grad_reduce,
            overlap_param_gather: collectives.overlap_param_gather,
            reshard_after_forward: collectives.reshard_after_forward,
            shard_group: self.shard_group(rank.of),
        })
    }
}

/// Refuses settings that are not valid with ranks.
pub(crate) fn check(config: &Config) -> Result {
    if let Size::Percent(percent) = config.collectives.bucket_size {
        return refused(format!(
            "`collectives.bucket_size` is {percent}%, and a bucket is a part of no device; write bytes, such as 128MiB"
        ));
    }
    pipeline::check_ranks(config)?;
    sharing::check_ranks(config)?;
    let Some(ranks) = config.ranks() else {
        return Ok(());
    };
    let stage = ranks.zero.stage();
    let instead = match (ranks.parts_each, ranks.zero < Zero::Gradients) {
        (1, true) => ", and divide gradients with --zero 2",
        (1, false) => "",
        _ => {
            ", or leave --context-parts out: parts of a sequence add up their gradients as ranks do"
        }
    };
    let gathers_sums = ranks.zero == Zero::Replicated;
    if config.offload.gradients == HostPlace::Pinned
        && (gathers_sums || ranks.reduce == Reduce::Step)
    {
        let (why, instead) = match gathers_sums {
            true => (
                "under --zero 0 all ranks get all sums of gradients on their devices",
                "take --zero 1 or more",
            ),
            false => (
                "with --reduce step a rank first adds up its own gradients, on its device",
                "leave --reduce at micro-batch",
            ),
        };
        return refused(format!(
            "`offload.gradients` is pinned, and {why}; {instead}, or --offload-gradients none"
        ));
    }
    if config.optim.release == Release::Backward {
        return refused(format!(
            "`optim.release` is backward, which updates a block before the other ranks' gradients are there; leave optim.release \
             at step{instead}"
        ));
    }
    if let Some(group) = ranks.shard_group {
        check_shard_group(config, group, ranks.rank.of)?;
    }
    if ranks.reduce == Reduce::Step && ranks.zero >= Zero::Gradients {
        return refused(format!(
            "`collectives.reduce` is step, which adds up a rank's gradients of the whole step first, and under --zero {stage} no \
             rank has room for all of them; leave --reduce at micro-batch, or take --zero 1"
        ));
    }
    Ok(())
}

/// Refuses groups of ranks that cannot have all weights together.
fn check_shard_group(config: &Config, group: usize, ranks: usize) -> Result {
    if !ranks.is_multiple_of(group) {
        let of = |size: &usize| ranks.is_multiple_of(*size);
        let sizes: Vec<String> = (2..=ranks)
            .filter(of)
            .map(|size| size.to_string())
            .collect();
        return refused(format!(
            "collectives.shard_group is {group}, and {ranks} ranks do not divide into groups of {group}; take --shard-group {}",
            sizes.join(" or ")
        ));
    }
    if config.offload.parameters == HostPlace::Pinned {
        return refused(format!(
            "collectives.shard_group is {group}, and groups send each other what they updated from device to device, while \
             these weights live on the host (offload.parameters); add --shard-group {ranks} or --offload-parameters none"
        ));
    }
    Ok(())
}
