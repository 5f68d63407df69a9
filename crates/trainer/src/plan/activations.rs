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

/// Bytes over all layers, of everything and of what is kept; of one label or of all.
pub(super) fn total_bytes(activations: &[PlannedActivation], label: Option<Label>) -> (u64, u64) {
    let wanted = |activation: &&PlannedActivation| {
        label.is_none_or(|label| activation.label == label.name())
    };
    activations
        .iter()
        .filter(wanted)
        .fold((0, 0), |(all, kept), activation| {
            let is_kept = activation.action == Action::Keep;
            (
                all + activation.bytes,
                kept + if is_kept { activation.bytes } else { 0 },
            )
        })
}
