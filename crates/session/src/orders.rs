//! In which order passes use the units of weights: what is fetched ahead follows from it.

use crate::calls::shape_of_a_step;
use crate::error::SessionError;
use crate::session::Session;
use kernels::Target;
use kernels::meta::FlopCounter;
use memory::{Home, Homes, Memory};
use model::Model;
use settings::{BetweenSteps, Settings};
use std::rc::Rc;
use units::Zero;

/// The units that a pass uses, each until the next, by their index in the layout. Empty where weights stay on the device.
pub(crate) struct Orders {
    /// A micro-batch of a step, forward and backward, replays included.
    pub(crate) step: Rc<[usize]>,
    /// A forward pass alone.
    pub(crate) forward: Rc<[usize]>,
    /// All units of which something is trained, one after the other.
    pub(crate) update: Rc<[usize]>,
}

impl Orders {
    /// What replays use, and when, depends on the policy alone: a micro-batch on shapes, with all weights on the device,
    /// tells.
    pub(crate) fn new(settings: &Settings, model: &Model) -> Result<Orders, SessionError> {
        let ranks = settings.ranks.as_ref();
        let is_divided = ranks.is_some_and(|ranks| ranks.zero == Zero::Weights);
        if settings.homes.weights == Home::Device && !is_divided {
            let none: Rc<[usize]> = Rc::new([]);
            return Ok(Orders {
                step: none.clone(),
                forward: none.clone(),
                update: none,
            });
        }
        Ok(Orders {
            step: of_a_step(settings)?.into(),
            forward: model.units_forward().into(),
            update: of_update(model),
        })
    }
}

fn of_update(model: &Model) -> Rc<[usize]> {
    let units = model.layout().units().iter().enumerate();
    let trained = units.filter(|(_, unit)| unit.trained.elements() > 0);
    trained.map(|(index, _)| index).collect()
}

fn of_a_step(settings: &Settings) -> Result<Vec<usize>, SessionError> {
    let settings = Settings {
        accum: 1,
        between: BetweenSteps::default(),
        checkpoint_copy: false,
        ranks: None,
        homes: Homes {
            states: Home::Device,
            weights: Home::Device,
            ..settings.homes.clone()
        },
        ..settings.clone()
    };
    let batch = shape_of_a_step(&settings, settings.seq);
    let (memory, flops) = (Memory::shapes(), FlopCounter::default());
    // The order is the same on every device, but not every device has every attention: cuDNN's is a GPU's alone.
    let mut session = Session::on_shapes(settings, &memory, Target::Cuda, flops)?;
    session.weights.keep_record();
    session.step(&batch)?;
    Ok(session.weights.take_record())
}
