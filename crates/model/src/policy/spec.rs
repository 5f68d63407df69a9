//! Recompute specifications: the values of `--recompute` and Megatron's flags.

use crate::label::{hint, names};
use crate::{Label, Labels};

/// What to recompute, before the number of layers is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spec {
    /// `none`, or a comma list of labels: with all labels that these cover, in every layer.
    Labels(Vec<Label>),
    /// `full`, `full:uniform:N`: only the input of every N-th block is kept.
    Uniform(usize),
    /// `full:block:N`: `full` for the first N blocks, nothing in the others.
    Block(usize),
}

/// A recompute specification cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum SpecError {
    /// No such label.
    #[error(
        "unknown recompute label `{label}`; use none, full, full:uniform:N, full:block:N, or a comma list of {known}{hint}"
    )]
    UnknownLabel {
        label: String,
        known: String,
        hint: String,
    },
    /// A label that a clause may name, but not a comma list.
    #[error(
        "recompute label `{0}` is for clauses alone: write --set 'recompute.layers={{\"0-\" = \"recompute: {0}\"}}', or a \
         comma list of {1}"
    )]
    OnlyInClauses(String, String),
    /// A part of the model that these models do not have.
    #[error(
        "recompute label `{0}` names a layer that this model does not have; its labels are {1}"
    )]
    NoSuchLayer(String, String),
    /// `auto`, where a policy is asked for.
    #[error(
        "recompute `auto` is a choice for a whole model within a budget; write it as --recompute auto with --memory-budget"
    )]
    Auto,
    /// A list of clauses that cannot be read.
    #[error(
        "in recompute.layers, `{text}`: {what}; write clauses such as `recompute: mlp, qkv; offload: block_input; keep: \
         mlp_act`, each with none or labels of {known}"
    )]
    Clause {
        text: String,
        what: String,
        known: String,
    },
    /// `none` or `full` inside a list.
    #[error("recompute `{0}` stands alone; write `{0}`, or a comma list of {1}")]
    StandsAlone(String, String),
    /// The same label twice.
    #[error("recompute label `{0}` is given twice; name it once")]
    Twice(String),
    /// Nothing given.
    #[error("the recompute specification is empty; write `none` to keep every activation")]
    Empty,
    /// A malformed form of `full`.
    #[error(
        "recompute `{0}` is no form of full; write full, full:uniform:N or full:block:N with a number N of layers"
    )]
    FullForm(String),
    /// A number of layers outside 1..=layers.
    #[error(
        "recompute `{spec}` asks for {count} layers; this model has {layers}, so write a number from 1 to {layers}"
    )]
    LayerCount {
        spec: String,
        count: usize,
        layers: usize,
    },
    /// A key of `recompute.layers`.
    #[error(
        "`{0}` in recompute.layers is no layer or range of layers; this model has {1} layers: write 7, 0-3 or 20-, counted from 0"
    )]
    LayerRange(String, usize),
    /// Two ranges with a layer in common.
    #[error("`{0}` and `{1}` in recompute.layers overlap; give every layer one specification")]
    Overlap(String, String),
    /// `full:uniform` or `full:block` together with `recompute.layers`.
    #[error(
        "recompute `{0}` divides all layers itself; with recompute.layers use none, full or labels"
    )]
    DividesLayers(String),
    /// Megatron's flags contradict each other.
    #[error("{0}")]
    Megatron(String),
}

/// Whether other models have layers of this label, here or in Megatron-LM.
fn is_of_others(name: &str) -> bool {
    let all = Labels::of_all(|labels| labels.named().collect());
    name == "mhc" || all.iter().any(|label| label.name() == name)
}

impl Spec {
    /// Reads a specification: `none`, `full`, `full:uniform:N`, `full:block:N`, or a comma list of an architecture's labels.
    ///
    /// # Errors
    /// What is wrong with it and what to write instead.
    pub fn parse(text: &str, known: Labels) -> Result<Spec, SpecError> {
        let text = text.trim();
        match text {
            "" => return Err(SpecError::Empty),
            "none" => return Ok(Spec::Labels(Vec::new())),
            "full" => return Ok(Spec::Uniform(1)),
            "auto" => return Err(SpecError::Auto),
            _ => {}
        }
        if let Some(form) = text.strip_prefix("full:")
            && !text.contains(',')
        {
            return parse_full(text, form);
        }
        let mut labels = Vec::new();
        for name in text.split(',').map(str::trim) {
            let label = parse_label(name, known)?;
            if labels.contains(&label) {
                return Err(SpecError::Twice(name.into()));
            }
            labels.push(label);
        }
        let dropped = labels.into_iter().flat_map(|label| known.covered(label));
        Ok(Spec::Labels(dropped.collect()))
    }

    /// Checks a number of layers against the model's.
    ///
    /// # Errors
    /// [`SpecError::LayerCount`].
    pub fn check_layers(&self, layers: usize) -> Result<(), SpecError> {
        let (form, count) = match *self {
            Spec::Uniform(count) => ("uniform", count),
            Spec::Block(count) => ("block", count),
            Spec::Labels(_) => return Ok(()),
        };
        if (1..=layers).contains(&count) {
            return Ok(());
        }
        let spec = format!("full:{form}:{count}");
        Err(SpecError::LayerCount {
            spec,
            count,
            layers,
        })
    }

    /// Whether layers differ under it.
    pub(crate) fn divides_layers(&self) -> bool {
        matches!(self, Spec::Block(_)) || matches!(self, Spec::Uniform(count) if *count > 1)
    }

    /// Whether it drops activations of a label in a layer.
    pub(crate) fn drops(&self, layer: usize, label: Label) -> bool {
        match self {
            Spec::Labels(dropped) => dropped.contains(&label),
            Spec::Uniform(count) => label != Label::BLOCK_INPUT || !layer.is_multiple_of(*count),
            Spec::Block(count) => layer < *count && label != Label::BLOCK_INPUT,
        }
    }
}

fn parse_full(text: &str, form: &str) -> Result<Spec, SpecError> {
    let wrong = || SpecError::FullForm(text.into());
    let (method, count) = form.split_once(':').ok_or_else(wrong)?;
    let count = count.parse().map_err(|_| wrong())?;
    match method {
        "uniform" => Ok(Spec::Uniform(count)),
        "block" => Ok(Spec::Block(count)),
        _ => Err(wrong()),
    }
}

fn parse_label(name: &str, labels: Labels) -> Result<Label, SpecError> {
    if let Some(label) = labels.named().find(|label| label.name() == name) {
        return Ok(label);
    }
    let known = names(labels.named());
    Err(match name {
        "" => SpecError::Empty,
        "none" | "full" | "auto" => SpecError::StandsAlone(name.into(), known),
        name if name.starts_with("full:") => SpecError::StandsAlone(name.into(), known),
        name if labels.find(name).is_some() => SpecError::OnlyInClauses(name.into(), known),
        name if is_of_others(name) => SpecError::NoSuchLayer(name.into(), known),
        name => SpecError::UnknownLabel {
            label: name.into(),
            known,
            hint: hint(name, labels.named()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Spec, SpecError> {
        Spec::parse(text, Labels::DENSE)
    }

    #[test]
    fn labels_drop_what_they_cover() {
        for label in Labels::DENSE.named() {
            let spec = parse(label.name()).unwrap();
            let drops = |label: &Label| spec.drops(3, *label);
            let dropped: Vec<Label> = Labels::DENSE.iter().filter(drops).collect();
            let covered: Vec<Label> = Labels::DENSE.covered(label).collect();
            assert_eq!(dropped, covered, "{}", label.name());
        }
        let both = parse(" core_attn , mlp_act ").unwrap();
        assert!(both.drops(0, Label::CORE_ATTN) && both.drops(0, Label::MLP_ACT));
        assert!(!both.drops(0, Label::MLP));
        assert!(!parse("none").unwrap().drops(0, Label::MLP_ACT));
    }

    #[test]
    fn what_cannot_be_followed_says_what_to_write() {
        let cases = [
            ("", "is empty; write `none`"),
            ("mlp,", "is empty"),
            ("core_atn", "did you mean `core_attn`?"),
            ("layer_norm", "did you mean `layernorm`?"),
            (
                "attn_value",
                "recompute.layers={\"0-\" = \"recompute: attn_value\"}",
            ),
            ("moe", "does not have"),
            ("mla_up_proj,mlp", "does not have"),
            ("mlp,mlp", "given twice"),
            ("mlp,full", "`full` stands alone"),
            ("mlp,full:uniform:2", "stands alone"),
            ("none,mlp", "`none` stands alone"),
            ("full:uniform", "is no form of full"),
            ("full:uniform:x", "is no form of full"),
            ("full:rows:2", "is no form of full"),
            ("auto", "--memory-budget"),
            (
                "swish",
                "a comma list of layernorm, qkv, core_attn, attn_out, mlp, mlp_act",
            ),
        ];
        for (text, expected) in cases {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
        for text in [
            "full:uniform:0",
            "full:uniform:5",
            "full:block:0",
            "full:block:5",
        ] {
            let message = parse(text)
                .unwrap()
                .check_layers(4)
                .unwrap_err()
                .to_string();
            assert!(message.contains("from 1 to 4"), "{message}");
        }
    }
}
