//! The clauses of `recompute.layers`, in which any policy over labels can be written: `recompute: mlp, qkv; offload:
//! block_input; keep: mlp_act`.

use super::spec::SpecError;
use super::{Action, Actions, LayerPolicy, Policy};
use crate::label::{hint, names};
use crate::{Label, Labels};
use std::collections::BTreeMap;

/// The clauses, each with its action.
const CLAUSES: [(&str, Action); 3] = [
    ("recompute", Action::Recompute),
    ("offload", Action::Offload),
    ("keep", Action::Keep),
];

/// The actions of a layer that clauses describe; none if the text is no list of clauses.
///
/// A label applies to all labels within it, except those that are named themselves. Labels that no clause names are
/// kept.
///
/// # Errors
/// [`SpecError::Clause`] for words that are no clause or label, and for labels that are named twice.
pub(super) fn parse(text: &str, known: Labels) -> Result<Option<Actions>, SpecError> {
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
            .ok_or_else(|| wrong(text, known, &format!("`{}` is no clause", part.trim())))?;
        for label in labels_of(text, known, &labels, action)? {
            if named.iter().any(|(other, _)| *other == label) {
                let twice = format!("`{}` is named twice", label.name());
                return Err(wrong(text, known, &twice));
            }
            named.push((label, action));
        }
    }
    // Inner labels come last, so that their actions replace those of the labels around them.
    named.sort_by_key(|(label, _)| std::cmp::Reverse(known.covered(*label).count()));
    let mut actions = Actions::keep_all(known);
    for (label, action) in named {
        let covered = known.covered(label);
        covered.for_each(|covered| actions.set(covered, action));
    }
    Ok(Some(actions))
}

/// The labels of a clause.
fn labels_of(
    text: &str,
    known: Labels,
    labels: &str,
    action: Action,
) -> Result<Vec<Label>, SpecError> {
    match labels.trim() {
        "none" => return Ok(Vec::new()),
        "full" if action == Action::Recompute => return Ok(of_full(known)),
        _ => {}
    }
    let label = |name: &str| {
        known.find(name).ok_or_else(|| {
            let hint = hint(name, known.iter());
            wrong(text, known, &format!("`{name}` is no label{hint}"))
        })
    };
    labels.split(',').map(|name| label(name.trim())).collect()
}

/// The labels that `full` recomputes: all but the block's input.
fn of_full(known: Labels) -> Vec<Label> {
    let labels = known.iter();
    labels
        .filter(|label| *label != Label::BLOCK_INPUT)
        .collect()
}

fn wrong(text: &str, known: Labels, what: &str) -> SpecError {
    SpecError::Clause {
        text: text.into(),
        what: what.into(),
        known: names(known.iter()),
    }
}

impl LayerPolicy {
    /// The clauses that describe its labels' actions, or `none` if nothing is recomputed or offloaded.
    fn clauses(&self) -> String {
        let labels = self.by_label.labels();
        let is_named = |label: &Label| {
            let around = labels.around(*label);
            let of_group = around.map_or(Action::Keep, |around| self.by_label.of(around));
            self.by_label.of(*label) != of_group
        };
        let clause = |(name, action): (&str, Action)| {
            let labels = labels.iter().filter(is_named);
            let labels = labels.filter(|label| self.by_label.of(*label) == action);
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
    /// Whether a text of `recompute.layers` consists of clauses and is no specification.
    pub fn is_written_in_clauses(text: &str) -> bool {
        !matches!(parse(text, Labels::DENSE), Ok(None))
    }

    /// The `recompute.layers` that make this policy again, with `recompute.spec = "none"` and without
    /// `offload.activations`. No setting describes actions of single activations, so these are left out.
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
        let actions = |text: &str| parse(text, Labels::DENSE).unwrap().unwrap();
        let of = |text: &str, label: Label| actions(text).of(label);
        assert_eq!(of("recompute: mlp", Label::MLP_ACT), Action::Recompute);
        for text in [
            "offload: mlp_act; recompute: mlp",
            "recompute: mlp; offload: mlp_act;",
        ] {
            assert_eq!(of(text, Label::MLP), Action::Recompute);
            assert_eq!(of(text, Label::MLP_ACT), Action::Offload);
        }
        assert_eq!(
            of("recompute: full; offload: block_input", Label::BLOCK_INPUT),
            Action::Offload
        );
        assert_eq!(of("recompute: full", Label::ATTN_VALUE), Action::Recompute);
        assert_eq!(
            of("recompute: none; offload: qkv", Label::QKV),
            Action::Offload
        );
        for other in ["none", "full:uniform:2", "mlp,qkv"] {
            assert_eq!(parse(other, Labels::DENSE).unwrap(), None, "{other}");
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
            let message = parse(text, Labels::DENSE).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    #[test]
    fn ranges_of_layers_that_are_alike_are_written_together() {
        let written = layers(&[
            ("0-2", "recompute: mlp, qkv; offload: block_input"),
            ("4", "full"),
        ]);
        let policy = Policy::with_layers(Labels::DENSE, "none", &written, 6).unwrap();
        let full = "recompute: layernorm, qkv, core_attn, attn_value, attn_out, mlp";
        let expected = layers(&[
            ("0-2", "recompute: qkv, mlp; offload: block_input"),
            ("4", full),
        ]);
        assert_eq!(policy.to_layers(), expected);
    }

    const NESTED: Labels = Labels::new(&[
        Label::BLOCK_INPUT,
        Label::new("moe"),
        Label::new("moe_experts").within("moe"),
        Label::new("moe_act").within("moe_experts"),
        Label::QKV,
    ]);

    proptest! {
        /// The last layer keeps what it is told to offload.
        #[test]
        fn any_policy_over_labels_can_be_written_down(
            numbers in proptest::collection::vec(proptest::array::uniform8(0usize..3), 1..6),
        ) {
            for labels in [Labels::DENSE, NESTED] {
                let mut policy = Policy::keep_all_of(labels, numbers.len());
                for (layer, numbers) in numbers.iter().enumerate() {
                    let mut actions = Actions::keep_all(labels);
                    let pairs = labels.iter().zip(numbers);
                    pairs.for_each(|(label, number)| actions.set(label, CLAUSES[*number].1));
                    policy.set_labels(layer..layer + 1, actions);
                }
                let (written, layers) = (policy.to_layers(), policy.layers());
                let again = Policy::with_layers(labels, "none", &written, layers);
                prop_assert_eq!(again.unwrap(), policy);
            }
        }
    }
}
