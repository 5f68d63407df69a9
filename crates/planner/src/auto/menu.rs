//! For each kind of block, the few ways to keep, recompute or offload activations that are worth choosing from.

use crate::activations::{planned_activations, total_bytes};
use crate::on_paper::{OnPaper, Paper};
use memory::{Layer, Phase};
use model::{Action, Actions, Label, Labels, Policy};
use session::Result;
use settings::Settings;
use std::collections::BTreeMap;

/// The most ways that a kind of block offers to choose from.
const ENTRIES_MAX: usize = 6;

/// Every set of labels is tried for kinds of at most this many: a dense block has so many besides its input.
pub(super) const EXHAUSTIVE_MAX: usize = 7;

/// If there are too many sets to try all, the neighbours of this many best ones are tried next.
const BEAM: usize = 12;

/// Ways are tried in a model that has this many layers after the first one of the last kind: a usual one, and the
/// model's last layer, whose activations do not wait for another layer's backward pass.
const LAYERS_AFTER: usize = 2;

/// An action for every label of a layer, with the bytes that it keeps on the device and its cost, for one micro-batch.
#[derive(Clone, Copy)]
struct Way {
    actions: Actions,
    kept_bytes: u64,
    seconds: f64,
    /// Seconds of the forward pass, and of the backward pass without replays: copies can hide behind these.
    passes: [f64; 2],
}

/// The ways that layers of a model choose from.
pub(crate) struct Menu {
    /// The kind of each layer's block.
    kinds: Vec<usize>,
    labels: Labels,
    /// The ways of each kind, the one that keeps most first: the Pareto set of bytes kept and time, thinned out to
    /// [`ENTRIES_MAX`].
    entries: Vec<Vec<Actions>>,
}

impl Menu {
    /// Tries ways for every kind of block: all of them for kinds of at most `exhaustive` labels.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub(crate) fn new(
        settings: &Settings,
        paper: &Paper,
        offloads: bool,
        exhaustive: usize,
    ) -> Result<Menu> {
        let kinds = settings.architecture().kinds();
        let mut trials = Trials::new(settings, &kinds, exhaustive);
        while trials.another_round(paper)? {}
        let away = offloads && kinds.len() > 1;
        let ways = trials.of_kinds.into_iter();
        let ways = ways.map(|kind| kind.ways(paper, away));
        let entries = ways.map(|ways| {
            let thin = thinned(pareto(ways), ENTRIES_MAX).into_iter();
            thin.map(|way| way.actions).collect()
        });
        Ok(Menu {
            labels: settings.policy.labels,
            entries: entries.collect(),
            kinds,
        })
    }

    /// The ways of a layer.
    pub(crate) fn of_layer(&self, layer: usize) -> &[Actions] {
        &self.entries[self.kinds[layer]]
    }

    /// The most ways that a layer has.
    pub(crate) fn most_entries(&self) -> usize {
        self.entries.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The policy in which each layer takes the way with a given number, or its last if it has fewer.
    pub(crate) fn policy(&self, entry: impl Fn(usize) -> usize) -> Policy {
        let mut policy = Policy::keep_all_of(self.labels, self.kinds.len());
        for layer in 0..self.kinds.len() {
            let ways = self.of_layer(layer);
            let way = ways[entry(layer).min(ways.len() - 1)];
            policy.set_labels(layer..layer + 1, way);
        }
        policy
    }
}

/// Ways that are tried in a small model, one of every kind at once.
struct Trials {
    small: Settings,
    kinds: Vec<usize>,
    of_kinds: Vec<Kind>,
}

impl Trials {
    fn new(settings: &Settings, kinds: &[usize], exhaustive: usize) -> Trials {
        let count = kinds.iter().max().map_or(0, |last| last + 1);
        let first = |kind| kinds.iter().position(|other| *other == kind);
        let firsts = (0..count).map(|kind| first(kind).expect("kinds are numbered by layers"));
        let layers = 1 + firsts.clone().max().unwrap_or(0) + LAYERS_AFTER;
        let mut small = settings.of_layers(layers.min(kinds.len()));
        small.accum = 1;
        Trials {
            of_kinds: firsts
                .map(|first| Kind::new(&small, first, exhaustive))
                .collect(),
            kinds: kinds[..small.model.layers].into(),
            small,
        }
    }

    /// Makes a step for each set that a kind wants to try; false if there is none.
    fn another_round(&mut self, paper: &Paper) -> Result<bool> {
        let wanted: Vec<Vec<u64>> = self.of_kinds.iter().map(Kind::wanted).collect();
        let most = wanted.iter().map(Vec::len).max().unwrap_or(0);
        for number in 0..most {
            let set = |kind: usize| wanted[kind].get(number).copied();
            let mut policy = Policy::keep_all_of(self.small.policy.labels, self.kinds.len());
            for (layer, kind) in self.kinds.iter().enumerate() {
                let actions = self.of_kinds[*kind].recomputing(set(*kind).unwrap_or(0));
                policy.set_labels(layer..layer + 1, actions);
            }
            self.small.policy = policy;
            let step = paper.step(&self.small)?;
            for (number, kind) in self.of_kinds.iter_mut().enumerate() {
                if let Some(set) = set(number) {
                    kind.note(set, &step);
                }
            }
        }
        Ok(most > 0)
    }
}

/// The ways of one kind of block that were tried. A set of labels has a bit for each of `labels`.
struct Kind {
    /// The first layer of the kind.
    layer: usize,
    /// Every set of labels is tried up to this many labels.
    exhaustive: usize,
    all_labels: Labels,
    /// Bytes of a layer's activations, by label.
    sizes: Vec<(Label, u64)>,
    /// The labels that may be recomputed.
    labels: Vec<Label>,
    /// The way that recomputes each set of labels.
    tried: BTreeMap<u64, Way>,
}

impl Kind {
    fn new(small: &Settings, layer: usize, exhaustive: usize) -> Kind {
        let planned = planned_activations(&small.architecture(), small);
        let mut by_layer = planned.chunk_by(|one, next| one.layer == next.layer);
        let own = by_layer.nth(layer).expect("every layer has activations");
        let all_labels = small.policy.labels;
        let sizes = all_labels.iter();
        let sizes = sizes.map(|label| (label, total_bytes(own, Some(label)).all));
        let sizes: Vec<(Label, u64)> = sizes.filter(|(_, bytes)| *bytes > 0).collect();
        let labels = sizes.iter().map(|(label, _)| *label);
        Kind {
            layer,
            exhaustive,
            all_labels,
            labels: labels
                .filter(|label| *label != Label::BLOCK_INPUT)
                .collect(),
            sizes,
            tried: BTreeMap::new(),
        }
    }

    /// The sets to try next. With few labels, these are all sets. Otherwise they are single labels and pairs, and
    /// afterwards the sets that differ in one label from the best so far, if they are new.
    fn wanted(&self) -> Vec<u64> {
        let count = self.labels.len();
        let bits = || (0..count).map(|bit| 1_u64 << bit);
        let mut sets: Vec<u64> = match (self.tried.is_empty(), count <= self.exhaustive) {
            (true, true) => (0..1 << count).collect(),
            (false, true) => Vec::new(),
            (true, false) => {
                let pairs = bits().flat_map(|one| bits().map(move |other| one | other));
                pairs.chain([0, (1 << count) - 1]).collect()
            }
            (false, false) => {
                let best = thinned(pareto(self.tried.values().copied().collect()), BEAM);
                let sets = best.iter().map(|way| self.set_of(&way.actions));
                sets.flat_map(|set| bits().map(move |bit| set ^ bit))
                    .collect()
            }
        };
        sets.sort_unstable();
        sets.dedup();
        sets.retain(|set| !self.tried.contains_key(set));
        sets
    }

    /// The labels of a set recomputed, the others kept.
    fn recomputing(&self, set: u64) -> Actions {
        let mut actions = Actions::keep_all(self.all_labels);
        let labels = self.labels.iter().enumerate();
        let chosen = labels.filter(|(bit, _)| set & (1 << bit) != 0);
        chosen.for_each(|(_, label)| actions.set(*label, Action::Recompute));
        actions
    }

    fn set_of(&self, actions: &Actions) -> u64 {
        let labels = self.labels.iter().enumerate();
        let dropped = labels.filter(|(_, label)| actions.of(**label) == Action::Recompute);
        dropped.map(|(bit, _)| 1 << bit).sum()
    }

    /// Records the bytes and times of a set from a step on paper.
    fn note(&mut self, set: u64, step: &OnPaper) {
        let actions = self.recomputing(set);
        let busy = |phase| step.busy(phase, Layer::Block(self.layer));
        let way = Way {
            kept_bytes: self.kept(&actions).map(|(_, bytes)| bytes).sum(),
            seconds: busy(Phase::Recompute),
            passes: [Phase::Forward, Phase::Backward].map(busy),
            actions,
        };
        self.tried.insert(set, way);
    }

    /// The labels that actions keep, with their bytes.
    fn kept(&self, actions: &Actions) -> impl Iterator<Item = (Label, u64)> {
        let sizes = self.sizes.iter().copied();
        sizes.filter(|(label, _)| actions.of(*label) == Action::Keep)
    }

    /// The ways that were tried. With `offloads`, also variants that offload some of the labels that a way keeps.
    fn ways(self, paper: &Paper, offloads: bool) -> Vec<Way> {
        let mut resident: Vec<Way> = self.tried.values().copied().collect();
        if self.labels.len() > self.exhaustive {
            resident = pareto(resident);
        }
        if !offloads {
            return resident;
        }
        let with_others = |way: Way| [way].into_iter().chain(self.with_offload(way, paper));
        resident.into_iter().flat_map(with_others).collect()
    }

    /// Variants that offload some of what a way keeps. Copies that take longer than the neighbours' work cost time.
    fn with_offload(&self, way: Way, paper: &Paper) -> Vec<Way> {
        let kept: Vec<(Label, u64)> = self.kept(&way.actions).collect();
        let [forward, backward] = way.passes;
        let backward = backward + way.seconds;
        let offloaded = offloaded_sets(&kept, self.exhaustive)
            .into_iter()
            .map(|set| {
                let mut other = way;
                for (bit, (label, bytes)) in kept.iter().enumerate() {
                    if set & (1 << bit) != 0 {
                        other.actions.set(*label, Action::Offload);
                        other.kept_bytes -= bytes;
                    }
                }
                let away = (way.kept_bytes - other.kept_bytes) as f64;
                let wait = |rate: f64, meanwhile: f64| (away / rate - meanwhile).max(0.0);
                other.seconds +=
                    wait(paper.rates.download, forward) + wait(paper.rates.upload, backward);
                other
            });
        offloaded.collect()
    }
}

/// The sets of kept labels to offload. With few labels, these are all sets. Otherwise they are single labels, pairs,
/// and the `n` largest and the `n` smallest labels for every `n`.
fn offloaded_sets(kept: &[(Label, u64)], exhaustive: usize) -> Vec<u64> {
    // One more than `exhaustive`, because the block's input can be offloaded too.
    if kept.len() <= exhaustive + 1 {
        return (1..1 << kept.len()).collect();
    }
    let mut by_size: Vec<usize> = (0..kept.len()).collect();
    by_size.sort_by_key(|bit| kept[*bit].1);
    let set = |bits: &[usize]| bits.iter().map(|bit| 1_u64 << bit).sum::<u64>();
    let ends = (1..=kept.len()).flat_map(|count| {
        let (smallest, largest) = (&by_size[..count], &by_size[kept.len() - count..]);
        [set(smallest), set(largest)]
    });
    let bits = || (0..kept.len()).map(|bit| 1_u64 << bit);
    let pairs = bits().flat_map(|one| bits().map(move |other| one | other));
    let mut sets: Vec<u64> = ends.chain(pairs).collect();
    sets.sort_unstable();
    sets.dedup();
    sets
}

/// The ways that no other way beats in both, the one that keeps most first. Of equal ways, the first recomputes less.
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

/// At most `most` ways: the first and the last, and then, one after the other, the way that most enlarges the area that
/// the chosen ones dominate.
fn thinned(ways: Vec<Way>, most: usize) -> Vec<Way> {
    let mut chosen: Vec<usize> = vec![0, ways.len() - 1];
    chosen.dedup();
    while chosen.len() < most.min(ways.len()) {
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
    use super::super::kinds_of_block;
    use super::*;
    use kernels::Target;

    fn way(kept_bytes: u64, seconds: f64) -> Way {
        Way {
            actions: Actions::keep_all(Labels::DENSE),
            kept_bytes,
            seconds,
            passes: [0.0; 2],
        }
    }

    #[test]
    fn kinds_of_many_labels_are_searched() {
        let settings = kinds_of_block::settings(8, &[]);
        let paper = Paper::new(&settings, Target::Cuda, Default::default());
        let kinds = settings.architecture().kinds();
        let mut trials = Trials::new(&settings, &kinds, EXHAUSTIVE_MAX);
        while trials.another_round(&paper).unwrap() {}
        let of_kind = |kind: &Kind| (kind.labels.len(), kind.tried.len());
        let tried: Vec<(usize, usize)> = trials.of_kinds.iter().map(of_kind).collect();
        assert_eq!(tried[0], (7, 128));
        let (labels, most) = (11, 1000);
        assert!(tried[3].0 == labels && tried[3].1 < most, "{tried:?}");
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
        // Points on a line are worth the same, one far below it is worth most.
        let mut line: Vec<Way> = (0..20).map(|at| way(100 - 5 * at, at as f64)).collect();
        line[7] = way(8, 7.0);
        let thin = thinned(pareto(line), ENTRIES_MAX);
        assert_eq!(thin.len(), ENTRIES_MAX.min(thin.len()));
        let thin = points(&thin);
        assert!(
            thin.contains(&(100, 0.0)) && thin.contains(&(8, 7.0)),
            "{thin:?}"
        );
    }
}
