//! Stages that run on a tile of tokens at a time.
//!
//! Tensors that only the stages of a run make and read exist for one tile at a time. Outputs and gradients that leave
//! the run are leased whole before its first tile, and each tile writes its own rows ([`Windows`]). Tensors that the
//! run reads from other stages exist or are replayed whole, and a tile reads its rows. The backward pass of a tile
//! replays everything that it needs of its forward pass, because nothing outlives a tile.

use crate::block::StageRun;
use crate::pass::Pass;
use crate::position::StagePosition;
use crate::tiles::Tiles;
use crate::{BatchShape, LayerActivation, Result};
use kernels::Positions;
use memory::Buffer;
use std::rc::Rc;

impl<'a> Pass<'a> {
    /// Tokens of the tile on which the stage runs, or of the whole micro-batch.
    pub fn tokens(&self) -> usize {
        self.shape_of_tile().tokens()
    }

    /// The number, within the micro-batch, of the first of these tokens.
    pub fn first_token(&self) -> usize {
        self.own()
            .tiles
            .as_ref()
            .map_or(0, |tiles| tiles.tokens.start)
    }

    /// The positions of these tokens.
    pub fn positions(&self) -> Positions<'a> {
        let batch = self.batch();
        let Some(tiles) = &self.own().tiles else {
            return batch.positions();
        };
        let (tokens, seq) = (&tiles.tokens, batch.shape.seq);
        match &batch.positions {
            Some(positions) => Positions::Given(positions.view().rows(tokens.clone())),
            None if tiles.shape.seq == seq => Positions::Sequences(seq),
            None => {
                let first = tokens.start % seq;
                let places = self.model.places().rows(first..first + tokens.len());
                Positions::Given(places)
            }
        }
    }

    /// Sequences of the tile on which the stage runs, or of the whole micro-batch.
    pub(crate) fn shape_of_tile(&self) -> BatchShape {
        let tiles = self.own().tiles.as_ref();
        tiles.map_or(self.batch().shape, |tiles| tiles.shape)
    }

    /// Runs the stages of a run forward.
    pub(crate) fn forward_run(&mut self, layer: usize, run: &StageRun) -> Result {
        let mut stages = run
            .stages
            .clone()
            .map(|stage| StagePosition::new(layer, stage));
        let of_tile = stages.clone();
        self.on_tiles(run, None, |pass| {
            of_tile.clone().try_for_each(|at| pass.forward_stage(at))
        })?;
        match run.tile_tokens {
            Some(_) => stages.try_for_each(|at| self.after_forward(at)),
            None => Ok(()),
        }
    }

    /// Runs the backward passes of a run's stages.
    pub(crate) fn backward_run(&mut self, layer: usize, run: &StageRun) -> Result {
        let stages = run.stages.clone().rev();
        let stages = stages.map(|stage| StagePosition::new(layer, stage));
        self.on_tiles(run, None, |pass| {
            stages.clone().try_for_each(|at| pass.backward_stage(at))
        })?;
        if run.tile_tokens.is_some() {
            stages.for_each(|at| self.after_backward(at));
        }
        Ok(())
    }

    /// Replays a stage's outputs for the whole micro-batch.
    pub(crate) fn replay_whole(&mut self, at: StagePosition) -> Result {
        match self.model.architecture().run_of(at) {
            Some(run) => self.on_tiles(run, Some(at), |pass| pass.run(at, false)),
            None => self.run(at, false),
        }
    }

    /// Calls `on_tile` for every tile, or once if the run has no tiles. Then files the run's whole outputs and
    /// gradients.
    fn on_tiles(
        &mut self,
        run: &StageRun,
        replayed: Option<StagePosition>,
        mut on_tile: impl FnMut(&mut Pass<'a>) -> Result,
    ) -> Result {
        let Some(tokens) = run.tile_tokens else {
            return on_tile(self);
        };
        let mut tiles = Tiles::new(replayed);
        for (first, shape) in self.batch().shape.tiles(tokens) {
            tiles.begin(first, shape);
            self.own_mut().tiles = Some(tiles);
            on_tile(self)?;
            let taken = self.own_mut().tiles.take();
            tiles = taken.expect("whoever takes the tiles brings them back");
            tiles.end();
        }
        for (at, windows) in tiles.outputs {
            self.work.saved.put(at, windows.into_whole());
        }
        for lent in tiles.gradients {
            if let Some(at) = lent.becomes {
                self.file_gradient_at(at, lent.windows.into_whole());
            }
        }
        Ok(())
    }

    /// Pulls an activation that exists for the whole micro-batch, by replays outside the tile if needed.
    pub(crate) fn pull_outside(&mut self, at: LayerActivation) -> Result<Rc<Buffer>> {
        let tiles = self.own_mut().tiles.take();
        let whole = self.pull_whole(at);
        self.own_mut().tiles = tiles;
        whole
    }
}
