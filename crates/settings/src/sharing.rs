//! Ranks that share sequences (`[parallel]`), and what does not go with them.

use super::error::{not_with, refused};
use super::keys::ParallelConfig;
use super::pipeline::places;
use super::schedule::PipelineSchedule;
use super::schema::Config;
use crate::Result;
use data::Packing;
use memory::Rank;
use model::{RouterAuxKind, SharingRanks};
use units::{Ranks, Reduce};

impl Default for ParallelConfig {
    fn default() -> ParallelConfig {
        ParallelConfig {
            context: 1,
            context_parts: None,
            pipeline: 1,
            schedule: PipelineSchedule::OneForwardOneBackward,
            virtual_stage_layers: None,
            pipeline_layout: None,
        }
    }
}

impl ParallelConfig {
    /// Equal parts of each sequence.
    pub(crate) fn parts(&self) -> usize {
        self.context_parts.unwrap_or(self.context)
    }

    /// What messages call a rank: its number, and its place in the grid of ranks where there is one, such as
    /// `5 (group 2, part 1 of 2)`.
    pub fn name(&self, rank: Rank) -> String {
        let (number, ranks, parts) = (rank.number, self.context, self.parts());
        let (within, stage) = places(rank, self.pipeline);
        let mut place = Vec::new();
        if stage.of > 1 {
            place.push(format!("stage {} of {}", stage.number, stage.of));
        }
        if ranks > 1 {
            let (group, part) = (within.number / ranks, within.number % ranks);
            let own = match parts / ranks {
                each if each > 1 => format!("parts {} to {}", part * each, (part + 1) * each - 1),
                _ => format!("part {part}"),
            };
            place.push(format!("group {group}, {own} of {parts}"));
        }
        match place.is_empty() {
            true => number.to_string(),
            false => format!("{number} ({})", place.join(", ")),
        }
    }
}

/// The ranks that share sequences with this one.
pub(crate) fn ranks(ranks: Option<&Ranks>) -> SharingRanks {
    let Some(ranks) = ranks else {
        return SharingRanks::ALONE;
    };
    let rank = ranks.of_sharing();
    SharingRanks {
        first: ranks.rank.number - rank.number,
        rank,
        parts_each: ranks.parts_each,
    }
}

/// Refuses groups of ranks that do not divide all ranks.
pub(crate) fn check_ranks(config: &Config) -> Result {
    let context = config.parallel.context;
    let parts = config.parallel.parts();
    if !parts.is_multiple_of(context) {
        return refused(format!(
            "parallel.context_parts is {parts}, which is no multiple of the {context} ranks that share each sequence (parallel.context); \
             take --context-parts {}, or a --cp that divides {parts}",
            parts.next_multiple_of(context)
        ));
    }
    let ranks = config.ranks().map_or(1, |ranks| ranks.rank.of);
    if ranks.is_multiple_of(context) {
        return Ok(());
    }
    refused(match ranks {
        1 => format!(
            "parallel.context is {context}, which shares each sequence among {context} ranks, and this process is the only one; start \
             them by `mpirun -n {context} trainer ...`, srun or torchrun, plan for one by --ranks {context}, or take --cp 1 (with \
             --context-parts {parts} it has the same bits)"
        ),
        ranks => format!(
            "parallel.context is {context}, and {ranks} ranks do not divide into groups of {context}; take a multiple of {context} \
             ranks, or another --cp"
        ),
    })
}

/// Refuses a model and settings whose sequences cannot be shared.
pub(crate) fn check(config: &Config) -> Result {
    let Some(ranks) = config.ranks().filter(|_| config.parts() > 1) else {
        return Ok(());
    };
    let (context, parts) = (ranks.sharing, config.parts());
    let (brings, without) = match ranks.parts_each {
        1 => (
            format!("--cp {context} gives every rank a part of each sequence"),
            "--cp 1",
        ),
        _ => (
            format!("--context-parts {parts} divides each sequence"),
            "--cp 1 --context-parts 1",
        ),
    };
    let not_with = |others: &str| not_with(&brings, others, without);
    check_sizes(config, &ranks)?;
    if config.packing() == Packing::Pad {
        return not_with(
            "--packing pad makes micro-batches of many lengths; take --packing first-fit or concatenate",
        );
    }
    if config.has_pairs() {
        return not_with("--objective dpo compares whole sequences; take --objective next-token");
    }
    if config.has_policy() {
        return not_with(
            "--objective policy has numbers for whole sequences; take --objective next-token",
        );
    }
    if config.model.router_aux > 0.0 && config.model.router_aux_kind == RouterAuxKind::Sequence {
        return not_with(
            "model.router_aux_kind sequence balances each of them; take model.router_aux_kind layer",
        );
    }
    if config.log.sample_every.is_some() {
        return not_with(
            "log.sample_every continues one; leave it out, and take `trainer generate` with a checkpoint",
        );
    }
    if ranks.parts_each > 1 {
        return check_several(config, &ranks);
    }
    Ok(())
}

/// Refuses what several parts on one rank do not go with.
fn check_several(config: &Config, ranks: &Ranks) -> Result {
    let (parts, each) = (config.parts(), ranks.parts_each);
    let brings = format!("--context-parts {parts} gives a rank {each} parts of each sequence");
    let instead = format!("one part a rank (--cp {parts})");
    let not_with = |others: &str| not_with(&brings, others, &instead);
    if ranks.stage.of > 1 {
        return not_with("--pp hands whole micro-batches from stage to stage; take --pp 1");
    }
    if ranks.reduce == Reduce::Step {
        return not_with(
            "--reduce step adds up a rank's own gradients first, of which every part has some; leave --reduce at micro-batch",
        );
    }
    Ok(())
}

/// Refuses sizes that do not divide, with sizes that do.
fn check_sizes(config: &Config, ranks: &Ranks) -> Result {
    let (context, parts) = (ranks.sharing, config.parts());
    let attention = config.model.block(0).attention;
    let (heads, kv_heads, seq) = (attention.heads, attention.kv_heads, config.data.seq);
    let delta = config.model.delta.as_ref();
    let divides_heads = |parts: usize| {
        heads.is_multiple_of(parts)
            && (kv_heads.is_multiple_of(parts) || parts.is_multiple_of(kv_heads))
            && delta.is_none_or(|delta| delta.key_heads.is_multiple_of(parts))
    };
    if divides_heads(parts) && seq.is_multiple_of(parts) {
        return Ok(());
    }
    let (key, without, all) = match config.parallel.context_parts {
        Some(_) => ("parallel.context_parts", "--cp 1 --context-parts 1", None),
        None => ("parallel.context", "--cp 1", Some(ranks.rank.of)),
    };
    let fits = |size: &usize| {
        let goes_with_ranks = match all {
            None => size.is_multiple_of(context),
            Some(all) => all.is_multiple_of(*size),
        };
        divides_heads(*size) && seq.is_multiple_of(*size) && goes_with_ranks
    };
    let sizes = (2..=heads).filter(fits).map(|size| size.to_string());
    let sizes: Vec<String> = sizes.collect();
    let instead = match sizes.is_empty() {
        true => format!("no size does; take {without}"),
        false => format!("sizes that do: {}", sizes.join(", ")),
    };
    let and_delta = delta.map_or(String::new(), |delta| {
        format!(
            ", and divide the {} heads of keys of the gated delta rule (model.delta.key_heads)",
            delta.key_heads
        )
    });
    refused(format!(
        "{key} is {parts}: it has to divide the {seq} tokens of a sequence (data.seq) and the {heads} heads, and divide or be a multiple \
         of the {kv_heads} heads of keys{and_delta}; {instead}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_called_by_their_place() {
        let rank = Rank { number: 5, of: 8 };
        let name = |context| {
            let parallel = ParallelConfig {
                context,
                ..ParallelConfig::default()
            };
            parallel.name(rank)
        };
        assert_eq!(name(1), "5");
        assert_eq!(name(2), "5 (group 2, part 1 of 2)");
        assert_eq!(name(8), "5 (group 0, part 5 of 8)");
        let parallel = ParallelConfig {
            context: 2,
            context_parts: Some(8),
            ..ParallelConfig::default()
        };
        assert_eq!(parallel.name(rank), "5 (group 2, parts 4 to 7 of 8)");
    }
}
