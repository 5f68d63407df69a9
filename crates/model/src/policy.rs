//! Which activations are kept for the backward pass, and which are made again.

use crate::stage::{Activation, Label};

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
    /// For each layer, the activations to recompute, as bits.
    recomputed: Vec<u16>,
}

/// A recompute specification cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// No such label.
    #[error("unknown recompute label `{label}`; use none, full, or a comma list of {known}{hint}")]
    UnknownLabel {
        /// As given.
        label: String,
        /// The labels there are.
        known: String,
        /// The nearest one, as a clause.
        hint: String,
    },
    /// A part of the model that these models do not have.
    #[error(
        "recompute label `{0}` names a layer that this model does not have; dense Llama-family models know {1}"
    )]
    NoSuchLayer(String, String),
    /// A form that is not built yet.
    #[error(
        "recompute `{0}` is not built yet: it comes with the full recompute policy; use none, full, or a comma list of {1}"
    )]
    NotBuilt(String, String),
    /// `none` or `full` inside a list.
    #[error("recompute `{0}` stands alone; write `{0}`, or a comma list of {1}")]
    StandsAlone(&'static str, String),
    /// The same label twice.
    #[error("recompute label `{0}` is given twice; name it once")]
    Twice(String),
    /// Nothing given.
    #[error("the recompute specification is empty; write `none` to keep every activation")]
    Empty,
}

/// Labels that may be named in a list, and what each drops.
const LABELS: [Label; 3] = [Label::CoreAttn, Label::Layernorm, Label::Mlp];

/// Labels of layers that other models have.
const OTHER_MODELS: [&str; 5] = ["moe", "moe_act", "shared_experts", "mla_up_proj", "mhc"];

/// Forms that the full policy will know.
const NOT_BUILT: [&str; 4] = ["qkv", "attn_out", "mlp_act", "auto"];

impl Policy {
    /// Keeps everything.
    pub fn keep_all(layers: usize) -> Policy {
        Policy {
            recomputed: vec![0; layers],
        }
    }

    /// Reads a specification: `none`, `full` (only block inputs are kept), or a comma list of labels.
    ///
    /// # Errors
    /// What is wrong with it and what to write instead.
    pub fn parse(spec: &str, layers: usize) -> Result<Policy, PolicyError> {
        let mut policy = Policy::keep_all(layers);
        let labels: Vec<&str> = spec.split(',').map(str::trim).collect();
        match labels.as_slice() {
            [""] => return Err(PolicyError::Empty),
            ["none"] => return Ok(policy),
            ["full"] => {
                let dropped = Activation::ALL
                    .into_iter()
                    .filter(|activation| *activation != Activation::X);
                dropped.for_each(|activation| policy.set_all_layers(activation, Action::Recompute));
                return Ok(policy);
            }
            _ => {}
        }
        for (index, name) in labels.iter().enumerate() {
            let label = parse_label(name)?;
            if labels[..index].contains(name) {
                return Err(PolicyError::Twice((*name).to_string()));
            }
            let dropped = Activation::ALL
                .into_iter()
                .filter(|activation| activation.label() == label);
            dropped.for_each(|activation| policy.set_all_layers(activation, Action::Recompute));
        }
        Ok(policy)
    }

    /// Sets the action for one activation of one layer.
    pub fn set(&mut self, layer: usize, activation: Activation, action: Action) {
        let bit = 1 << activation as u16;
        match action {
            Action::Keep => self.recomputed[layer] &= !bit,
            Action::Recompute => self.recomputed[layer] |= bit,
        }
    }

    fn set_all_layers(&mut self, activation: Activation, action: Action) {
        (0..self.recomputed.len()).for_each(|layer| self.set(layer, activation, action));
    }

    /// The action for one activation of one layer. What the head reads, beyond the last layer, is always kept.
    pub fn action(&self, layer: usize, activation: Activation) -> Action {
        match self.recomputed.get(layer) {
            Some(bits) if bits & (1 << activation as u16) != 0 => Action::Recompute,
            _ => Action::Keep,
        }
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.recomputed.len()
    }
}

fn known_labels() -> String {
    LABELS.map(Label::name).join(", ")
}

fn parse_label(name: &str) -> Result<Label, PolicyError> {
    if let Some(label) = LABELS.into_iter().find(|label| label.name() == name) {
        return Ok(label);
    }
    let known = known_labels();
    Err(match name {
        "" => PolicyError::Empty,
        "none" => PolicyError::StandsAlone("none", known),
        "full" => PolicyError::StandsAlone("full", known),
        name if OTHER_MODELS.contains(&name) => PolicyError::NoSuchLayer(name.into(), known),
        name if NOT_BUILT.contains(&name) || name.starts_with("full:") => {
            PolicyError::NotBuilt(name.into(), known)
        }
        name => {
            let near = LABELS
                .into_iter()
                .map(Label::name)
                .find(|label| alike(label, name));
            let hint = near.map_or(String::new(), |label| format!("; did you mean `{label}`?"));
            PolicyError::UnknownLabel {
                label: name.into(),
                known,
                hint,
            }
        }
    })
}

/// Whether two names share their first three letters, or differ only in `_` and `-`.
fn alike(label: &str, name: &str) -> bool {
    let plain = |text: &str| text.to_lowercase().replace(['_', '-'], "");
    plain(label) == plain(name)
        || (name.len() >= 3 && label.starts_with(&name.to_lowercase()[..3.min(name.len())]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_drop_what_the_table_says() {
        let policy = Policy::parse("core_attn, layernorm", 2).unwrap();
        for activation in Activation::ALL {
            let dropped = matches!(activation.label(), Label::CoreAttn | Label::Layernorm);
            let expected = if dropped {
                Action::Recompute
            } else {
                Action::Keep
            };
            assert_eq!(policy.action(1, activation), expected, "{activation:?}");
        }
        assert_eq!(policy.action(2, Activation::X), Action::Keep);
        assert_eq!(Policy::parse("none", 2).unwrap(), Policy::keep_all(2));
    }

    #[test]
    fn full_keeps_block_inputs_alone() {
        let policy = Policy::parse("full", 3).unwrap();
        for activation in Activation::ALL {
            let kept = policy.action(0, activation) == Action::Keep;
            assert_eq!(kept, activation == Activation::X, "{activation:?}");
        }
    }

    #[test]
    fn what_cannot_be_followed_says_what_to_write() {
        let cases = [
            ("", "is empty; write `none`"),
            ("core_atn", "did you mean `core_attn`?"),
            ("moe", "does not have"),
            ("mlp,mlp", "given twice"),
            ("mlp,full", "`full` stands alone"),
            ("none,mlp", "`none` stands alone"),
            ("full:uniform:2", "not built yet"),
            (
                "swish",
                "use none, full, or a comma list of core_attn, layernorm, mlp",
            ),
        ];
        for (spec, expected) in cases {
            let message = Policy::parse(spec, 2).unwrap_err().to_string();
            assert!(message.contains(expected), "{spec}: {message}");
        }
    }
}
