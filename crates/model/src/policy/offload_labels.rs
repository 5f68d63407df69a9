//! The value of `--offload-activations`.

use crate::label::{hint, names};
use crate::{Label, Labels};

/// Labels of activations that wait in host memory for their backward pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadLabels(Vec<Label>);

/// Labels that cannot be offloaded as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum OffloadError {
    /// No such label.
    #[error(
        "unknown label `{label}` in offload.activations; use none, or a comma list of {known}{hint}"
    )]
    UnknownLabel {
        label: String,
        known: String,
        hint: String,
    },
    /// `auto`, where labels are asked for.
    #[error(
        "offload.activations `auto` is part of the choice that --recompute auto makes; write both, with --memory-budget, or \
         name labels"
    )]
    Auto,
    /// `none` inside a list.
    #[error("`none` in offload.activations stands alone; write `none`, or a comma list of {0}")]
    StandsAlone(String),
    /// The same label twice.
    #[error("label `{0}` is given twice in offload.activations; name it once")]
    Twice(String),
    /// Nothing given.
    #[error("offload.activations is empty; write `none` to keep every activation in device memory")]
    Empty,
    /// An activation would be dropped and sent away.
    #[error(
        "`{label}` cannot be offloaded: `{recomputed}` is recomputed in layer {layer}, so it is dropped, not sent; leave \
         `{label}` out of offload.activations, or what recomputes `{recomputed}` out of the recompute specification"
    )]
    Recomputed {
        label: &'static str,
        recomputed: &'static str,
        layer: usize,
    },
}

impl OffloadLabels {
    /// Reads `none` or a comma list of labels of dense blocks.
    ///
    /// # Errors
    /// What is wrong with it and what to write instead.
    pub fn parse(text: &str) -> Result<OffloadLabels, OffloadError> {
        OffloadLabels::parse_of(Labels::DENSE, text)
    }

    /// Reads `none` or a comma list of an architecture's labels.
    ///
    /// # Errors
    /// As [`OffloadLabels::parse`].
    pub fn parse_of(known: Labels, text: &str) -> Result<OffloadLabels, OffloadError> {
        match text.trim() {
            "none" => return Ok(OffloadLabels::default()),
            "auto" => return Err(OffloadError::Auto),
            _ => {}
        }
        let mut labels = Vec::new();
        for name in text.split(',').map(str::trim) {
            let label = parse_label(name, known)?;
            if labels.contains(&label) {
                return Err(OffloadError::Twice(name.into()));
            }
            labels.push(label);
        }
        Ok(OffloadLabels(labels))
    }

    /// Whether nothing is offloaded.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Each label with every label that it covers. A label that two of them cover comes twice.
    pub(crate) fn covered(&self, known: Labels) -> impl Iterator<Item = (Label, Label)> + use<'_> {
        let pairs = move |label: Label| known.covered(label).map(move |covered| (label, covered));
        self.0.iter().copied().flat_map(pairs)
    }
}

/// The text that [`OffloadLabels::parse`] reads: `none`, or the labels.
impl std::fmt::Display for OffloadLabels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        let names: Vec<&str> = self.0.iter().map(|label| label.name()).collect();
        f.write_str(&names.join(","))
    }
}

fn parse_label(name: &str, labels: Labels) -> Result<Label, OffloadError> {
    if let Some(label) = labels.find(name) {
        return Ok(label);
    }
    let known = names(labels.iter());
    Err(match name {
        "" => OffloadError::Empty,
        "none" => OffloadError::StandsAlone(known),
        "auto" => OffloadError::Auto,
        name => OffloadError::UnknownLabel {
            label: name.into(),
            known,
            hint: hint(name, labels.iter()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_read_as_they_are_written() {
        for text in [
            "none",
            "mlp",
            "block_input,attn_value",
            "core_attn,layernorm",
        ] {
            assert_eq!(OffloadLabels::parse(text).unwrap().to_string(), text);
        }
        let spaced = OffloadLabels::parse(" qkv , attn_out ").unwrap();
        assert_eq!(spaced.to_string(), "qkv,attn_out");
        assert!(OffloadLabels::parse("none").unwrap().is_empty() && !spaced.is_empty());
    }

    #[test]
    fn what_cannot_be_read_says_what_to_write() {
        let cases = [
            ("", "is empty; write `none`"),
            ("mlp,", "is empty"),
            ("mlp,mlp", "`mlp` is given twice"),
            ("mlp,none", "`none` in offload.activations stands alone"),
            ("auto", "--recompute auto"),
            ("mlp,auto", "--recompute auto"),
            ("block_inputs", "did you mean `block_input`?"),
            (
                "full",
                "block_input, layernorm, qkv, core_attn, attn_value, attn_out, mlp, mlp_act",
            ),
        ];
        for (text, expected) in cases {
            let message = OffloadLabels::parse(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
