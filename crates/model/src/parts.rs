//! Parts of a micro-batch's sequences, where a rank has several neighbouring ones. Each runs as the micro-batch of a rank of its own would,
//! with its own table, gradients and loss. All stages of a block up to the next that joins parts run for one part, then for the next.

use crate::block::StageRun;
use crate::pass::Pass;
use crate::position::StagePosition;
use crate::tiles::Tiles;
use crate::{Activation, LayerActivation, ModelError, Purpose};
use memory::Buffer;

/// What a pass has of a part while another one runs.
#[derive(Default)]
pub(crate) struct PartAside {
    let_go: Vec<Activation>,
    flowing: Vec<(LayerActivation, Buffer)>,
    tiles: Option<Tiles>,
}

impl<'a> Pass<'a> {
    /// Calls a function for each part of the micro-batch, in order: of all that passes offer it sees the part's. For stages that join
    /// parts ([`crate::Stage::joins_parts`]).
    ///
    /// # Errors
    /// The first of `run`.
    pub fn each_part<T>(
        &mut self,
        mut run: impl FnMut(&mut Pass<'a>) -> Result<T, ModelError>,
    ) -> Result<Vec<T>, ModelError> {
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

    fn use_part(&mut self, part: usize) {
        if part == self.part {
            return;
        }
        for number in [self.part, part] {
            let aside = &mut self.aside[number];
            std::mem::swap(&mut aside.let_go, &mut self.let_go);
            std::mem::swap(&mut aside.flowing, &mut self.flowing);
            std::mem::swap(&mut aside.tiles, &mut self.tiles);
        }
        self.part = part;
        self.work.saved.use_table(self.first_table + part);
        if let Purpose::Training(training) = &mut self.work.purpose {
            training.gradients.use_part(part);
        }
    }

    /// Calls a function for each part if the stage joins parts, and else once, for the part that runs.
    pub(crate) fn each_part_of(
        &mut self,
        at: StagePosition,
        mut run: impl FnMut(&mut Pass<'a>) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
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
        let runs = self.model.architecture().blocks()[layer].runs();
        runs.chunk_by(|one, next| !joins(one) && !joins(next))
            .collect()
    }

    /// Runs the stages of a block forward.
    pub(crate) fn forward_block(&mut self, layer: usize) -> Result<(), ModelError> {
        for runs in self.runs_by_part(layer) {
            self.on_parts(layer, runs, |pass| {
                runs.iter().try_for_each(|run| pass.forward_run(layer, run))
            })?;
        }
        Ok(())
    }

    /// Runs the backward passes of a block's stages.
    pub(crate) fn backward_block(&mut self, layer: usize) -> Result<(), ModelError> {
        for runs in self.runs_by_part(layer).into_iter().rev() {
            self.on_parts(layer, runs, |pass| {
                let mut runs = runs.iter().rev();
                runs.try_for_each(|run| pass.backward_run(layer, run))
            })?;
        }
        Ok(())
    }

    fn on_parts(
        &mut self,
        layer: usize,
        runs: &[StageRun],
        mut run: impl FnMut(&mut Pass<'a>) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        match self.joins_parts(StagePosition::new(layer, runs[0].stages.start)) {
            true => run(self),
            false => self.each_part(run).map(|_| ()),
        }
    }
}
