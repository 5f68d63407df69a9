//! Which optimizer states live in host memory, and when they are updated.

use crate::settings::Settings;
use memory::Layer;
use model::Model;
use optim::Offload;

/// Optimizer states that live in pinned host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerOffload {
    /// Share of the blocks whose states are offloaded, from the last one on: the forward pass leaves those the most
    /// time. 1 takes the embedding too.
    pub fraction: f64,
    /// When they are updated.
    pub window: Window,
    /// Most bytes of a slab.
    pub slab_bytes: usize,
    /// Slabs that are on the device at a time.
    pub slots: usize,
}

impl Default for OptimizerOffload {
    /// As `configs/reference.toml` has it, switched on.
    fn default() -> OptimizerOffload {
        OptimizerOffload {
            fraction: 1.0,
            window: Window::Forward,
            slab_bytes: 64 << 20,
            slots: 3,
        }
    }
}

/// When offloaded states are updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// During the next forward pass, each part of the model just before it runs.
    Forward,
    /// At the end of the step.
    End,
}

impl OptimizerOffload {
    /// What the optimizer offloads of a model.
    pub(crate) fn of(&self, model: &Model) -> Offload {
        let mut parts = model.matrices_by_part();
        let blocks = model.config().layers;
        let offloaded = (self.fraction * blocks as f64).ceil() as usize;
        let first = blocks - offloaded.min(blocks);
        for (part, matrices) in &mut parts {
            let is_resident = match *part {
                Layer::Embedding => self.fraction < 1.0,
                Layer::Block(block) => block < first,
                _ => offloaded == 0,
            };
            if is_resident {
                matrices.clear();
            }
        }
        Offload {
            parts,
            slab_bytes: self.slab_bytes,
            slots: self.slots,
        }
    }
}

/// Whether outcomes of steps are complete only when the next forward pass has been asked for.
pub(crate) fn updates_in_forward(settings: &Settings) -> bool {
    let window = settings.offload.as_ref().map(|offload| offload.window);
    window == Some(Window::Forward)
}
