//! What a plan says in words, with figures.

use super::activations::{PlannedActivation, total_bytes};
use crate::settings::Settings;
use memory::format_bytes;
use model::{Attention, Label};

/// Sentences for the person who reads the plan.
pub(super) fn notes(settings: &Settings, activations: &[PlannedActivation]) -> Vec<String> {
    match settings.attention {
        Attention::Eager => vec![],
        Attention::Flash => vec![core_attn_under_flash(activations)],
    }
}

/// Selective recompute was made for stored scores; people expect more of it than it can give here.
fn core_attn_under_flash(activations: &[PlannedActivation]) -> String {
    let (all, _) = total_bytes(activations, None);
    let (statistics, _) = total_bytes(activations, Some(Label::CoreAttn));
    let output = total_bytes(activations, Some(Label::AttnValue)).0;
    format!(
        "under flash attention no scores are stored; `core_attn` drops the log-sum-exp alone, {} of the {} of activations \
         ({:.2} %), and runs the forward kernel again; the output ({}) is kept for its projection",
        format_bytes(statistics),
        format_bytes(all),
        100.0 * statistics as f64 / all as f64,
        format_bytes(output),
    )
}
