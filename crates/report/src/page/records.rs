//! Records of `metrics.jsonl`, reduced to what a page needs.

use serde::Serialize;
use serde_json::Value;

/// Number of the last texts on a page.
pub(super) const SAMPLES: usize = 4;
/// The most characters of a prompt, and of a text, that are shown.
const LONGEST: usize = 400;

/// The figures of an evaluation. Values that are not finite are none.
pub(super) struct EvaluationSummary {
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) perplexity: Option<f64>,
    pub(super) bits_per_byte: Option<f64>,
    pub(super) targets: Option<u64>,
    pub(super) ms: Option<f64>,
}

/// A sample of the model's text.
#[derive(Clone, Serialize)]
pub(super) struct Sample {
    /// The step after which it was made; in a comparison, with the run's name.
    at: String,
    prompt: String,
    text: String,
}

impl EvaluationSummary {
    /// Reads a record `eval`.
    pub(super) fn read(record: &Value) -> EvaluationSummary {
        let number = |name: &str| record[name].as_f64();
        EvaluationSummary {
            step: record["step"].as_u64().unwrap_or(0),
            loss: number("loss"),
            perplexity: number("perplexity"),
            bits_per_byte: number("bits_per_byte"),
            targets: record["targets"].as_u64(),
            ms: number("eval_ms"),
        }
    }
}

impl Sample {
    /// Reads a record `sample`.
    pub(super) fn read(record: &Value) -> Sample {
        let text = |name: &str| harmless(record[name].as_str().unwrap_or_default());
        Sample {
            at: format!("step {}", record["step"]),
            prompt: text("prompt"),
            text: text("text"),
        }
    }

    /// The same, with the name of its run.
    pub(super) fn of(&self, run: &str) -> Sample {
        Sample {
            at: format!("{run}, {}", self.at),
            ..self.clone()
        }
    }

    /// The sample on one line, with a bar between the prompt and the model's text.
    pub(super) fn line(&self) -> String {
        format!("{}: {}|{}", self.at, self.prompt, self.text)
    }
}

/// A text without control characters, so that a terminal only shows it, on one line, and shortened.
pub(super) fn harmless(text: &str) -> String {
    let shown = |character| match character {
        '\n' => '↵',
        '\0'..='\x1f' => char::from_u32('␀' as u32 + character as u32).unwrap_or('\u{fffd}'),
        // The other control characters, line ends, and characters that change the direction of text.
        '\x7f'..='\u{9f}'
        | '\u{61c}'
        | '\u{200e}'
        | '\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2066}'..='\u{2069}' => '\u{fffd}',
        other => other,
    };
    let mut characters = text.chars();
    let mut harmless: String = characters.by_ref().take(LONGEST).map(shown).collect();
    if characters.next().is_some() {
        harmless.push('…');
    }
    harmless
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        let text = harmless("a\x1b[2J\r\n\t\u{9b}\u{202e}é\0");
        assert_eq!(text, "a␛[2J␍↵␉\u{fffd}\u{fffd}é␀");
        let long = harmless(&"é".repeat(LONGEST + 1));
        assert_eq!(
            (long.chars().count(), long.ends_with("é…")),
            (LONGEST + 1, true)
        );
    }
}
