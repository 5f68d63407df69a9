//! What of a run lives elsewhere than on the device: what its settings say, as those need it who keep it.

use crate::error::SessionError;
use memory::{Cover, Layer, Layout, Memory, Space};
use model::Model;
use optim::{Offload, Optimizer, StatesPlace};
use scratch::ScratchFolder;
use settings::{GradientsPlace, Reduce, Settings, Zero};
use units::{GradientsHome, Reduction, WeightsHome};

/// What the optimizer brings to the device to update a model; none if all of it is there.
pub(crate) fn offloaded(
    settings: &Settings,
    gradients: GradientsHome,
    model: &Model,
) -> Option<Offload> {
    let elsewhere = &settings.offload;
    // What a rank updates of reduced gradients is on its device.
    let gradients = match gradients {
        GradientsHome::Reduced(_) => GradientsHome::Device,
        other => other,
    };
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
    let units = units.filter(|unit| unit.trained.elements() > 0);
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
    optimizer: &mut Optimizer,
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

/// Units of weights on the device at a time, where nothing says how many: the one in use, and the next.
const SLOTS: usize = 2;

pub(crate) fn weights_home(settings: &Settings) -> WeightsHome {
    let slots = settings.offload.parameter_slots;
    match (&settings.ranks, slots) {
        (Some(ranks), _) if ranks.zero == Zero::Weights => WeightsHome::Divided {
            rank: ranks.rank,
            space: match slots {
                Some(_) => Space::Host,
                None => Space::Device,
            },
            slots: match ranks.overlap_param_gather {
                true => slots.unwrap_or(SLOTS),
                false => 1,
            },
            is_kept: !ranks.reshard_after_forward,
        },
        (Some(ranks), None) if ranks.zero != Zero::Replicated => WeightsHome::Gathered {
            rank: ranks.rank,
            is_overlapped: ranks.overlap_param_gather,
        },
        (_, None) => WeightsHome::Device,
        (_, Some(slots)) => WeightsHome::Host { slots },
    }
}

pub(crate) fn gradients_home(settings: &Settings) -> GradientsHome {
    if let Some(ranks) = &settings.ranks {
        let by_unit = ranks.zero >= Zero::Gradients;
        let every_micro_batch = ranks.reduce == Reduce::MicroBatch;
        return GradientsHome::Reduced(Reduction {
            rank: ranks.rank,
            by_unit,
            is_shared: ranks.zero == Zero::Replicated,
            every_micro_batch,
            sums_apart: by_unit || (every_micro_batch && settings.accum > 1),
            bucket_bytes: ranks.bucket_bytes,
            is_overlapped: ranks.overlap_grad_reduce,
        });
    }
    match settings.offload.gradients {
        GradientsPlace::Device => GradientsHome::Device,
        GradientsPlace::Pinned => GradientsHome::Host,
        GradientsPlace::Released => GradientsHome::Released,
    }
}

/// The elements that are updated here: all that are trained, or a rank's pieces of them.
pub(crate) fn updated(settings: &Settings, layout: &Layout) -> Cover {
    match &settings.ranks {
        Some(ranks) if ranks.zero != Zero::Replicated => layout.own_trained(ranks.rank),
        _ => layout.trained(),
    }
}
