//! Pipelines of several stages (`parallel.pipeline`): which blocks each stage has, and what does not go with them.

use super::error::{not_with, refused};
use super::keys::ParallelConfig;
use super::schedule::{PipelineOrder, PipelineSchedule};
use super::schema::Config;
use crate::Result;
use data::Packing;
use memory::{Layer, Rank};
use model::{Architecture, Block};
use std::ops::Range;
use units::Zero;

/// A pipeline. Which stage a rank is of, its [`units::Ranks`] say.
#[derive(Clone, Debug, PartialEq)]
pub struct Pipeline {
    /// In which order stages work.
    pub schedule: PipelineSchedule,
    /// The blocks of each virtual stage. The first has the embedding too, and the last the head.
    pub layers: Vec<Range<usize>>,
    /// How many stages there are: virtual stage `k` is of stage `k % stages`.
    pub stages: usize,
}

impl Pipeline {
    /// In which order stages work, and how many virtual stages each has.
    pub fn order(&self) -> PipelineOrder {
        PipelineOrder {
            schedule: self.schedule,
            virtual_stages: self.layers.len() / self.stages,
        }
    }

    /// A stage's virtual stages: their numbers in the whole pipeline, and their blocks.
    pub fn of_stage(&self, stage: usize) -> impl Iterator<Item = (usize, &Range<usize>)> {
        let all = self.layers.iter().enumerate();
        all.skip(stage).step_by(self.stages)
    }

    /// The stage with the most blocks.
    pub fn longest(&self) -> usize {
        let blocks = |stage: &usize| -> usize {
            let own = self.of_stage(*stage);
            own.map(|(_, layers)| layers.len()).sum()
        };
        (0..self.stages).max_by_key(blocks).unwrap_or(0)
    }

    /// The virtual stage of a part of the model.
    pub fn virtual_stage_of(&self, part: Layer) -> usize {
        let layer = match part {
            Layer::Block(layer) => layer,
            Layer::Head => return self.layers.len() - 1,
            Layer::Embedding | Layer::Whole => return 0,
        };
        let has = |layers: &Range<usize>| layers.contains(&layer);
        let virtual_stage = self.layers.iter().position(has);
        virtual_stage.expect("every block has a stage")
    }
}

/// A rank's place in its stage, and its stage, of so many stages: neighbours are of one stage.
pub(crate) fn places(rank: Rank, stages: usize) -> (Rank, Rank) {
    let of = rank.of / stages;
    if of == 0 {
        return (rank, Rank::ALONE);
    }
    let within = Rank {
        number: rank.number % of,
        of,
    };
    let stage = Rank {
        number: rank.number / of,
        of: stages,
    };
    (within, stage)
}

/// Refuses stages that do not divide all ranks.
pub(crate) fn check_ranks(config: &Config) -> Result {
    let stages = config.parallel.pipeline;
    let ranks = config.rank.map_or(1, |rank| rank.of);
    if ranks.is_multiple_of(stages) {
        return Ok(());
    }
    refused(match ranks {
        1 => format!(
            "parallel.pipeline is {stages}, which divides the model among {stages} stages, and this process is the only rank; start \
             them by `mpirun -n {stages} trainer ...`, srun or torchrun, plan for one by --ranks {stages}, or take --pp 1"
        ),
        ranks => format!(
            "parallel.pipeline is {stages}, and {ranks} ranks do not divide into {stages} stages; take a multiple of {stages} ranks, \
             or another --pp"
        ),
    })
}

/// The pipeline of a configuration; none if there is one stage. `architecture` makes the model's, which takes a while for many blocks.
pub(crate) fn pipeline(
    config: &Config,
    architecture: impl FnOnce() -> Architecture,
) -> Result<Option<Pipeline>> {
    let Some(ranks) = config.ranks().filter(|ranks| ranks.stage.of > 1) else {
        return Ok(None);
    };
    let architecture = architecture();
    check(config, &architecture, ranks.zero)?;
    Ok(Some(Pipeline {
        schedule: config.parallel.schedule,
        layers: layers(config, &architecture, ranks.stage.of)?,
        stages: ranks.stage.of,
    }))
}

/// The blocks of each virtual stage.
fn layers(
    config: &Config,
    architecture: &Architecture,
    stages: usize,
) -> Result<Vec<Range<usize>>> {
    let ParallelConfig {
        schedule,
        pipeline_layout,
        virtual_stage_layers,
        ..
    } = &config.parallel;
    let (layers, accum) = (config.model.layers, config.batch.accum);
    let is_interleaved = *schedule == PipelineSchedule::Interleaved;
    if is_interleaved && !accum.is_multiple_of(stages) {
        return refused(format!(
            "interleaved stages take turns after {stages} micro-batches (parallel.pipeline), and batch.accum is {accum}; make --accum a \
             multiple of {stages}, or take --pipeline-schedule 1f1b"
        ));
    }
    match (pipeline_layout, virtual_stage_layers) {
        (Some(_), Some(_)) => refused(
            "parallel.pipeline_layout gives the blocks of each virtual stage, and parallel.virtual_stage_layers the same number for \
             all; leave one of the two out",
        ),
        (Some(blocks), None) => given(blocks, layers, (stages, is_interleaved)),
        (None, Some(each)) => equal(*each, layers, stages),
        (None, None) => {
            let virtual_stages = if is_interleaved { 2 * stages } else { stages };
            if virtual_stages > layers {
                return too_few_blocks(layers, virtual_stages);
            }
            Ok(cut(&costs(config, architecture), virtual_stages))
        }
    }
}

fn too_few_blocks<T>(layers: usize, virtual_stages: usize) -> Result<T> {
    refused(format!(
        "the model has {layers} blocks (model.layers), and stages with two virtual stages each need {virtual_stages}; take a smaller \
         --pp, or --pipeline-schedule 1f1b"
    ))
}

/// Virtual stages of so many blocks each.
fn equal(each: usize, layers: usize, stages: usize) -> Result<Vec<Range<usize>>> {
    let of_a_turn = each.saturating_mul(stages);
    if !layers.is_multiple_of(of_a_turn) || layers < of_a_turn.saturating_mul(2) {
        return refused(format!(
            "parallel.virtual_stage_layers is {each}, and the model has {layers} blocks: {stages} stages (parallel.pipeline) need a \
             multiple of {of_a_turn}, at least twice that; take another number, or --pipeline-layout"
        ));
    }
    let starts = (0..layers).step_by(each);
    Ok(starts.map(|start| start..start + each).collect())
}

/// Refuses a model and settings for which there is no pipeline.
fn check(config: &Config, architecture: &Architecture, zero: Zero) -> Result {
    let stages = config.parallel.pipeline;
    let brings = format!("--pp {stages} divides the model among stages");
    let not_with = |others: &str| not_with(&brings, others, "--pp 1");
    if stages > config.model.layers {
        return refused(format!(
            "parallel.pipeline is {stages}, and the model has {} blocks (model.layers), of which every stage needs one; take a smaller \
             --pp",
            config.model.layers
        ));
    }
    if config.model.tie_embeddings {
        return not_with(
            "the head is tied to the embedding, which is on another stage, and would wait for its gradient; take a model whose head is \
             not tied (model.tie_embeddings = false), or share sequences and divide weights instead (--cp, --zero 3)",
        );
    }
    if zero == Zero::Weights {
        return not_with(
            "under --zero 3 every pass of every micro-batch would gather the stage's weights again; take --zero 2, since a stage has few weights",
        );
    }
    if config.packing() == Packing::Pad {
        return not_with(
            "--packing pad makes micro-batches of many lengths, of which several are under way at once, so their peaks are not planned; \
             take --packing first-fit or concatenate",
        );
    }
    if config.has_pairs() {
        return not_with(
            "--objective dpo needs a second pass through the whole model; take --objective next-token",
        );
    }
    if config.has_policy() {
        return not_with(
            "--objective policy asks for log-probabilities between steps, which take the whole model; take --objective next-token",
        );
    }
    if architecture.router_losses.is_some() {
        return not_with(
            "losses of routers take the choices of all blocks together; set model.router_aux and model.router_z_loss to 0 (biases of \
             choices balance too: optim.router_bias_rate)",
        );
    }
    if config.log.sample_every.is_some() {
        return not_with(
            "log.sample_every needs the whole model; leave it out, and take `trainer generate` with a checkpoint",
        );
    }
    let mut blocks = architecture.blocks.iter();
    if config.parallel.schedule == PipelineSchedule::ZbH1 && !blocks.any(Block::can_defer_gradients)
    {
        return refused(
            "--pipeline-schedule zb-h1 defers gradients of matrices, and no block of this model can: with adapters, experts, latent \
             attention, --fp8 or memory.tile_tokens they are computed with those of activations; take --pipeline-schedule 1f1b",
        );
    }
    Ok(())
}

/// Stages, or virtual stages, that the user gave as numbers of blocks.
fn given(
    blocks: &[usize],
    layers: usize,
    (stages, is_interleaved): (usize, bool),
) -> Result<Vec<Range<usize>>> {
    let all: usize = blocks.iter().sum();
    let (fits, needs) = match is_interleaved {
        true => (
            blocks.len().is_multiple_of(stages) && blocks.len() > stages,
            format!(
                "a multiple of {stages} numbers (parallel.pipeline), at least {}",
                2 * stages
            ),
        ),
        false => (
            blocks.len() == stages,
            format!("{stages} numbers (parallel.pipeline)"),
        ),
    };
    if !fits || all != layers || blocks.contains(&0) {
        return refused(format!(
            "parallel.pipeline_layout is {blocks:?}, and it needs {needs}, each at least 1, that add up to {layers} (model.layers)"
        ));
    }
    let mut end = 0;
    let stage = |count: &usize| {
        end += count;
        end - count..end
    };
    Ok(blocks.iter().map(stage).collect())
}

/// The FLOPs of each block for a token. The last has the head's too.
fn costs(config: &Config, architecture: &Architecture) -> Vec<u64> {
    let seq = config.data.seq;
    let blocks = architecture.blocks.iter();
    let mut costs: Vec<u64> = blocks.map(|block| block.flops_per_token(seq)).collect();
    let all = architecture.flops_per_token(seq);
    let rest = all.saturating_sub(costs.iter().sum());
    if let Some(last) = costs.last_mut() {
        *last += rest;
    }
    costs
}

/// Cuts blocks into stages of neighbours so that the dearest stage costs the least; of such cuts it takes the one whose later stages
/// are largest, since earlier ones have more micro-batches under way.
fn cut(costs: &[u64], stages: usize) -> Vec<Range<usize>> {
    let layers = costs.len();
    let sums = costs.iter().scan(0, |sum, cost| {
        *sum += cost;
        Some(*sum)
    });
    let sums: Vec<u64> = std::iter::once(0).chain(sums).collect();
    let cost = |blocks: Range<usize>| sums[blocks.end] - sums[blocks.start];
    // best[n][start]: the least cost of the dearest of `n` stages that have the blocks from `start` on, and where the first ends.
    let mut best = vec![vec![(u64::MAX, layers); layers + 1]; stages + 1];
    best[0][layers] = (0, layers);
    for count in 1..=stages {
        for start in 0..layers {
            let ends = start + 1..=layers;
            let with = |end: usize| {
                let (rest, _) = best[count - 1][end];
                (rest.max(cost(start..end)), end)
            };
            if let Some(least) = ends.map(with).min() {
                best[count][start] = least;
            }
        }
    }
    let mut start = 0;
    let stage = |left: usize| {
        let (_, end) = best[left][start];
        let blocks = start..end;
        start = end;
        blocks
    };
    (1..=stages).rev().map(stage).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_cost_about_the_same() {
        let sizes = |costs: &[u64], stages| -> Vec<usize> {
            let stages = cut(costs, stages);
            stages.iter().map(Range::len).collect()
        };
        assert_eq!(sizes(&[1; 8], 4), [2, 2, 2, 2]);
        assert_eq!(sizes(&[1; 7], 4), [1, 2, 2, 2]);
        // A head as dear as two blocks.
        assert_eq!(sizes(&[1, 1, 1, 1, 1, 3], 2), [4, 2]);
        assert_eq!(sizes(&[1, 1, 1], 3), [1, 1, 1]);
    }

    #[test]
    fn neighbours_are_of_one_stage() {
        let of = |number| places(Rank { number, of: 8 }, 4);
        let (within, stage) = of(5);
        assert_eq!((within.number, within.of), (1, 2));
        assert_eq!((stage.number, stage.of), (2, 4));
    }
}
