//! Which activations are kept for the backward pass, and which are made again.

use crate::spec::{Spec, SpecError};
use crate::stage::Activation;
use std::collections::BTreeMap;
use std::ops::Range;

/// What happens to an activation between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It stays in device memory.
    Keep,
    /// It is dropped after its last reader and replayed when the backward pass needs it.
    Recompute,
}

/// An action for every activation of every layer. Any combination is valid and gives the same bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    layers: Vec<[Action; Activation::ALL.len()]>,
}

impl Policy {
    /// Keeps everything.
    pub fn keep_all(layers: usize) -> Policy {
        Policy {
            layers: vec![[Action::Keep; Activation::ALL.len()]; layers],
        }
    }

    /// The policy of a specification for all layers ([`Spec`]).
    ///
    /// # Errors
    /// What is wrong with the specification and what to write instead.
    pub fn parse(spec: &str, layers: usize) -> Result<Policy, SpecError> {
        Policy::with_layers(spec, &BTreeMap::new(), layers)
    }

    /// The policy of a specification, with others for some layers: `overrides` maps a layer (`7`), a range
    /// (`0-3`) or an open range (`20-`) to a specification of its own.
    ///
    /// # Errors
    /// What is wrong with the specifications or the ranges and what to write instead.
    pub fn with_layers(
        spec: &str,
        overrides: &BTreeMap<String, String>,
        layers: usize,
    ) -> Result<Policy, SpecError> {
        let mut policy = Policy::keep_all(layers);
        let base = Spec::parse(spec)?;
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
            let own = Spec::parse(spec)?;
            if own.divides_layers() {
                return Err(SpecError::DividesLayers(spec.clone()));
            }
            for activation in Activation::ALL {
                range
                    .clone()
                    .for_each(|layer| policy.set(layer, activation, Action::Keep));
            }
            policy.apply(&own, range);
        }
        Ok(policy)
    }

    fn apply(&mut self, spec: &Spec, layers: Range<usize>) {
        for layer in layers {
            for activation in Activation::ALL {
                if spec.drops(layer, activation) {
                    self.set(layer, activation, Action::Recompute);
                }
            }
        }
    }

    /// Sets the action for one activation of one layer.
    pub fn set(&mut self, layer: usize, activation: Activation, action: Action) {
        self.layers[layer][activation as usize] = action;
    }

    /// The action for one activation of one layer. What the head reads, beyond the last layer, is always kept.
    pub fn action(&self, layer: usize, activation: Activation) -> Action {
        let actions = self.layers.get(layer);
        actions.map_or(Action::Keep, |actions| actions[activation as usize])
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

    fn dropped(policy: &Policy, layer: usize) -> Vec<&'static str> {
        let is_dropped =
            |activation: &Activation| policy.action(layer, *activation) == Action::Recompute;
        let dropped = Activation::ALL.into_iter().filter(is_dropped);
        dropped.map(Activation::name).collect()
    }

    #[test]
    fn full_keeps_the_inputs_that_its_form_says() {
        let full = Policy::parse("full", 5).unwrap();
        let uniform = Policy::parse("full:uniform:2", 5).unwrap();
        let block = Policy::parse("full:block:2", 5).unwrap();
        let keeps_x = |policy: &Policy| -> Vec<bool> {
            let keeps = |layer| policy.action(layer, Activation::X) == Action::Keep;
            (0..5).map(keeps).collect()
        };
        assert_eq!(keeps_x(&full), [true; 5]);
        assert_eq!(keeps_x(&uniform), [true, false, true, false, true]);
        assert_eq!(keeps_x(&block), [true; 5]);
        assert_eq!(dropped(&full, 4).len(), Activation::ALL.len() - 1);
        assert_eq!(dropped(&block, 1).len(), Activation::ALL.len() - 1);
        assert!(dropped(&block, 2).is_empty());
        assert_eq!(full, Policy::parse("full:uniform:1", 5).unwrap());
        assert_eq!(full, Policy::parse("full:block:5", 5).unwrap());
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
        let policy = Policy::with_layers("core_attn", &layers, 7).unwrap();
        assert_eq!(dropped(&policy, 2), ["probs", "lse"]);
        assert!(
            dropped(&policy, 3).is_empty(),
            "an override replaces, it does not add"
        );
        assert_eq!(dropped(&policy, 6), ["act"]);
        assert_eq!(dropped(&policy, 1).len(), Activation::ALL.len() - 1);
        for (pairs, expected) in [
            (map(&[("0-2", "full"), ("2", "none")]), "overlap"),
            (map(&[("5-7", "full")]), "7 layers"),
            (map(&[("x", "full")]), "is no layer"),
            (map(&[("3-1", "full")]), "is no layer"),
            (map(&[("1", "full:uniform:2")]), "divides all layers"),
        ] {
            let message = Policy::with_layers("none", &pairs, 7)
                .unwrap_err()
                .to_string();
            assert!(message.contains(expected), "{message}");
        }
        let message = Policy::with_layers("full:block:2", &map(&[("1", "none")]), 7).unwrap_err();
        assert!(
            message.to_string().contains("divides all layers"),
            "{message}"
        );
    }
}
