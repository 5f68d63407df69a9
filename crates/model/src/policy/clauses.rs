//! What `recompute.layers` says of layers in clauses, with which any policy over labels can be written down:
//! `recompute: mlp, qkv; offload: block_input; keep: mlp_act`.

use super::spec::SpecError;
use super::{Action, LayerPolicy, Policy};
use crate::Label;
use std::collections::BTreeMap;

/// The clauses, with what they do.
const CLAUSES: [(&str, Action); 3] = [
    ("recompute", Action::Recompute),
    ("offload", Action::Offload),
    ("keep", Action::Keep),
];

/// The actions of a layer that clauses describe; none if the text is no list of clauses.
///
/// A label takes what lies within it along, unless that is named itself. What no clause names is kept.
///
/// # Errors
/// [`SpecError::Clause`] for words that are no clause or label, and for labels that are named twice.
pub(super) fn parse(text: &str) -> Result<Option<[Action; Label::ALL.len()]>, SpecError> {
    let clause_of = |part: &str| {
        let (name, labels) = part.split_once(':')?;
        let clause = CLAUSES.into_iter().find(|clause| clause.0 == name.trim())?;
        Some((clause.1, labels.to_string()))
    };
    if text.split(';').all(|part| clause_of(part).is_none()) {
        return Ok(None);
    }
    let mut named: Vec<(Label, Action)> = Vec::new();
    for part in text.split(';').filter(|part| !part.trim().is_empty()) {
        let (action, labels) = clause_of(part)
            .ok_or_else(|| wrong(text, &format!("`{}` is no clause", part.trim())))?;
        for label in labels_of(text, &labels, action)? {
            if named.iter().any(|(other, _)| *other == label) {
                return Err(wrong(text, &format!("`{}` is named twice", label.name())));
            }
            named.push((label, action));
        }
    }
    // What lies within another label comes later, and so has the last word.
    named.sort_by_key(|(label, _)| std::cmp::Reverse(label.covers().len()));
    let mut actions = [Action::Keep; Label::ALL.len()];
    for (label, action) in named {
        let covered = label.covers().iter();
        covered.for_each(|covered| actions[*covered as usize] = action);
    }
    Ok(Some(actions))
}

/// The labels of a clause.
fn labels_of(text: &str, labels: &str, action: Action) -> Result<Vec<Label>, SpecError> {
    match labels.trim() {
        "none" => return Ok(Vec::new()),
        "full" if action == Action::Recompute => return Ok(of_full()),
        _ => {}
    }
    let label = |name: &str| {
        let mut labels = Label::ALL.into_iter();
        let found = labels.find(|label| label.name() == name);
        found.ok_or_else(|| {
            let hint = Label::hint(name, &Label::ALL);
            wrong(text, &format!("`{name}` is no label{hint}"))
        })
    };
    labels.split(',').map(|name| label(name.trim())).collect()
}

/// What `full` recomputes: everything but the block's input.
fn of_full() -> Vec<Label> {
    let labels = Label::ALL.into_iter();
    labels.filter(|label| *label != Label::BlockInput).collect()
}

fn wrong(text: &str, what: &str) -> SpecError {
    SpecError::Clause {
        text: text.into(),
        what: what.into(),
        known: Label::ALL.map(Label::name).join(", "),
    }
}

impl LayerPolicy {
    /// The clauses that describe it, as far as labels go; the shorter form where nothing is recomputed or offloaded.
    fn clauses(&self) -> String {
        let is_named = |label: &Label| {
            let action = self.by_label[*label as usize];
            let mut around = Label::ALL.into_iter();
            let around = around.find(|other| other != label && other.covers().contains(label));
            action != around.map_or(Action::Keep, |around| self.by_label[around as usize])
        };
        let clause = |(name, action): (&str, Action)| {
            let labels = Label::ALL.into_iter().filter(is_named);
            let labels = labels.filter(|label| self.by_label[*label as usize] == action);
            let labels: Vec<&str> = labels.map(Label::name).collect();
            (!labels.is_empty()).then(|| format!("{name}: {}", labels.join(", ")))
        };
        let clauses: Vec<String> = CLAUSES.into_iter().filter_map(clause).collect();
        match clauses.is_empty() {
            true => "none".into(),
            false => clauses.join("; "),
        }
    }
}

impl Policy {
    /// Whether a text of `recompute.layers` is made of clauses, not a specification.
    pub fn is_written_in_clauses(text: &str) -> bool {
        !matches!(parse(text), Ok(None))
    }

    /// `recompute.layers` that make the policy again, beside `recompute.spec = "none"` and no `offload.activations`.
    /// Actions of single activations, which no setting gives, are left out.
    pub fn to_layers(&self) -> BTreeMap<String, String> {
        let mut layers = BTreeMap::new();
        let mut first = 0;
        for alike in self
            .layers
            .chunk_by(|one, next| one.by_label == next.by_label)
        {
            let last = first + alike.len() - 1;
            let key = match last - first {
                0 => first.to_string(),
                _ => format!("{first}-{last}"),
            };
            layers.insert(key, alike[0].clauses());
            first = last + 1;
        }
        layers.retain(|_, clauses| clauses != "none");
        layers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layers(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let owned = pairs.iter();
        owned
            .map(|(key, clauses)| (key.to_string(), clauses.to_string()))
            .collect()
    }

    #[test]
    fn a_label_takes_what_lies_within_it_along_unless_that_is_named() {
        let actions = |text: &str| parse(text).unwrap().unwrap();
        let of = |text: &str, label: Label| actions(text)[label as usize];
        assert_eq!(of("recompute: mlp", Label::MlpAct), Action::Recompute);
        for text in [
            "offload: mlp_act; recompute: mlp",
            "recompute: mlp; offload: mlp_act;",
        ] {
            assert_eq!(of(text, Label::Mlp), Action::Recompute);
            assert_eq!(of(text, Label::MlpAct), Action::Offload);
        }
        assert_eq!(
            of("recompute: full; offload: block_input", Label::BlockInput),
            Action::Offload
        );
        assert_eq!(of("recompute: full", Label::AttnValue), Action::Recompute);
        assert_eq!(
            of("recompute: none; offload: qkv", Label::Qkv),
            Action::Offload
        );
        for other in ["none", "full:uniform:2", "mlp,qkv"] {
            assert_eq!(parse(other).unwrap(), None, "{other}");
        }
    }

    #[test]
    fn what_is_no_list_of_clauses_says_what_to_write() {
        for (text, expected) in [
            ("recompute: mlp; drop: qkv", "`drop: qkv` is no clause"),
            ("recompute: mpl", "did you mean `mlp`?"),
            ("recompute: mlp; offload: mlp", "`mlp` is named twice"),
            ("offload: full", "`full` is no label"),
            ("recompute: mlp qkv", "block_input, layernorm, qkv"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    #[test]
    fn ranges_of_layers_that_are_alike_are_written_together() {
        let written = layers(&[
            ("0-2", "recompute: mlp, qkv; offload: block_input"),
            ("4", "full"),
        ]);
        let policy = Policy::with_layers("none", &written, 6).unwrap();
        let full = "recompute: layernorm, qkv, core_attn, attn_value, attn_out, mlp";
        let expected = layers(&[
            ("0-2", "recompute: qkv, mlp; offload: block_input"),
            ("4", full),
        ]);
        assert_eq!(policy.to_layers(), expected);
    }

    proptest! {
        /// The last layer keeps what it would offload.
        #[test]
        fn any_policy_over_labels_can_be_written_down(
            actions in proptest::collection::vec(proptest::array::uniform8(0usize..3), 1..6),
        ) {
            let mut policy = Policy::keep_all(actions.len());
            let last = actions.len() - 1;
            for (layer, actions) in actions.into_iter().enumerate() {
                let action = |number: usize| match CLAUSES[number].1 {
                    Action::Offload if layer == last => Action::Keep,
                    action => action,
                };
                policy.layers[layer].by_label = actions.map(action);
            }
            let again = Policy::with_layers("none", &policy.to_layers(), policy.layers());
            prop_assert_eq!(again.unwrap(), policy);
        }
    }
}
