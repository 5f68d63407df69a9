//! Which optimizer states live in host memory, and when they are updated.

use memory::Layer;
use model::Model;
use optim::Offload;
use settings::{OptimizerOffload, Settings, Window};

/// What the optimizer offloads of a model.
pub(crate) fn offloaded(offload: &OptimizerOffload, model: &Model) -> Offload {
    let mut parts = model.architecture().matrices_by_part(model.layout());
    let blocks = model.layers();
    let offloaded = (offload.fraction * blocks as f64).ceil() as usize;
    let first = blocks - offloaded.min(blocks);
    for (part, matrices) in &mut parts {
        let is_resident = match *part {
            Layer::Embedding => offload.fraction < 1.0,
            Layer::Block(block) => block < first,
            _ => offloaded == 0,
        };
        if is_resident {
            matrices.clear();
        }
    }
    Offload {
        parts,
        chunk_bytes: offload.chunk_bytes,
        slots: offload.slots,
    }
}

/// Whether outcomes of steps are complete only when the next forward pass has been asked for.
pub(crate) fn updates_in_forward(settings: &Settings) -> bool {
    let window = settings.offload.as_ref().map(|offload| offload.window);
    window == Some(Window::Forward)
}
