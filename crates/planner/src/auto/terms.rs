//! Computes the peak and the time of any assignment from sums and maxima of what each layer contributes.
//!
//! While layer `l` is at work in either direction, these are live: what the layers before it keep, what the layer
//! before it is copying from or to the device, and what `l` itself needs, which depends only on its own entry. So one
//! step on paper for each entry, with all layers taking it, is enough to compute every assignment.

use super::menu::Menu;
use crate::activations::{bytes_by_layer, planned_activations};
use crate::on_paper::{OnPaper, Paper, Part};
use memory::{Layer, Phase};
use model::Architecture;
use session::Result;
use settings::Settings;

/// What a layer contributes under an entry of the menu.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Term {
    /// Bytes that stay on the device until its backward pass.
    pub(crate) kept: u64,
    /// Bytes that are also on the device while a neighbour is at work, because they are copied from or to the host.
    pub(crate) away: u64,
    /// The most that is live while it is at work, without what layers before it keep or are copying.
    pub(crate) at_work: u64,
    /// Picoseconds of its passes. Integers, so that sums do not depend on their order.
    work: u64,
    /// Picoseconds that its forward pass takes.
    forward: u64,
    /// Picoseconds that its backward pass takes, with its replays.
    backward: u64,
    /// Picoseconds that its copies to the host take.
    download: u64,
    /// Picoseconds that its copies from the host take.
    upload: u64,
}

/// The terms of all layers, and the peaks of the other parts of a step.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// The terms of each layer, one for each entry of its menu.
    pub(crate) layers: Vec<Vec<Term>>,
    /// The most that is live in the head, without what the layers keep.
    pub(crate) head: u64,
    /// The most that is live while no layer keeps anything.
    pub(crate) rest: u64,
}

impl Term {
    /// Picoseconds by which the copies of the layer before outlast this layer's passes.
    fn waits_for(&self, before: &Term) -> u64 {
        before.download.saturating_sub(self.forward) + before.upload.saturating_sub(self.backward)
    }

    /// Picoseconds that this layer adds to a micro-batch, after a layer with the term `before`.
    pub(crate) fn cost(&self, before: Option<&Term>) -> u64 {
        self.work + before.map_or(0, |before| self.waits_for(before))
    }
}

impl Terms {
    /// Makes one step on paper for each entry; in each, all layers take the same entry.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub(crate) fn of(settings: &Settings, paper: &Paper, menu: &Menu) -> Result<Terms> {
        let count = settings.model.layers;
        let mut terms = Terms {
            layers: vec![Vec::new(); count],
            head: 0,
            rest: 0,
        };
        let architecture = settings.architecture();
        for entry in 0..menu.most_entries() {
            let mut uniform = settings.clone();
            uniform.policy = menu.policy(|_| entry);
            let step = paper.step(&uniform)?;
            let away = away(&architecture, &uniform);
            let mut kept_before = 0;
            for layer in 0..count {
                let on_the_way = layer.checked_sub(1).map_or(0, |before| away[before]);
                let start = step.start(Part::Forward(layer));
                let next = match layer + 1 < count {
                    true => step.start(Part::Forward(layer + 1)),
                    false => step.start(Part::Head),
                };
                let of_layer = |part| [Part::Forward(layer), Part::Backward(layer)].contains(&part);
                let most = step.most(of_layer).expect("every layer has its turn");
                let term = Term {
                    kept: less(next + on_the_way, start + away[layer]),
                    away: away[layer],
                    at_work: less(most, kept_before + on_the_way),
                    ..term_of_time(&step, layer, away[layer], paper)
                };
                kept_before += term.kept;
                if entry < menu.of_layer(layer).len() {
                    terms.layers[layer].push(term);
                }
            }
            let most = |part: Part| step.most(|other| other == part).unwrap_or(0);
            terms.head = terms.head.max(less(most(Part::Head), kept_before));
            terms.rest = terms.rest.max(most(Part::Rest));
        }
        Ok(terms)
    }

    /// The peak of an assignment of entries to layers.
    pub(crate) fn peak(&self, entries: &[usize]) -> u64 {
        let (mut kept, mut away, mut peak) = (0, 0, self.rest);
        for (layer, entry) in self.layers.iter().zip(entries) {
            let term = &layer[*entry];
            peak = peak.max(kept + away + term.at_work);
            (kept, away) = (kept + term.kept, term.away);
        }
        peak.max(kept + self.head)
    }

    /// Picoseconds of an assignment's layers for a micro-batch. The search computes the same sum as it goes.
    #[cfg(test)]
    pub(crate) fn cost(&self, entries: &[usize]) -> u64 {
        let terms: Vec<&Term> = self
            .layers
            .iter()
            .zip(entries)
            .map(|(layer, entry)| &layer[*entry])
            .collect();
        let before = [None].into_iter().chain(terms.iter().copied().map(Some));
        terms
            .iter()
            .zip(before)
            .map(|(term, before)| term.cost(before))
            .sum()
    }
}

impl OnPaper {
    fn start(&self, part: Part) -> u64 {
        self.at_start(part).expect("every part has its turn")
    }
}

/// Subtracts what layers before keep and copy from what is live. If weights or gradients come and go, their live bytes
/// change over time too. The terms are then only close to the truth, so the choice is planned before it is taken.
fn less(all: u64, part: u64) -> u64 {
    all.saturating_sub(part)
}

/// The times of a layer's term, without bytes.
fn term_of_time(step: &OnPaper, layer: usize, away: u64, paper: &Paper) -> Term {
    let busy = |phase| step.busy(phase, Layer::Block(layer));
    let forward = busy(Phase::Forward);
    let backward = busy(Phase::Backward) + busy(Phase::Recompute);
    Term {
        kept: 0,
        away: 0,
        at_work: 0,
        work: picoseconds(forward + backward),
        forward: picoseconds(forward),
        backward: picoseconds(backward),
        download: picoseconds(away as f64 / paper.rates.download),
        upload: picoseconds(away as f64 / paper.rates.upload),
    }
}

/// Seconds in whole picoseconds.
pub(crate) fn picoseconds(seconds: f64) -> u64 {
    (seconds * 1e12).round() as u64
}

/// Bytes of each layer that are offloaded; none for the last layer.
fn away(architecture: &Architecture, settings: &Settings) -> Vec<u64> {
    let planned = planned_activations(architecture, settings);
    let layers = bytes_by_layer(&planned, None);
    layers.map(|layer| layer.offloaded).collect()
}
