//! Stages that run on a tile of tokens at a time.
//!
//! What the stages of a run alone make and read exists for the tile on which they run. What leaves the run, an output or
//! a gradient, is leased whole before its first tile, which is lent its own rows of it ([`Windows`]); what the run reads of
//! others is there whole, or is made again so, and a tile sees its rows. The backward pass of a tile makes again all
//! that it needs and that its forward pass made: nothing outlives a tile.

use crate::architecture::Position;
use crate::block::Run;
use crate::pass::Pass;
use crate::{BatchShape, LayerActivation, ModelError};
use kernels::{Init, Positions};
use memory::{Buffer, Windows};
use std::ops::Range;
use std::rc::Rc;

/// The tile on which stages run, and what it shares with the run's other tiles.
pub(crate) struct Tiles {
    /// The stage whose outputs are made again; none in a forward or backward pass.
    pub(crate) replayed: Option<Position>,
    pub(crate) tokens: Range<usize>,
    pub(crate) shape: BatchShape,
    /// Activations of the tile: those that exist for it alone, and its rows of the run's outputs.
    made: Vec<(LayerActivation, Rc<Buffer>)>,
    /// The run's outputs, whole.
    outputs: Vec<(LayerActivation, Windows)>,
    /// Whole gradients of what enters and leaves the run.
    gradients: Vec<LentGradient>,
    /// Gradients that stages have filed for this tile.
    filed: Vec<(LayerActivation, Buffer)>,
}

/// A whole gradient of which tiles have their rows.
struct LentGradient {
    of: LayerActivation,
    windows: Windows,
    /// What the first contribution of a tile is added to.
    init: Init<'static>,
    /// Whose gradient it has become after every tile; none if it has been used up.
    becomes: Option<LayerActivation>,
}

impl Tiles {
    fn new(replayed: Option<Position>) -> Tiles {
        Tiles {
            replayed,
            tokens: 0..0,
            shape: BatchShape { rows: 0, seq: 0 },
            made: Vec::new(),
            outputs: Vec::new(),
            gradients: Vec::new(),
            filed: Vec::new(),
        }
    }

    fn begin(&mut self, first: usize, shape: BatchShape) {
        self.tokens = first..first + shape.tokens();
        self.shape = shape;
    }

    /// Lets go of everything that is the tile's own.
    fn end(&mut self) {
        self.made.clear();
        for (at, window) in self.filed.drain(..) {
            let mut lent = self.gradients.iter_mut();
            let lent = lent.find(|lent| lent.windows.lent(&window));
            let lent = lent.unwrap_or_else(|| {
                panic!("the gradient of {at} is what `gradient_to_add` gave, or that of a sum")
            });
            lent.becomes = Some(at);
        }
    }

    /// An activation of the tile, if it has been made.
    pub(crate) fn get(&self, at: LayerActivation) -> Option<&Rc<Buffer>> {
        let mut made = self.made.iter();
        made.find(|(other, _)| *other == at).map(|(_, made)| made)
    }

    pub(crate) fn put(&mut self, at: LayerActivation, buffer: Buffer) {
        assert!(self.get(at).is_none(), "{at} was made twice");
        self.made.push((at, Rc::new(buffer)));
    }

    /// Takes an activation of the tile, if it has been made.
    ///
    /// # Panics
    /// If somebody still reads it.
    pub(crate) fn take(&mut self, at: LayerActivation) -> Option<Buffer> {
        let place = self.made.iter().position(|(other, _)| *other == at)?;
        let buffer = Rc::into_inner(self.made.swap_remove(place).1);
        Some(buffer.unwrap_or_else(|| panic!("{at} leaves its tile when nobody reads it")))
    }

    /// The tile's rows of an output of the run, which the first tile leases.
    pub(crate) fn output(
        &mut self,
        at: LayerActivation,
        lease: impl FnOnce() -> Result<Buffer, ModelError>,
    ) -> Result<Buffer, ModelError> {
        if let Some((_, windows)) = self.outputs.iter().find(|(other, _)| *other == at) {
            return Ok(windows.lend(self.tokens.clone()));
        }
        let windows = Windows::of(lease()?);
        let window = windows.lend(self.tokens.clone());
        self.outputs.push((at, windows));
        Ok(window)
    }

    pub(crate) fn file_gradient(&mut self, at: LayerActivation, gradient: Buffer) {
        let is_first = self.filed.iter().all(|(other, _)| *other != at);
        assert!(is_first, "the gradient of {at} is there already");
        self.filed.push((at, gradient));
    }

    /// The gradient that a stage filed for this tile, or the tile's rows of one that was there before.
    pub(crate) fn gradient(&mut self, at: LayerActivation) -> Option<(Buffer, Init<'static>)> {
        if let Some(place) = self.filed.iter().position(|(other, _)| *other == at) {
            return Some((self.filed.swap_remove(place).1, Init::Accumulate));
        }
        let lent = self.gradients.iter().find(|lent| lent.of == at)?;
        Some((lent.windows.lend(self.tokens.clone()), lent.init))
    }

    /// The tile's rows of a whole gradient, which was there before or has just been leased.
    pub(crate) fn lend_gradient(
        &mut self,
        of: LayerActivation,
        whole: Buffer,
        init: Init<'static>,
    ) -> Buffer {
        let windows = Windows::of(whole);
        let window = windows.lend(self.tokens.clone());
        self.gradients.push(LentGradient {
            of,
            windows,
            init,
            becomes: None,
        });
        window
    }
}

impl<'a> Pass<'a> {
    /// Tokens of the tile on which the stage runs, or of the micro-batch.
    pub fn tokens(&self) -> usize {
        self.shape_of_tile().tokens()
    }

    /// The number, within the micro-batch, of the first of these tokens.
    pub fn first_token(&self) -> usize {
        self.tiles.as_ref().map_or(0, |tiles| tiles.tokens.start)
    }

    /// Where these tokens stand.
    pub fn positions(&self) -> Positions<'a> {
        let batch = self.work.batch;
        let Some(tiles) = &self.tiles else {
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

    /// Sequences of the tile on which the stage runs, or of the micro-batch.
    pub(crate) fn shape_of_tile(&self) -> BatchShape {
        let tiles = self.tiles.as_ref();
        tiles.map_or(self.work.batch.shape, |tiles| tiles.shape)
    }

    /// Runs neighbouring stages of the forward pass.
    pub(crate) fn forward_run(&mut self, layer: usize, run: &Run) -> Result<(), ModelError> {
        let mut stages = run.stages.clone().map(|stage| Position::new(layer, stage));
        let of_tile = stages.clone();
        self.on_tiles(run, None, |pass| {
            of_tile.clone().try_for_each(|at| pass.forward_stage(at))
        })?;
        match run.tile_tokens {
            Some(_) => stages.try_for_each(|at| self.after_forward(at)),
            None => Ok(()),
        }
    }

    /// Runs the backward passes of neighbouring stages.
    pub(crate) fn backward_run(&mut self, layer: usize, run: &Run) -> Result<(), ModelError> {
        let stages = run.stages.clone().rev();
        let stages = stages.map(|stage| Position::new(layer, stage));
        self.on_tiles(run, None, |pass| {
            stages.clone().try_for_each(|at| pass.backward_stage(at))
        })?;
        if run.tile_tokens.is_some() {
            stages.for_each(|at| self.after_backward(at));
        }
        Ok(())
    }

    /// Makes the outputs of a stage again, for whole micro-batches.
    pub(crate) fn replay_whole(&mut self, at: Position) -> Result<(), ModelError> {
        match self.model.architecture().run_of(at) {
            Some(run) => self.on_tiles(run, Some(at), |pass| pass.run(at, false)),
            None => self.run(at, false),
        }
    }

    /// Does something on every tile, or once where a run has none; files what leaves them.
    fn on_tiles(
        &mut self,
        run: &Run,
        replayed: Option<Position>,
        mut on_tile: impl FnMut(&mut Pass<'a>) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let Some(tokens) = run.tile_tokens else {
            return on_tile(self);
        };
        let mut tiles = Tiles::new(replayed);
        for (first, shape) in self.work.batch.shape.tiles(tokens) {
            tiles.begin(first, shape);
            self.tiles = Some(tiles);
            on_tile(self)?;
            tiles = self
                .tiles
                .take()
                .expect("whoever takes the tiles brings them back");
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

    /// An activation that is not the tile's own, whole, whatever that takes.
    pub(crate) fn pull_outside(&mut self, at: LayerActivation) -> Result<Rc<Buffer>, ModelError> {
        let tiles = self.tiles.take();
        let whole = self.pull_whole(at);
        self.tiles = tiles;
        whole
    }
}
