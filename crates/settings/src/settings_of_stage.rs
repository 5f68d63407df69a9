//! What a rank computes and holds as a stage of a pipeline; without one it has the whole model.

use super::pipeline::Pipeline;
use super::schedule::PipelineOrder;
use super::settings::Settings;
use super::stage_tasks::StageSchedule;
use memory::Rank;
use model::HeldBlocks;
use std::ops::Range;
use units::Ranks;

impl Settings {
    /// The settings of the rank that has this rank's place in another stage of the pipeline.
    pub fn in_stage(&self, number: usize) -> Settings {
        let in_stage = |ranks: &Ranks| Ranks {
            stage: Rank {
                number,
                ..ranks.stage
            },
            ..ranks.clone()
        };
        Settings {
            ranks: self.ranks.as_ref().map(in_stage),
            ..self.clone()
        }
    }

    /// The blocks of each virtual stage that this rank computes, of a model of so many.
    pub fn own_layers(&self, layers: usize) -> Vec<Range<usize>> {
        match &self.pipeline {
            None => std::iter::once(0..layers).collect(),
            Some(pipeline) => {
                let own = pipeline.of_stage(self.stage().number);
                own.map(|(_, layers)| layers.clone()).collect()
            }
        }
    }

    /// The blocks of a virtual stage, counted over the whole pipeline, of a model of so many.
    pub fn layers_of(&self, virtual_stage: usize, layers: usize) -> Range<usize> {
        let pipeline = self.pipeline.as_ref();
        pipeline.map_or(0..layers, |pipeline| pipeline.layers[virtual_stage].clone())
    }

    /// Whether this rank computes losses.
    pub fn has_head(&self) -> bool {
        let stage = self.stage();
        stage.number + 1 == stage.of
    }

    /// What this rank does in a step of so many micro-batches of its own.
    pub fn schedule_of_stage(&self, micro_batches: usize) -> StageSchedule {
        self.pipeline_order().of_stage(self.stage(), micro_batches)
    }

    /// In which order the pipeline's stages work, which is one for a single stage.
    pub fn pipeline_order(&self) -> PipelineOrder {
        let pipeline = self.pipeline.as_ref();
        pipeline.map_or(PipelineOrder::ALONE, Pipeline::order)
    }

    /// Whether this rank's backward passes defer gradients of matrices.
    pub fn defers_gradients(&self) -> bool {
        self.pipeline_order().deferred(self.stage()) > 0
    }

    /// After how many micro-batches a stage of a pipeline does the same again.
    pub fn micro_batches_at_a_time(&self) -> usize {
        self.pipeline_order().at_a_time(self.stage().of)
    }

    /// How long a stage of a pipeline waits for others, over the time of its work ([`PipelineOrder::idle_over_work`]). 0 without a
    /// pipeline.
    pub fn idle_over_work(&self) -> f64 {
        let order = self.pipeline_order();
        order.idle_over_work(self.stage().of, self.accum)
    }

    /// This rank's stage of the pipeline; [`Rank::ALONE`] without one.
    pub fn stage(&self) -> Rank {
        let ranks = self.ranks.as_ref();
        ranks.map_or(Rank::ALONE, |ranks| ranks.stage)
    }

    /// The blocks of each of this rank's virtual stages, and of how many micro-batches it holds their activations.
    pub fn held(&self, layers: usize) -> Vec<HeldBlocks> {
        let under_way = self.pipeline_order().under_way(self.stage(), self.accum);
        let each = self.own_layers(layers).into_iter().zip(under_way);
        let held = each.map(|(layers, micro_batches)| HeldBlocks {
            layers,
            micro_batches: micro_batches * self.own_parts().count,
        });
        held.collect()
    }
}
