//! Parts of a micro-batch's sequences, where a rank has several neighbouring ones. Each runs as the micro-batch of a rank of its own would,
//! with its own table, gradients and loss. All stages of a block up to the next that joins parts run for one part, then for the next.

use crate::block::StageRun;
use crate::pass::Pass;
use crate::position::StagePosition;
use crate::tiles::Tiles;
use crate::{Activation, LayerActivation, Purpose, Result};
use memory::Buffer;

/// What a pass keeps for each part.
#[derive(Default)]
pub(crate) struct PartState {
    /// The activations that the running stage's backward pass has released before its end.
    pub(crate) let_go: Vec<Activation>,
    /// Gradients of activations, until the stage that wrote the activation takes them.
    pub(crate) flowing: Vec<(LayerActivation, Buffer)>,
    /// The tile on which stages run; none: they run on the whole part.
    pub(crate) tiles: Option<Tiles>,
}

impl<'a> Pass<'a> {
    /// Calls a function for each part of the micro-batch, in order: of all that passes offer it sees the part's. For stages that join
    /// parts ([`crate::Stage::joins_parts`]).
    ///
    /// # Errors
    /// The first of `run`.
    pub fn each_part<T>(
        &mut self,
        mut run: impl FnMut(&mut Pass<'a>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let before = self.part;
        let parts = 0..self.work.batches.len();
        let made = parts.map(|part| {
            self.use_part(part);
            run(self)
        });
        let made = made.collect();
        self.use_part(before);
        made
    }

    /// The number of the part that runs, among those of the pass.
    pub(crate) fn part(&self) -> usize {
        self.part
    }

    /// What the pass keeps for the part that runs.
    pub(crate) fn own(&self) -> &PartState {
        &self.parts[self.part]
    }

    pub(crate) fn own_mut(&mut self) -> &mut PartState {
        &mut self.parts[self.part]
    }

    fn use_part(&mut self, part: usize) {
        self.part = part;
        self.work.saved.use_table(self.first_table + part);
        if let Purpose::Training(training) = &mut self.work.purpose {
            training.gradients.use_part(part);
        }
    }

    /// Calls a function for each part if the stage joins parts, and else once, for the part that runs.
    pub(crate) fn each_part_if_joined(
        &mut self,
        at: StagePosition,
        mut run: impl FnMut(&mut Pass<'a>) -> Result,
    ) -> Result {
        match self.joins_parts(at) {
            true => self.each_part(run).map(|_| ()),
            false => run(self),
        }
    }

    pub(crate) fn joins_parts(&self, at: StagePosition) -> bool {
        self.model.architecture().stage(at).stage.joins_parts()
    }

    /// The runs of a block: those that every part runs before the next part does, or one that joins parts.
    fn runs_by_part(&self, layer: usize) -> Vec<&'a [StageRun]> {
        let joins = |run: &StageRun| self.joins_parts(StagePosition::new(layer, run.stages.start));
        let runs = &self.model.architecture().blocks[layer].runs;
        runs.chunk_by(|one, next| !joins(one) && !joins(next))
            .collect()
    }

    /// Runs the stages of a block forward.
    pub(crate) fn forward_block(&mut self, layer: usize) -> Result {
        for runs in self.runs_by_part(layer) {
            self.each_part_unless_joined(layer, runs, |pass| {
                runs.iter().try_for_each(|run| pass.forward_run(layer, run))
            })?;
        }
        Ok(())
    }

    /// Runs the backward passes of a block's stages.
    pub(crate) fn backward_block(&mut self, layer: usize) -> Result {
        for runs in self.runs_by_part(layer).into_iter().rev() {
            self.each_part_unless_joined(layer, runs, |pass| {
                let mut runs = runs.iter().rev();
                runs.try_for_each(|run| pass.backward_run(layer, run))
            })?;
        }
        Ok(())
    }

    /// Calls a function once if the runs are of a stage that joins parts, and else for each part.
    fn each_part_unless_joined(
        &mut self,
        layer: usize,
        runs: &[StageRun],
        mut run: impl FnMut(&mut Pass<'a>) -> Result,
    ) -> Result {
        match self.joins_parts(StagePosition::new(layer, runs[0].stages.start)) {
            true => run(self),
            false => self.each_part(run).map(|_| ()),
        }
    }
}
