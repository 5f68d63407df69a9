//! Optimizer states in host memory: which ones, and when they are updated.

use crate::settings::Settings;
use kernels::{KernelError, Kernels, Traffic};
use memory::{Arena, Layer, Memory, Phase};
use model::{Beside, Model};
use optim::{AdamW, Offload};

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
        for (part, matrices) in parts.iter_mut().enumerate() {
            let is_resident = match layer(part, blocks) {
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

/// The part of the model that [`Model::matrices_by_part`] lists at an index.
fn layer(part: usize, blocks: usize) -> Layer {
    match part.checked_sub(1) {
        None => Layer::Embedding,
        Some(block) if block < blocks => Layer::Block(block),
        Some(_) => Layer::Head,
    }
}

fn part(layer: Layer, blocks: usize) -> usize {
    match layer {
        Layer::Embedding => 0,
        Layer::Block(block) => 1 + block,
        Layer::Head | Layer::Whole => 1 + blocks,
    }
}

/// What crosses for the optimizer while a step passes through the model.
#[derive(Clone, Copy, Default)]
pub(crate) struct UpdateTraffic {
    /// For the update of the step before.
    pub(crate) before: Traffic,
    /// For this step's.
    pub(crate) prefetched: Traffic,
}

impl UpdateTraffic {
    pub(crate) fn total(&self) -> Traffic {
        self.before.plus(self.prefetched)
    }
}

/// The optimizer beside the passes of a step: updates what the step before has left, and fetches what this one needs.
pub(crate) struct Updating<'a> {
    pub(crate) kernels: &'a dyn Kernels,
    pub(crate) memory: &'a Memory,
    pub(crate) optimizer: &'a mut AdamW,
    pub(crate) blocks: usize,
    /// Whether offloaded states are updated in forward passes at all.
    pub(crate) in_forward: bool,
    pub(crate) is_first_micro_batch: bool,
    pub(crate) is_last_micro_batch: bool,
    pub(crate) traffic: &'a mut UpdateTraffic,
}

impl Beside for Updating<'_> {
    fn before_forward(
        &mut self,
        layer: Layer,
        parameters: &mut Arena,
        gradients: &Arena,
    ) -> Result<(), KernelError> {
        if !(self.in_forward && self.is_first_micro_batch) {
            return Ok(());
        }
        // Entered in the first step too, though nothing is pending then, so that all steps have the same peaks.
        let _place = self.memory.enter(Phase::Optimizer, layer);
        let before = self.kernels.traffic();
        let part = part(layer, self.blocks);
        self.optimizer
            .update_part(self.kernels, parameters, gradients, part)?;
        let crossed = self.kernels.traffic().since(before);
        self.traffic.before = self.traffic.before.plus(crossed);
        Ok(())
    }

    fn before_backward(&mut self) -> Result<(), KernelError> {
        if self.is_last_micro_batch {
            let before = self.kernels.traffic();
            self.optimizer.prefetch(self.kernels)?;
            let crossed = self.kernels.traffic().since(before);
            self.traffic.prefetched = self.traffic.prefetched.plus(crossed);
        }
        Ok(())
    }
}

/// Whether outcomes of steps are complete only when the next forward pass has been asked for.
pub(crate) fn updates_in_forward(settings: &Settings) -> bool {
    let window = settings.offload.as_ref().map(|offload| offload.window);
    window == Some(Window::Forward)
}
