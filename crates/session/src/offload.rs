//! What an update needs that is not on the device, and in which order it comes.

use memory::Layer;
use model::Model;
use optim::{Offload, StatesPlace};
use settings::Settings;
use units::GradientsHome;

/// What the optimizer brings to the device to update a model; none if all of it is there.
pub(crate) fn offloaded(
    settings: &Settings,
    gradients: GradientsHome,
    model: &Model,
) -> Option<Offload> {
    let elsewhere = &settings.offload;
    if !elsewhere.streams_updates() && gradients == GradientsHome::Device {
        return None;
    }
    let states = match &elsewhere.states {
        settings::StatesPlace::Device => None,
        settings::StatesPlace::Pinned => Some(StatesPlace::Pinned),
        settings::StatesPlace::Disk(_) => Some(StatesPlace::Disk),
    };
    let blocks = model.layers();
    let offloaded = (elsewhere.fraction * blocks as f64).ceil() as usize;
    let first = blocks - offloaded.min(blocks);
    let is_away = |part: Layer| {
        let is_of_fraction = match part {
            Layer::Embedding => elsewhere.fraction >= 1.0,
            Layer::Block(block) => block >= first,
            _ => offloaded > 0,
        };
        states.is_some() && is_of_fraction
    };
    let units = model.layout().units().iter();
    let mut parts: Vec<(Layer, bool)> = units.map(|unit| (unit.part, is_away(unit.part))).collect();
    if gradients == GradientsHome::Released {
        parts.reverse();
    }
    Some(Offload {
        parts,
        states: states.unwrap_or(StatesPlace::Pinned),
        gradients,
        gradient_dtype: settings.states.gradients,
        streams_weights: elsewhere.parameter_slots.is_some(),
        chunk_bytes: elsewhere.chunk_bytes,
        slots: elsewhere.slots,
    })
}
