//! The table of saved activations, with bytes and what becomes of them.

use super::dtype_name;
use crate::settings::Settings;
use model::{Action, Label, Model};
use serde::Serialize;

/// One activation of one layer, for one micro-batch.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedActivation {
    /// The block.
    pub layer: usize,
    /// The smallest group that a policy names it by.
    pub label: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its type.
    pub dtype: &'static str,
    /// Its leased bytes.
    pub bytes: u64,
    /// What the policy does with it.
    pub action: Action,
}

/// Every activation of every layer.
pub(super) fn planned_activations(model: &Model, settings: &Settings) -> Vec<PlannedActivation> {
    let per_layer = |layer| {
        let present = model.table().activations();
        present.map(move |activation| {
            let (shape, dtype) =
                model.activation_shape(activation, settings.micro_batch, settings.seq);
            let bytes = shape.elements() * dtype.size_in_bytes();
            PlannedActivation {
                layer,
                label: activation.label().name(),
                name: activation.name(),
                shape: shape.as_slice().to_vec(),
                dtype: dtype_name(dtype),
                bytes: memory::round_up(bytes as u64),
                action: settings.policy.action(layer, activation),
            }
        })
    };
    (0..model.config().layers).flat_map(per_layer).collect()
}

/// Bytes over all layers.
#[derive(Clone, Copy, Default)]
pub(super) struct TotalBytes {
    /// Of everything.
    pub(super) all: u64,
    /// Of what stays in device memory.
    pub(super) kept: u64,
    /// Of what waits on the host.
    pub(super) offloaded: u64,
}

/// Bytes over all layers, of one label or of all.
pub(super) fn total_bytes(activations: &[PlannedActivation], label: Option<Label>) -> TotalBytes {
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
