//! What freezing parameters saves.

use crate::activations::planned_activations;
use kernels::Target;
use kernels::meta::FlopCounter;
use memory::{Entry, Layout, Memory, format_bytes};
use model::Action;
use optim::Hyperparameters;
use serde::Serialize;
use session::{Result, Session};
use settings::Settings;
use std::collections::BTreeMap;

/// The effect of not training some parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedFreeze {
    /// Number of parameters that are trained.
    pub trained_parameters: usize,
    /// Bytes of gradients and optimizer states that frozen parameters do not take, on device, host and disk.
    pub saved_bytes: u64,
    /// Bytes of activations, by label, that are not kept between forward and backward because only what is frozen would
    /// need them.
    pub saved_activation_bytes: BTreeMap<&'static str, u64>,
    /// Bytes of the weights, frozen and trained, by the type that they are stored in, if some are stored as codes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub stored_bytes: BTreeMap<&'static str, u64>,
    /// Number of parameters that are not stored as codes.
    #[serde(skip)]
    pub plain_parameters: usize,
    /// Whether all but adapters is frozen.
    #[serde(skip)]
    pub by_adapters: bool,
}

impl PlannedFreeze {
    /// Compares with a session that trains everything; none if nothing is frozen.
    pub(crate) fn new(
        settings: &Settings,
        target: Target,
        session: &Session,
    ) -> Result<Option<PlannedFreeze>> {
        if settings.freeze.is_empty() && settings.lora.is_none() {
            return Ok(None);
        }
        let everything = Settings {
            freeze: Vec::new(),
            lora: None,
            optimizer: Hyperparameters {
                faster: None,
                ..settings.optimizer
            },
            ..settings.clone()
        };
        let (before, now) = (kept(&everything), kept(settings));
        let saved_activation_bytes = before.into_iter().filter_map(|(label, bytes)| {
            let saved = bytes - now.get(label).copied().unwrap_or(0).min(bytes);
            (saved > 0).then_some((label, saved))
        });
        let (memory, flops) = (Memory::shapes(), FlopCounter::default());
        let everything = Session::on_shapes(everything, &memory, target, flops)?;
        let saved = everything.training_bytes();
        Ok(Some(PlannedFreeze {
            trained_parameters: session.model().layout().trained_parameters(),
            saved_bytes: saved.saturating_sub(session.training_bytes()),
            saved_activation_bytes: saved_activation_bytes.collect(),
            stored_bytes: stored_bytes(session.model().layout(), settings),
            plain_parameters: plain_parameters(session.model().layout()),
            by_adapters: settings.lora.is_some(),
        }))
    }

    /// The same as a sentence.
    pub(crate) fn note(&self, parameters: usize) -> String {
        let by = match self.by_adapters {
            true => "--lora",
            false => "train.freeze",
        };
        let mut kept_less: Vec<String> = Vec::new();
        for (label, bytes) in &self.saved_activation_bytes {
            kept_less.push(format!("{label} {}", format_bytes(*bytes)));
        }
        let activations = match kept_less.is_empty() {
            true => String::new(),
            false => format!("; of activations are kept less: {}", kept_less.join(", ")),
        };
        let saved = format!(
            "{} of {parameters} parameters are trained; freezing the others ({by}) saves {} of gradients and optimizer \
             states ({} bytes){activations}",
            self.trained_parameters,
            format_bytes(self.saved_bytes),
            self.saved_bytes
        );
        match self.stored_bytes.is_empty() {
            true => saved,
            false => format!("{saved}; {}", self.storage_note(parameters)),
        }
    }

    /// The types of the weights, and a warning if more than a hundredth of them is in none of few bits.
    fn storage_note(&self, parameters: usize) -> String {
        let stored = self.stored_bytes.iter();
        let stored = stored.map(|(name, bytes)| format!("{name} {}", format_bytes(*bytes)));
        let stored = stored.collect::<Vec<_>>().join(", ");
        let share = self.plain_parameters as f64 / parameters as f64;
        let warning = match share > 0.01 {
            false => String::new(),
            true => format!(
                "; {:.1} % of the weights are not in few bits: embedding, head, vectors and adapters never are",
                100.0 * share
            ),
        };
        format!("weights are stored as {stored}{warning}")
    }
}

/// Bytes of the weights by the type that they are stored in; none if none are codes.
fn stored_bytes(layout: &Layout, settings: &Settings) -> BTreeMap<&'static str, u64> {
    let mut stored = BTreeMap::new();
    if layout.coded().elements() == 0 {
        return stored;
    }
    for entry in layout.entries() {
        let (name, bytes) = match entry.codes {
            Some(codes) => (codes.as_str(), codes.places(entry.elements()).bytes),
            None => {
                let dtype = entry.dtype.unwrap_or(settings.dtype);
                (
                    dtype.as_str(),
                    entry.padded_range().len() * dtype.size_in_bytes(),
                )
            }
        };
        *stored.entry(name).or_default() += bytes as u64;
    }
    stored
}

/// The number of parameters that are not stored as codes.
fn plain_parameters(layout: &Layout) -> usize {
    let coded = layout
        .entries()
        .iter()
        .filter(|entry| entry.codes.is_some());
    layout.parameters() - coded.map(Entry::elements).sum::<usize>()
}

/// Bytes of activations that are kept between forward and backward, or offloaded, by label.
fn kept(settings: &Settings) -> BTreeMap<&'static str, u64> {
    let mut kept = BTreeMap::new();
    let planned = planned_activations(&settings.architecture(), settings);
    for one in planned.iter().filter(|one| one.action != Action::Recompute) {
        *kept.entry(one.label).or_default() += one.bytes;
    }
    kept
}
