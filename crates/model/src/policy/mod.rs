//! Which activations are kept for the backward pass, which wait for it on the host, and which are made again.

mod clauses;
mod megatron;
mod offload_labels;
mod spec;

pub use megatron::MegatronFlags;
pub use offload_labels::{OffloadError, OffloadLabels};
pub use spec::{Spec, SpecError};

use crate::{Activation, Label, Labels};
use std::collections::BTreeMap;
use std::ops::Range;

/// What happens to an activation between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It stays in device memory.
    Keep,
    /// It is dropped after its last reader in the forward pass, and replayed when the backward pass needs it.
    Recompute,
    /// It waits in pinned host memory, and returns before the backward pass needs it.
    Offload,
}

/// An action for every label of an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Actions {
    labels: Labels,
    of_places: [Action; Labels::MAX],
}

impl Actions {
    /// Everything is kept.
    pub fn keep_all(labels: Labels) -> Actions {
        Actions {
            labels,
            of_places: [Action::Keep; Labels::MAX],
        }
    }

    /// The labels.
    pub fn labels(&self) -> Labels {
        self.labels
    }

    /// The action for a label.
    ///
    /// # Panics
    /// If the architecture does not declare it.
    pub fn of(&self, label: Label) -> Action {
        self.of_places[self.labels.place(label)]
    }

    /// Sets the action for a label.
    ///
    /// # Panics
    /// As [`Actions::of`].
    pub fn set(&mut self, label: Label, action: Action) {
        self.of_places[self.labels.place(label)] = action;
    }
}

/// An action for every activation of every layer, by the labels of an architecture. Any combination is valid and gives
/// the same bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The labels that it decides by.
    pub labels: Labels,
    layers: Vec<LayerPolicy>,
    /// The labels that [`Policy::offload`] was given.
    pub offloaded: OffloadLabels,
}

/// An action for every activation of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LayerPolicy {
    by_label: Actions,
    /// Single activations that have another.
    by_name: BTreeMap<&'static str, Action>,
}

impl LayerPolicy {
    fn keep_all(labels: Labels) -> LayerPolicy {
        LayerPolicy {
            by_label: Actions::keep_all(labels),
            by_name: BTreeMap::new(),
        }
    }
}

impl Policy {
    /// Keeps everything of dense blocks.
    pub fn keep_all(layers: usize) -> Policy {
        Policy::keep_all_of(Labels::DENSE, layers)
    }

    /// Keeps everything.
    pub fn keep_all_of(labels: Labels, layers: usize) -> Policy {
        Policy {
            labels,
            layers: vec![LayerPolicy::keep_all(labels); layers],
            offloaded: OffloadLabels::default(),
        }
    }

    /// The policy of a specification ([`Spec`]) for a number of layers, all dense blocks.
    ///
    /// # Errors
    /// What is wrong with the specification and what to write instead.
    pub fn parse(spec: &str, layers: usize) -> Result<Policy, SpecError> {
        Policy::with_layers(Labels::DENSE, spec, &BTreeMap::new(), layers)
    }

    /// The policy of a specification, with other ones for some layers. `overrides` maps a layer (`7`), a range (`0-3`)
    /// or an open range (`20-`) to a specification of its own, or to clauses, which can also offload: `recompute: mlp,
    /// qkv; offload: block_input`.
    ///
    /// # Errors
    /// What is wrong with the specifications or the ranges and what to write instead.
    pub fn with_layers(
        labels: Labels,
        spec: &str,
        overrides: &BTreeMap<String, String>,
        layers: usize,
    ) -> Result<Policy, SpecError> {
        let mut policy = Policy::keep_all_of(labels, layers);
        let base = Spec::parse(spec, labels)?;
        base.check_layers(layers)?;
        if let (true, Some(_)) = (base.divides_layers(), overrides.first_key_value()) {
            return Err(SpecError::DividesLayers(spec.into()));
        }
        policy.apply(&base, 0..layers);
        let mut claimed: Vec<Option<&str>> = vec![None; layers];
        for (key, spec) in overrides {
            let range = layer_range(key, layers)?;
            if let Some(other) = claimed[range.clone()].iter().flatten().next() {
                return Err(SpecError::Overlap(key.clone(), (*other).into()));
            }
            claimed[range.clone()].fill(Some(key));
            policy.layers[range.clone()].fill(LayerPolicy::keep_all(labels));
            if let Some(actions) = clauses::parse(spec, labels)? {
                policy.set_labels(range, actions);
                continue;
            }
            let own = Spec::parse(spec, labels)?;
            if own.divides_layers() {
                return Err(SpecError::DividesLayers(spec.clone()));
            }
            policy.apply(&own, range);
        }
        Ok(policy)
    }

    fn apply(&mut self, spec: &Spec, layers: Range<usize>) {
        for layer in layers {
            let own = &mut self.layers[layer].by_label;
            let dropped = self.labels.iter();
            let dropped = dropped.filter(|label| spec.drops(layer, *label));
            dropped.for_each(|label| own.set(label, Action::Recompute));
        }
    }

    /// Sets the action for every label of some layers. The last layer keeps what it would offload: its backward pass
    /// runs first, so it would have to return at once.
    pub fn set_labels(&mut self, layers: Range<usize>, actions: Actions) {
        let last = self.layers() - 1;
        for layer in layers {
            let kept = |action| match action {
                Action::Offload if layer == last => Action::Keep,
                action => action,
            };
            self.layers[layer].by_label = Actions {
                of_places: actions.of_places.map(kept),
                ..actions
            };
        }
    }

    /// The action for every label of a layer.
    pub fn actions(&self, layer: usize) -> &Actions {
        &self.layers[layer].by_label
    }

    /// Offloads the activations of these labels in every layer but the last.
    ///
    /// # Errors
    /// [`OffloadError`] if a layer recomputes an activation of one of the labels.
    pub fn offload(mut self, labels: &OffloadLabels) -> Result<Policy, OffloadError> {
        for (label, covered) in labels.covered(self.labels) {
            let action = |layer: &LayerPolicy| layer.by_label.of(covered);
            let recomputes = |layer: &LayerPolicy| action(layer) == Action::Recompute;
            if let Some(layer) = self.layers.iter().position(recomputes) {
                return Err(OffloadError::Recomputed {
                    label: label.name(),
                    recomputed: covered.name(),
                    layer,
                });
            }
            let all_but_last = self.layers.len().saturating_sub(1);
            for layer in &mut self.layers[..all_but_last] {
                layer.by_label.set(covered, Action::Offload);
            }
        }
        self.offloaded = labels.clone();
        Ok(self)
    }

    /// Sets the action for one activation of one layer. The last layer keeps what it would offload.
    pub fn set(&mut self, layer: usize, activation: Activation, action: Action) {
        let is_last = layer + 1 == self.layers();
        let action = match action {
            Action::Offload if is_last => Action::Keep,
            action => action,
        };
        let by_name = &mut self.layers[layer].by_name;
        by_name.insert(activation.name(), action);
    }

    /// The action for one activation of one layer. The head's input, after the last layer, is always kept.
    pub fn action(&self, layer: usize, activation: Activation) -> Action {
        let Some(policy) = self.layers.get(layer) else {
            return Action::Keep;
        };
        let by_name = policy.by_name.get(activation.name()).copied();
        by_name.unwrap_or_else(|| policy.by_label.of(activation.label()))
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }
}

/// Reads `7`, `0-3` or `20-`; both ends count.
fn layer_range(key: &str, layers: usize) -> Result<Range<usize>, SpecError> {
    let wrong = || SpecError::LayerRange(key.into(), layers);
    let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
    let range = match key.split_once('-') {
        None => number(key)?..number(key)? + 1,
        Some((first, last)) if last.trim().is_empty() => number(first)?..layers,
        Some((first, last)) => number(first)?..number(last)? + 1,
    };
    if range.is_empty() || range.end > layers {
        return Err(wrong());
    }
    Ok(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An activation of this label.
    fn of(label: Label) -> Activation {
        Activation::new("some", "d_some", label)
    }

    fn dropped(policy: &Policy, layer: usize) -> Vec<Label> {
        let is_dropped = |label: &Label| policy.action(layer, of(*label)) == Action::Recompute;
        Labels::DENSE.iter().filter(is_dropped).collect()
    }

    #[test]
    fn full_keeps_the_inputs_that_its_form_says() {
        let full = Policy::parse("full", 5).unwrap();
        let uniform = Policy::parse("full:uniform:2", 5).unwrap();
        let block = Policy::parse("full:block:2", 5).unwrap();
        let keeps_x = |policy: &Policy| -> Vec<bool> {
            let keeps = |layer| policy.action(layer, of(Label::BLOCK_INPUT)) == Action::Keep;
            (0..5).map(keeps).collect()
        };
        assert_eq!(keeps_x(&full), [true; 5]);
        assert_eq!(keeps_x(&uniform), [true, false, true, false, true]);
        assert_eq!(keeps_x(&block), [true; 5]);
        assert_eq!(dropped(&full, 4).len(), 7);
        assert_eq!(dropped(&block, 1).len(), 7);
        assert!(dropped(&block, 2).is_empty());
        assert_eq!(full, Policy::parse("full:uniform:1", 5).unwrap());
        assert_eq!(full, Policy::parse("full:block:5", 5).unwrap());
    }

    #[test]
    fn labels_are_offloaded_in_every_layer_but_the_last() {
        let labels = |text: &str| OffloadLabels::parse(text).unwrap();
        let offload =
            |spec: &str, text: &str| Policy::parse(spec, 3).unwrap().offload(&labels(text));
        let policy = offload("mlp", "core_attn,block_input").unwrap();
        assert_eq!(policy.offloaded, labels("core_attn,block_input"));
        for layer in 0..3 {
            let action = |label| policy.action(layer, of(label));
            let expected = [Action::Offload, Action::Keep][usize::from(layer == 2)];
            let offloaded = [Label::CORE_ATTN, Label::BLOCK_INPUT].map(action);
            assert_eq!(offloaded, [expected; 2], "layer {layer}");
            assert_eq!(action(Label::MLP), Action::Recompute);
            assert_eq!(action(Label::QKV), Action::Keep);
        }
        assert_eq!(policy.action(3, Activation::X), Action::Keep, "the head's");
        let single = Policy::keep_all(1).offload(&labels("mlp")).unwrap();
        assert_eq!(single.action(0, of(Label::MLP_ACT)), Action::Keep);
        assert_ne!(single, Policy::keep_all(1), "it was asked for");
    }

    #[test]
    fn what_is_recomputed_is_not_offloaded() {
        let layers = BTreeMap::from([("1".to_string(), "qkv".to_string())]);
        for (policy, labels, expected) in [
            (
                Policy::parse("mlp", 3),
                "layernorm,mlp",
                ["`mlp` cannot", "`mlp` is", "layer 0"],
            ),
            (
                Policy::parse("mlp_act", 3),
                "mlp",
                ["`mlp` cannot", "`mlp_act` is", "layer 0"],
            ),
            (
                Policy::parse("full", 3),
                "attn_value",
                ["`attn_value` cannot", "recompute spec", "layer 0"],
            ),
            (
                Policy::parse("full:uniform:2", 3),
                "block_input",
                ["`block_input` cannot", "recompute spec", "layer 1"],
            ),
            (
                Policy::with_layers(Labels::DENSE, "none", &layers, 3),
                "qkv",
                ["`qkv` cannot", "`qkv` is", "layer 1"],
            ),
        ] {
            let labels = OffloadLabels::parse(labels).unwrap();
            let message = policy.unwrap().offload(&labels).unwrap_err().to_string();
            for word in expected {
                assert!(message.contains(word), "no {word}: {message}");
            }
        }
        let full = Policy::parse("full", 3).unwrap();
        assert!(
            full.offload(&OffloadLabels::parse("block_input").unwrap())
                .is_ok()
        );
    }

    #[test]
    fn single_activations_have_actions_of_their_own() {
        let mut policy = Policy::parse("qkv", 2).unwrap();
        let other = Activation::new("other", "d_other", Label::QKV);
        policy.set(0, other, Action::Offload);
        policy.set(1, other, Action::Offload);
        assert_eq!(policy.action(0, other), Action::Offload);
        assert_eq!(policy.action(1, other), Action::Keep, "the last layer's");
        assert_eq!(policy.action(0, of(Label::QKV)), Action::Recompute);
    }

    #[test]
    fn layers_have_specifications_of_their_own() {
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            let owned = pairs
                .iter()
                .map(|(key, spec)| (key.to_string(), spec.to_string()));
            owned.collect()
        };
        let layers = map(&[("0-1", "full"), ("3", "none"), ("5-", "mlp_act")]);
        let policy = Policy::with_layers(Labels::DENSE, "core_attn", &layers, 7).unwrap();
        assert_eq!(dropped(&policy, 2), [Label::CORE_ATTN]);
        assert!(
            dropped(&policy, 3).is_empty(),
            "an override replaces, it does not add"
        );
        assert_eq!(dropped(&policy, 6), [Label::MLP_ACT]);
        assert_eq!(dropped(&policy, 1).len(), 7);
        for (pairs, expected) in [
            (map(&[("0-2", "full"), ("2", "none")]), "overlap"),
            (map(&[("5-7", "full")]), "7 layers"),
            (map(&[("x", "full")]), "is no layer"),
            (map(&[("3-1", "full")]), "is no layer"),
            (map(&[("1", "full:uniform:2")]), "divides all layers"),
        ] {
            let message = Policy::with_layers(Labels::DENSE, "none", &pairs, 7)
                .unwrap_err()
                .to_string();
            assert!(message.contains(expected), "{message}");
        }
        let message = Policy::with_layers(Labels::DENSE, "full:block:2", &map(&[("1", "none")]), 7)
            .unwrap_err();
        assert!(
            message.to_string().contains("divides all layers"),
            "{message}"
        );
    }
}
