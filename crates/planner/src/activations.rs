//! The table of saved activations, with the bytes and the action of each.

use model::{Action, Architecture, BatchShape, Block, Label};
use serde::Serialize;
use settings::Settings;
use std::ops::Range;

/// One activation of one layer, for one micro-batch.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedActivation {
    /// The block.
    pub layer: usize,
    /// The smallest label that covers it.
    pub label: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Its shape; where a rank has several parts of each sequence, that of one.
    pub shape: Vec<usize>,
    /// Its type.
    pub dtype: &'static str,
    /// Its leased bytes, of all parts.
    pub bytes: u64,
    /// Whether it is kept, recomputed or offloaded.
    pub action: Action,
}

/// Every activation of every layer.
pub(crate) fn planned_activations(
    architecture: &Architecture,
    settings: &Settings,
) -> Vec<PlannedActivation> {
    let batch = BatchShape {
        rows: settings.micro_batch,
        seq: settings.part_seq(),
    };
    let parts = settings.own_parts().count as u64;
    let per_layer = |(layer, (block, actions)): (usize, (&'_ Block, Vec<Action>))| {
        let activations = block.activations().zip(actions);
        let planned = activations.map(|((activation, extent), action)| {
            let (shape, dtype) = extent.resolve(batch, settings.dtype);
            let bytes = shape.elements() * dtype.size_in_bytes();
            PlannedActivation {
                layer,
                label: activation.label().name(),
                name: activation.name(),
                shape: shape.as_slice().to_vec(),
                dtype: dtype.as_str(),
                bytes: parts * memory::round_up(bytes as u64),
                action,
            }
        });
        planned.collect::<Vec<_>>()
    };
    let own = settings.own_layers(architecture.blocks.len());
    let of_run = |own: Range<usize>| {
        let actions = architecture.actions_of(&settings.policy, &own);
        let blocks = architecture.blocks.iter().zip(actions).enumerate();
        let own = blocks.skip(own.start).take(own.len());
        own.flat_map(per_layer).collect::<Vec<_>>()
    };
    own.into_iter().flat_map(of_run).collect()
}

/// Sums of bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct TotalBytes {
    /// All of them.
    pub(crate) all: u64,
    /// Those that stay in device memory.
    pub(crate) kept: u64,
    /// Those that are on the host between the passes.
    pub(crate) offloaded: u64,
}

/// Bytes of each layer, of one label or of all.
pub(crate) fn bytes_by_layer(
    activations: &[PlannedActivation],
    label: Option<Label>,
) -> impl Iterator<Item = TotalBytes> {
    let layers = activations.chunk_by(|one, next| one.layer == next.layer);
    layers.map(move |layer| total_bytes(layer, label))
}

/// Bytes over all layers, of one label or of all.
pub(crate) fn total_bytes(activations: &[PlannedActivation], label: Option<Label>) -> TotalBytes {
    let wanted = |activation: &&PlannedActivation| {
        label.is_none_or(|label| activation.label == label.name())
    };
    let mut total = TotalBytes::default();
    for activation in activations.iter().filter(wanted) {
        total.all += activation.bytes;
        match activation.action {
            Action::Keep => total.kept += activation.bytes,
            Action::Offload => total.offloaded += activation.bytes,
            Action::Recompute => {}
        }
    }
    total
}
