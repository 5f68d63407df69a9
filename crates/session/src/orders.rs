//! The orders in which passes use the units of weights, which decide what is fetched ahead.

use model::Model;
use std::rc::Rc;

/// Units by their index in the layout, each until the next one. Empty if weights stay on the device.
#[derive(Default)]
pub(crate) struct Orders {
    /// A micro-batch of a training step, forward and backward, with replays.
    pub(crate) step: Rc<[usize]>,
    /// A forward pass without a backward pass.
    pub(crate) forward: Rc<[usize]>,
    /// All units with trained parameters, in the layout's order.
    pub(crate) update: Rc<[usize]>,
}

impl Orders {
    /// The orders for a model whose weights come and go. `step` is the order of a micro-batch.
    pub(crate) fn new(model: &Model, step: Vec<usize>) -> Orders {
        let units = model.layout().units().iter().enumerate();
        let trained = units.filter(|(_, unit)| unit.trained.elements() > 0);
        Orders {
            step: step.into(),
            forward: model.units_forward().into(),
            update: trained.map(|(index, _)| index).collect(),
        }
    }
}
