//! What may become of a layer's activations: the few ways, of all, that are worth a choice.

use crate::activations::{planned_activations, total_bytes};
use crate::on_paper::{OnPaper, Paper, Part};
use memory::{Layer, Phase};
use model::{Action, Label, Policy};
use session::SessionError;
use settings::Settings;

/// An action for every label of a layer.
pub(crate) type Actions = [Action; Label::ALL.len()];

/// Most ways that a layer is given to choose from.
const ENTRIES_MAX: usize = 6;

/// Layers of the model in which ways are tried: a first one, one like all others, and the last, which has nothing to wait for.
const LAYERS: usize = 3;

/// A way, with what it keeps on the device and what it costs, for one micro-batch of one layer.
#[derive(Clone, Copy)]
struct Way {
    actions: Actions,
    kept_bytes: u64,
    seconds: f64,
}

/// The ways to choose from, the one that keeps most first: the Pareto set of bytes kept and time paid, thinned out to
/// [`ENTRIES_MAX`].
///
/// # Errors
/// None but a defect: shapes need no memory.
pub(crate) fn menu(
    settings: &Settings,
    paper: &Paper,
    offloads: bool,
) -> Result<Vec<Actions>, SessionError> {
    let layers = settings.model.layers.min(LAYERS);
    let mut small = settings.clone();
    small.model.layers = layers;
    small.accum = 1;
    let sizes = label_bytes(&small);
    let dropped: Vec<Label> = labels(&sizes)
        .filter(|label| *label != Label::BlockInput)
        .collect();
    let mut ways = Vec::new();
    for subset in 0..1usize << dropped.len() {
        let mut actions = [Action::Keep; Label::ALL.len()];
        let chosen = dropped.iter().enumerate();
        let chosen = chosen.filter(|(bit, _)| subset & (1 << bit) != 0);
        chosen.for_each(|(_, label)| actions[*label as usize] = Action::Recompute);
        small.policy = Policy::keep_all(layers);
        small.policy.set_labels(0..layers, actions);
        let step = paper.step(&small)?;
        let after = if layers > 1 {
            Part::Forward(1)
        } else {
            Part::Head
        };
        let at = |part| step.at_start(part).expect("every part has its turn");
        let kept_bytes = at(after) - at(Part::Forward(0));
        let alone = Way {
            actions,
            kept_bytes,
            seconds: step.busy(Phase::Recompute, Layer::Block(0)),
        };
        ways.push(alone);
        if offloads && settings.model.layers > 1 {
            ways.extend(with_offload(alone, &sizes, &step, paper));
        }
    }
    Ok(thinned(pareto(ways))
        .into_iter()
        .map(|way| way.actions)
        .collect())
}

/// Bytes of a layer's activations by label; 0 of what the model does not have.
fn label_bytes(settings: &Settings) -> [u64; Label::ALL.len()] {
    let architecture = settings.architecture();
    let planned = planned_activations(&architecture, settings);
    let of_layer = planned.partition_point(|activation| activation.layer == 0);
    Label::ALL.map(|label| total_bytes(&planned[..of_layer], Some(label)).all)
}

fn labels(sizes: &[u64]) -> impl Iterator<Item = Label> {
    Label::ALL
        .into_iter()
        .filter(|label| sizes[*label as usize] > 0)
}

/// A way with some of what it keeps on the host instead; what the link cannot move while neighbours compute costs time.
fn with_offload(way: Way, sizes: &[u64], step: &OnPaper, paper: &Paper) -> Vec<Way> {
    let kept: Vec<Label> = labels(sizes)
        .filter(|label| way.actions[*label as usize] == Action::Keep)
        .collect();
    let forward = step.busy(Phase::Forward, Layer::Block(0));
    let backward = step.busy(Phase::Backward, Layer::Block(0)) + way.seconds;
    let subsets = 1..1usize << kept.len();
    let offloaded = subsets.map(|subset| {
        let mut other = way;
        for (bit, label) in kept.iter().enumerate() {
            if subset & (1 << bit) != 0 {
                other.actions[*label as usize] = Action::Offload;
                other.kept_bytes = other.kept_bytes.saturating_sub(sizes[*label as usize]);
            }
        }
        let away = (way.kept_bytes - other.kept_bytes) as f64;
        let wait = |rate: f64, meanwhile: f64| (away / rate - meanwhile).max(0.0);
        other.seconds += wait(paper.rates.download, forward) + wait(paper.rates.upload, backward);
        other
    });
    offloaded.collect()
}

/// What no other way betters in both, the one that keeps most first. Of equals the first stays: it recomputes less.
fn pareto(mut ways: Vec<Way>) -> Vec<Way> {
    ways.sort_by(|a, b| {
        a.seconds
            .total_cmp(&b.seconds)
            .then(a.kept_bytes.cmp(&b.kept_bytes))
    });
    let mut least = u64::MAX;
    ways.retain(|way| {
        let is_less = way.kept_bytes < least;
        least = least.min(way.kept_bytes);
        is_less
    });
    ways
}

/// Both ends, and one after the other what enlarges the most the area that the chosen ones dominate.
fn thinned(ways: Vec<Way>) -> Vec<Way> {
    let mut chosen: Vec<usize> = vec![0, ways.len() - 1];
    chosen.dedup();
    while chosen.len() < ENTRIES_MAX.min(ways.len()) {
        let gain = |index: &usize| {
            let before = chosen.iter().rposition(|one| one < index).unwrap_or(0);
            let (more, less) = (&ways[chosen[before]], &ways[chosen[before + 1]]);
            let way = &ways[*index];
            let bytes = (more.kept_bytes - way.kept_bytes) as f64;
            bytes * (less.seconds - way.seconds)
        };
        let left = (0..ways.len()).filter(|index| !chosen.contains(index));
        let best = left.max_by(|a, b| gain(a).total_cmp(&gain(b)));
        chosen.push(best.expect("some are left"));
        chosen.sort();
    }
    chosen.into_iter().map(|index| ways[index]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(kept_bytes: u64, seconds: f64) -> Way {
        Way {
            actions: [Action::Keep; Label::ALL.len()],
            kept_bytes,
            seconds,
        }
    }

    #[test]
    fn only_what_no_other_betters_stays_and_both_ends_do() {
        let points = |ways: &[Way]| -> Vec<(u64, f64)> {
            ways.iter()
                .map(|way| (way.kept_bytes, way.seconds))
                .collect()
        };
        let ways = pareto(vec![
            way(90, 1.0),
            way(100, 0.0),
            way(95, 1.0),
            way(50, 2.0),
        ]);
        assert_eq!(points(&ways), [(100, 0.0), (90, 1.0), (50, 2.0)]);
        // A line has no corner; what is far below it is worth the most.
        let mut line: Vec<Way> = (0..20).map(|at| way(100 - 5 * at, at as f64)).collect();
        line[7] = way(8, 7.0);
        let thin = thinned(pareto(line));
        assert_eq!(thin.len(), ENTRIES_MAX.min(thin.len()));
        let thin = points(&thin);
        assert!(
            thin.contains(&(100, 0.0)) && thin.contains(&(8, 7.0)),
            "{thin:?}"
        );
    }
}
