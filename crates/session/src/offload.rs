//! What of a run lives elsewhere than on the device: what its settings say, as those need it who keep it.

use crate::error::SessionError;
use memory::{Layer, Memory};
use model::Model;
use optim::{AdamW, Offload, StatesPlace};
use scratch::ScratchFolder;
use settings::{GradientsPlace, Settings};
use units::{GradientsHome, WeightsHome};

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

/// Makes the file of states that are to be on a disk, before anything is computed; none on shapes.
pub(crate) fn states_on_disk(
    settings: &Settings,
    memory: &Memory,
    optimizer: &mut AdamW,
) -> Result<Option<ScratchFolder>, SessionError> {
    let (settings::StatesPlace::Disk(path), Some(bytes), false) = (
        &settings.offload.states,
        optimizer.disk_bytes(),
        memory.is_shapes(),
    ) else {
        return Ok(None);
    };
    let folder = ScratchFolder::open(path)?;
    optimizer.use_file(folder.create("optimizer-states", bytes)?);
    Ok(Some(folder))
}

pub(crate) fn weights_home(settings: &Settings) -> WeightsHome {
    match settings.offload.parameter_slots {
        None => WeightsHome::Device,
        Some(slots) => WeightsHome::Host { slots },
    }
}

pub(crate) fn gradients_home(settings: &Settings) -> GradientsHome {
    match settings.offload.gradients {
        GradientsPlace::Device => GradientsHome::Device,
        GradientsPlace::Pinned => GradientsHome::Host,
        GradientsPlace::Released => GradientsHome::Released,
    }
}
