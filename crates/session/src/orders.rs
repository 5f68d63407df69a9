//! In which order passes use the units of weights: what is fetched ahead follows from it.

use model::Model;
use std::rc::Rc;

/// The units that a pass uses, each until the next, by their index in the layout. Empty where weights stay on the device.
#[derive(Default)]
pub(crate) struct Orders {
    /// A micro-batch of a step, forward and backward, replays included.
    pub(crate) step: Rc<[usize]>,
    /// A forward pass alone.
    pub(crate) forward: Rc<[usize]>,
    /// All units of which something is trained, one after the other.
    pub(crate) update: Rc<[usize]>,
}

impl Orders {
    /// The orders in which a model whose weights come and go uses them, in a `step` and otherwise.
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
