//! Which stages of a pipeline have to be planned to find the largest.

use memory::{Codes, DType, Layer, Role};
use model::{Actions, Activation, Extent};
use settings::{Pipeline, PipelineSchedule, Settings};

/// Stages among which the largest is, in order. Of stages with equal blocks, and neither the embedding nor the head, it has the earliest: it
/// has the most micro-batches under way. Where later stages have deferred gradients instead, it has all.
pub(crate) fn distinct_stages(settings: &Settings) -> Vec<usize> {
    let Some(pipeline) = &settings.pipeline else {
        return vec![0];
    };
    if pipeline.schedule == PipelineSchedule::ZbH1 {
        return (0..pipeline.stages).collect();
    }
    let blocks = blocks(settings);
    let last = pipeline.stages - 1;
    let mut seen: Vec<Vec<Vec<&Block>>> = Vec::new();
    let is_distinct = |stage: &usize| {
        let own = of_stage(pipeline, &blocks, *stage);
        let is_new = !seen.contains(&own);
        if is_new && *stage > 0 {
            seen.push(own);
        }
        is_new || *stage == last
    };
    (0..pipeline.stages).filter(is_distinct).collect()
}

/// The blocks of each of a stage's virtual stages.
fn of_stage<'a>(pipeline: &Pipeline, blocks: &'a [Block], stage: usize) -> Vec<Vec<&'a Block>> {
    let own = pipeline.of_stage(stage);
    own.map(|(_, layers)| blocks[layers.clone()].iter().collect())
        .collect()
}

/// What a block's memory depends on.
#[derive(PartialEq)]
struct Block {
    activations: Vec<(Activation, Extent)>,
    actions: Actions,
    flops: u64,
    parameters: Vec<OfParameter>,
}

#[derive(PartialEq)]
struct OfParameter {
    shape: Vec<usize>,
    role: Role,
    dtype: Option<DType>,
    codes: Option<Codes>,
}

fn blocks(settings: &Settings) -> Vec<Block> {
    let architecture = settings.architecture();
    let mut blocks: Vec<Block> = Vec::new();
    for (layer, block) in architecture.blocks.iter().enumerate() {
        let activations = block.activations();
        blocks.push(Block {
            activations: activations.map(|(one, extent)| (one, *extent)).collect(),
            actions: *settings.policy.actions(layer),
            flops: block.flops_per_token(settings.seq),
            parameters: Vec::new(),
        });
    }
    for parameter in architecture.parameters.in_layout() {
        if let Layer::Block(layer) = parameter.part {
            blocks[layer].parameters.push(OfParameter {
                shape: parameter.shape.clone(),
                role: parameter.role,
                dtype: parameter.dtype,
                codes: parameter.codes,
            });
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Rank;
    use settings::Config;

    fn distinct(stages: usize, set: &[&str]) -> Vec<usize> {
        let pipeline = format!("parallel.pipeline={stages}");
        let model = ["model.layers=16", "model.tie_embeddings=false", &pipeline];
        let set = [&model[..], set].concat().into_iter().map(String::from);
        let mut config = Config::default();
        config
            .join(Rank {
                number: 0,
                of: stages,
            })
            .unwrap();
        let config = config.with(&set.collect::<Vec<_>>()).unwrap();
        distinct_stages(&Settings::new(&config).unwrap())
    }

    #[test]
    fn equal_stages_are_planned_once() {
        assert_eq!(distinct(1, &[]), [0]);
        assert_eq!(
            distinct(8, &["parallel.pipeline_layout=[2,2,2,2,2,2,2,2]"]),
            [0, 1, 7]
        );
        assert_eq!(
            distinct(8, &["parallel.pipeline_layout=[2,2,2,2,1,3,2,2]"]),
            [0, 1, 4, 5, 7]
        );
        let first = [
            "parallel.pipeline_layout=[4,4,4,4]",
            "recompute.spec=full:block:6",
        ];
        assert_eq!(distinct(4, &first), [0, 1, 2, 3]);
        let half = |more| [&["parallel.pipeline_layout=[4,4,4,4]"][..], more].concat();
        assert_eq!(distinct(4, &half(&[])), [0, 1, 3]);
        let frozen = half(&["train.freeze=[\"*.layers.6.*\"]"]);
        assert_eq!(distinct(4, &frozen), [0, 1, 2, 3]);
        let deferred = [
            "parallel.pipeline_layout=[4,4,4,4]",
            "parallel.schedule=zb-h1",
        ];
        assert_eq!(distinct(4, &deferred), [0, 1, 2, 3]);
    }
}
