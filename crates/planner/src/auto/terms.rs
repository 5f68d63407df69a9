//! The peak and the time of any assignment, as sums and maxima of figures that each layer contributes.
//!
//! While layer `l` is at work in either direction, live are: what the layers before it keep, what the one before it has on
//! its way from or to the device, and what `l` itself needs, which depends on its own entry alone. So one step on paper for
//! each entry, taken by all layers, says everything about every assignment.

use super::menu::Menu;
use crate::activations::{bytes_by_layer, planned_activations};
use crate::on_paper::{OnPaper, Paper, Part};
use memory::{Layer, Phase};
use model::Architecture;
use session::SessionError;
use settings::Settings;

/// What a layer contributes under an entry of the menu.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Term {
    /// Bytes that stay on the device until its backward pass.
    pub(crate) kept: u64,
    /// Bytes that are on the device too while a neighbour is at work, on their way to or from the host.
    pub(crate) away: u64,
    /// The most that is live while it is at work, less what layers before it keep or have on the way.
    pub(crate) at_work: u64,
    /// Picoseconds of its work: whole numbers, so that sums do not depend on their order.
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

/// The figures of all layers, and of what is beside them.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Those of each layer, one for each entry of the menu.
    pub(crate) layers: Vec<Vec<Term>>,
    /// The most that is live in the head, less what all layers keep.
    pub(crate) head: u64,
    /// The most that is live where no layer keeps anything.
    pub(crate) rest: u64,
}

impl Term {
    /// Picoseconds by which copies of the layer before outlast this layer's work.
    fn waits_for(&self, before: &Term) -> u64 {
        before.download.saturating_sub(self.forward) + before.upload.saturating_sub(self.backward)
    }

    /// What this layer takes of a micro-batch, after one with that term.
    pub(crate) fn cost(&self, before: Option<&Term>) -> u64 {
        self.work + before.map_or(0, |before| self.waits_for(before))
    }
}

impl Terms {
    /// Makes a step on paper for each entry, which layers of all kinds take at once.
    ///
    /// # Errors
    /// None but a defect: shapes need no memory.
    pub(crate) fn of(
        settings: &Settings,
        paper: &Paper,
        menu: &Menu,
    ) -> Result<Terms, SessionError> {
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

    /// The picoseconds that an assignment adds to a micro-batch; the search sums them up as it goes.
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

/// What layers before keep, and what is on the way, is part of what is live. Where weights or gradients come and go, so are
/// more of them at one time than at another: there, what follows is near the truth, and is planned before it is chosen.
fn less(all: u64, part: u64) -> u64 {
    all.saturating_sub(part)
}

/// Picoseconds of a layer's work and copies; no bytes.
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

/// Bytes that each layer has on the host; the last one keeps its own.
fn away(architecture: &Architecture, settings: &Settings) -> Vec<u64> {
    let planned = planned_activations(architecture, settings);
    let layers = bytes_by_layer(&planned, None);
    layers.map(|layer| layer.offloaded).collect()
}
