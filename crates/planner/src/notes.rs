//! A plan's notes: sentences with figures.

use super::activations::{PlannedActivation, bytes_by_layer, total_bytes};
use super::fullest_rank::fullest_rank;
use memory::format_bytes;
use model::stages::Delta;
use model::{Action, Label, Policy};
use settings::Settings;

/// Sentences for the person who reads the plan.
pub(crate) fn notes(settings: &Settings, activations: &[PlannedActivation]) -> Vec<String> {
    let mut notes = Vec::new();
    if !settings.attention.stores_scores() {
        notes.push(core_attn_under_flash(activations));
    }
    if !settings.policy.offloaded.is_empty() {
        notes.push(last_layer_under_offload(settings, activations));
    }
    notes.extend(labels_without_activations(&settings.policy, activations));
    notes
}

/// A label may be any model's of the family, and this one may have nothing under it. A label that another one took along is
/// not named, nor is any where all are dropped.
fn labels_without_activations(
    policy: &Policy,
    activations: &[PlannedActivation],
) -> Option<String> {
    let labels = policy.labels;
    let is_kept = |label: Label| {
        (0..policy.layers()).all(|layer| policy.actions(layer).of(label) == Action::Keep)
    };
    let covers = |outer: Label, inner: Label| labels.covered(outer).any(|label| label == inner);
    let is_empty = |label: Label| {
        !activations
            .iter()
            .any(|one| labels.covered(label).any(|inner| inner.name() == one.label))
    };
    let is_taken_along = |label: Label| {
        labels
            .iter()
            .any(|outer| outer != label && !is_kept(outer) && covers(outer, label))
    };
    if !labels.named().any(is_kept) {
        return None;
    }
    let named = labels.named().filter(|label| !is_kept(*label));
    let idle = named.filter(|label| is_empty(*label) && !is_taken_along(*label));
    let idle: Vec<String> = idle.map(|label| format!("`{}`", label.name())).collect();
    (!idle.is_empty()).then(|| {
        format!(
            "this model has no activations under {}; leaving that out changes nothing",
            idle.join(", ")
        )
    })
}

/// Says which rank needs most memory, where ranks differ.
pub(crate) fn of_fullest_rank(settings: &Settings) -> Option<String> {
    let fullest = fullest_rank(settings)?;
    let whose = match fullest == settings.rank_of_all() {
        true => "this is its plan",
        false => "what is chosen for all, and what other settings change, is planned for it",
    };
    Some(format!(
        "ranks keep different amounts of codes of weights: rank {} keeps most, and none needs more memory; {whose}",
        fullest.number
    ))
}

/// The last layer keeps its activations: its backward pass runs first, so they would be needed again at once.
fn last_layer_under_offload(settings: &Settings, activations: &[PlannedActivation]) -> String {
    let labels = &settings.policy.offloaded;
    if settings.model.layers == 1 {
        return format!(
            "nothing is offloaded: the last layer keeps its activations, since its backward pass runs first, and this model \
             has no other layer; leave offload.activations = \"{labels}\" out"
        );
    }
    let offloaded = total_bytes(activations, None).offloaded;
    let layers = bytes_by_layer(activations, None);
    let largest = layers.map(|layer| layer.offloaded).max().unwrap_or(0);
    format!(
        "{} of activations a micro-batch wait on the host ({labels} of all layers but the last, whose backward pass runs \
         first); those of one layer ({}) are on their way beside the block at work, so the peak falls by as much less",
        format_bytes(offloaded),
        format_bytes(largest),
    )
}

/// Selective recompute was made for stored scores, so under flash attention it saves less than people expect.
fn core_attn_under_flash(activations: &[PlannedActivation]) -> String {
    let all = total_bytes(activations, None).all;
    let statistics = total_bytes(activations, Some(Label::CORE_ATTN)).all;
    let output = total_bytes(activations, Some(Label::ATTN_VALUE)).all;
    let has_states = activations
        .iter()
        .any(|one| one.name == Delta::STATES.name());
    let dropped = match has_states {
        true => "the states of the gated delta rule and the log-sum-exp",
        false => "the log-sum-exp alone",
    };
    format!(
        "under flash attention no scores are stored; `core_attn` drops {dropped}, {} of the {} of activations \
         ({:.2} %), and runs the forward kernel again; the output ({}) is kept for its projection",
        format_bytes(statistics),
        format_bytes(all),
        100.0 * statistics as f64 / all as f64,
        format_bytes(output),
    )
}
