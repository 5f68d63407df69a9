//! The tensors of one tile, and those that all tiles of a run of stages share (see `on_tiles.rs`).

use crate::position::StagePosition;
use crate::{BatchShape, LayerActivation, Result};
use kernels::Init;
use memory::{Buffer, Windows};
use std::ops::Range;
use std::rc::Rc;

/// The tile on which stages run, and what it shares with the run's other tiles.
pub(crate) struct Tiles {
    /// The stage that is replayed; none in a forward or backward pass.
    pub(crate) replayed: Option<StagePosition>,
    pub(crate) tokens: Range<usize>,
    pub(crate) shape: BatchShape,
    /// Activations of the tile: those that exist for one tile at a time, and its rows of the run's outputs.
    made: Vec<(LayerActivation, Rc<Buffer>)>,
    /// The run's outputs, whole.
    pub(crate) outputs: Vec<(LayerActivation, Windows)>,
    /// Whole gradients of the activations that enter and leave the run.
    pub(crate) gradients: Vec<LentGradient>,
    /// Gradients that stages have filed for this tile.
    filed: Vec<(LayerActivation, Buffer)>,
}

/// A whole gradient whose rows are lent to tiles.
pub(crate) struct LentGradient {
    of: LayerActivation,
    pub(crate) windows: Windows,
    /// What a tile's first contribution is added to.
    init: Init<'static>,
    /// The activation whose gradient it is after every tile; none if it has been used up.
    pub(crate) becomes: Option<LayerActivation>,
}

impl Tiles {
    pub(crate) fn new(replayed: Option<StagePosition>) -> Tiles {
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

    pub(crate) fn begin(&mut self, first: usize, shape: BatchShape) {
        self.tokens = first..first + shape.tokens();
        self.shape = shape;
    }

    /// Releases everything that belongs to the tile.
    pub(crate) fn end(&mut self) {
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

    /// The tile's rows of an output of the run. The first tile leases the output.
    pub(crate) fn output(
        &mut self,
        at: LayerActivation,
        lease: impl FnOnce() -> Result<Buffer>,
    ) -> Result<Buffer> {
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

    /// The gradient that a stage filed for this tile, or the tile's rows of a whole gradient.
    pub(crate) fn gradient(&mut self, at: LayerActivation) -> Option<(Buffer, Init<'static>)> {
        if let Some(place) = self.filed.iter().position(|(other, _)| *other == at) {
            return Some((self.filed.swap_remove(place).1, Init::Accumulate));
        }
        let lent = self.gradients.iter().find(|lent| lent.of == at)?;
        Some((lent.windows.lend(self.tokens.clone()), lent.init))
    }

    /// Adds a whole gradient to those that are lent, and lends the tile's rows of it.
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
