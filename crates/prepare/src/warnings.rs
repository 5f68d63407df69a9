//! Counts what was found in conversations, so that each kind is said once.

use crate::encode::Encoded;
use std::collections::BTreeMap;
use tokenization::Finding;

/// Findings in all documents, each with how often it was made, and where first.
#[derive(Debug, Default)]
pub struct Warnings(BTreeMap<Finding, (u64, String)>);

impl Warnings {
    pub(crate) fn add(&mut self, encoded: &Encoded) {
        for finding in &encoded.findings {
            let warning = self.0.entry(*finding);
            warning.or_insert_with(|| (0, encoded.place.clone())).0 += 1;
        }
    }

    /// A line for each finding: what was found, how often, where first, and what to do.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let warnings = self.0.iter();
        warnings
            .map(|(finding, (count, first))| line(*finding, &format!("{count} (first: {first})")))
    }
}

fn line(finding: Finding, count: &str) -> String {
    match finding {
        Finding::Divided => format!(
            "conversations split into one example per answer: {count}. The chat template writes earlier turns \
             differently once later ones come (--turns each, all or last decides)"
        ),
        Finding::ToolsLeftOut => format!(
            "conversations of which the chat template does not write the `tools`: {count}. The model would learn calls of tools that \
             it is not shown; take a template that writes them, or leave `tools` out"
        ),
        Finding::CallsLeftOut => format!(
            "conversations of which the chat template does not write the `tool_calls`: {count}. The model would not learn them; take \
             a template that writes them, or leave these conversations out"
        ),
        Finding::EmptyAnswer => {
            format!(
                "empty answers, of which only the end is learnt: {count}. Leave them out if that is not meant"
            )
        }
        Finding::NoStop => format!(
            "answers that end in no token that stops generation: {count}. The model would not learn to stop; let the chat template \
             write the tokenizer's eos_token behind an answer, as part of the assistant's turn"
        ),
        Finding::OtherPrompt => format!(
            "answers that do not follow the prompt which the chat template writes for generation: {count}. The template leaves \
             something out, such as thoughts, so the model learns to answer another prompt than it will be given; take a template \
             that writes the same for both"
        ),
    }
}
