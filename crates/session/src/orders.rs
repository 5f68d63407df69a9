//! The orders in which passes use the units of weights, which decide what is fetched ahead.

use model::Model;
use settings::{PassKind, Pipeline};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

/// Units by their index in the layout, each until the next one.
pub(crate) type UnitOrder = Rc<[usize]>;

/// The orders of a session. Empty if weights stay on the device.
#[derive(Default)]
pub(crate) struct Orders {
    /// Those of a training step's passes of a micro-batch, with replays, by virtual stage.
    passes: HashMap<(PassKind, usize), UnitOrder>,
    /// Those of forward passes without a backward pass, by their blocks.
    forward: Vec<(Range<usize>, UnitOrder)>,
    none: UnitOrder,
}

impl Orders {
    /// The orders for a model whose weights come and go, of which this rank has some virtual stages of a pipeline, or all. `passes` are
    /// those of a training step.
    pub(crate) fn new(
        model: &Model,
        pipeline: Option<&Pipeline>,
        passes: HashMap<(PassKind, usize), UnitOrder>,
    ) -> Orders {
        let own: Vec<Range<usize>> = match pipeline {
            None => std::iter::once(0..model.layers()).collect(),
            Some(pipeline) => {
                let own = pipeline.of_stage(model.layout().stage().number);
                own.map(|(_, layers)| layers.clone()).collect()
            }
        };
        let forward = own.into_iter().map(|layers| {
            let units = model.units_forward(&layers);
            (layers, units.into())
        });
        Orders {
            passes,
            forward: forward.collect(),
            none: Rc::default(),
        }
    }

    /// Of a pass of a training step.
    pub(crate) fn pass(&self, kind: PassKind, virtual_stage: usize) -> &UnitOrder {
        self.passes
            .get(&(kind, virtual_stage))
            .unwrap_or(&self.none)
    }

    /// Of a forward pass through these blocks.
    pub(crate) fn forward(&self, layers: &Range<usize>) -> &UnitOrder {
        let mut known = self.forward.iter();
        let found = known.find(|(of, _)| of == layers);
        found.map_or(&self.none, |(_, order)| order)
    }

    /// Notes the order of a pass, as it was recorded.
    pub(crate) fn note(&mut self, of: (PassKind, usize), units: Vec<usize>) {
        self.passes.insert(of, units.into());
    }

    /// All orders that were noted.
    pub(crate) fn into_passes(self) -> HashMap<(PassKind, usize), UnitOrder> {
        self.passes
    }
}
