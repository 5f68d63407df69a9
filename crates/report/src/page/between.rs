//! What a run did between its steps: evaluations, and texts of the model's own.

use super::chart::grouped;
use super::run::Run;
use super::view::{Fact, Item, Part};
use crate::{Align, Table};
use serde::Serialize;
use serde_json::Value;

/// How many of the last evaluations are listed.
const EVALUATIONS: usize = 5;
/// How many of the last texts a page has.
pub(super) const SAMPLES: usize = 4;
/// Characters of a prompt, and of a text, that are shown.
const LONGEST: usize = 400;

/// An evaluation, in short. What is not finite is none.
pub(super) struct Evaluation {
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) perplexity: Option<f64>,
    pub(super) bits_per_byte: Option<f64>,
    pub(super) targets: Option<u64>,
    ms: Option<f64>,
}

/// A text of the model's own.
#[derive(Clone, Serialize)]
pub(super) struct Sample {
    /// The step after which it was made, in a comparison the run too.
    at: String,
    prompt: String,
    text: String,
}

impl Evaluation {
    /// From the record `eval`.
    pub(super) fn read(record: &Value) -> Evaluation {
        let number = |name: &str| record[name].as_f64();
        Evaluation {
            step: record["step"].as_u64().unwrap_or(0),
            loss: number("loss"),
            perplexity: number("perplexity"),
            bits_per_byte: number("bits_per_byte"),
            targets: record["targets"].as_u64(),
            ms: number("eval_ms"),
        }
    }

    fn fact(&self, name: &'static str) -> Fact {
        let mut note = vec![format!("step {}", self.step)];
        note.extend(
            self.perplexity
                .map(|value| format!("perplexity {}", perplexity(value))),
        );
        note.extend(
            self.bits_per_byte
                .map(|bits| format!("{bits:.4} bits per byte")),
        );
        Fact {
            name,
            value: self
                .loss
                .map_or("not finite".into(), |loss| format!("{loss:.4}")),
            note: note.join(" · "),
        }
    }
}

impl Sample {
    /// From the record `sample`.
    pub(super) fn read(record: &Value) -> Sample {
        let text = |name: &str| harmless(record[name].as_str().unwrap_or_default());
        Sample {
            at: format!("step {}", record["step"]),
            prompt: text("prompt"),
            text: text("text"),
        }
    }

    /// The same as that of a run among others.
    pub(super) fn of(&self, run: &str) -> Sample {
        Sample {
            at: format!("{run}, {}", self.at),
            ..self.clone()
        }
    }

    /// The same on a line, with a bar where the model took over.
    pub(super) fn line(&self) -> String {
        format!("{}: {}|{}", self.at, self.prompt, self.text)
    }
}

/// A text that a terminal shows and does not obey, on one line, of a length that can be read.
pub(super) fn harmless(text: &str) -> String {
    let shown = |character| match character {
        '\n' => '↵',
        '\0'..='\x1f' => char::from_u32('␀' as u32 + character as u32).unwrap_or('\u{fffd}'),
        // The rest of those without a picture, what ends a line, and what turns the direction of all that follows it.
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

/// The best and the last evaluation, to know first.
pub(super) fn facts(run: &Run) -> impl Iterator<Item = Fact> {
    let best = run
        .best_evaluation()
        .map(|best| best.fact("best evaluation loss"));
    let last = run
        .evaluations
        .last()
        .map(|last| last.fact("last evaluation loss"));
    best.into_iter().chain(last)
}

/// The best evaluation and the last ones.
pub(super) fn evaluations(run: &Run) -> Part {
    let mut table = Table::new(&[
        ("evaluation", Align::Left),
        ("loss", Align::Right),
        ("perplexity", Align::Right),
        ("bits per byte", Align::Right),
        ("time", Align::Right),
        ("", Align::Left),
    ]);
    let best = run.best_evaluation().map(|best| best.step);
    let first = run.evaluations.len().saturating_sub(EVALUATIONS);
    let rows = run.evaluations.iter().enumerate();
    for (_, row) in rows.filter(|(index, row)| *index >= first || Some(row.step) == best) {
        let cell = |value: Option<f64>| value.map_or(String::new(), |value| grouped(value, 4));
        table.row([
            format!("step {}", row.step),
            row.loss
                .map_or("not finite".into(), |loss| grouped(loss, 4)),
            row.perplexity.map_or(String::new(), perplexity),
            cell(row.bits_per_byte),
            row.ms
                .map_or(String::new(), |ms| format!("{} ms", grouped(ms, 0))),
            if Some(row.step) == best {
                "best".into()
            } else {
                String::new()
            },
        ]);
    }
    let count = run.evaluations.len();
    let targets = run.evaluations.last().and_then(|last| last.targets);
    let say = match targets {
        Some(targets) => format!(
            "{count} so far, of {} targets the last one.",
            grouped(targets as f64, 0)
        ),
        None => format!("{count} so far."),
    };
    Part {
        title: "Evaluations",
        items: match count {
            0 => Vec::new(),
            _ => vec![Item::Say(say), Item::Table(table)],
        },
        in_text: true,
    }
}

/// The last texts.
pub(super) fn samples(samples: Vec<Sample>) -> Part {
    Part {
        title: "Texts of the model's own",
        items: match samples.is_empty() {
            true => Vec::new(),
            false => vec![Item::Samples(samples)],
        },
        in_text: true,
    }
}

/// Where a run was resumed, and what was changed then.
pub(super) fn resumes(run: &Run) -> Part {
    let mut table = Table::new(&[
        ("resumed after", Align::Left),
        ("changed by --allow-change", Align::Left),
        ("from", Align::Left),
    ]);
    for resume in &run.resumes {
        let changes = match resume.changes.is_empty() {
            true => "nothing".into(),
            false => resume.changes.join("; "),
        };
        table.row([
            format!("step {}", resume.step),
            changes,
            resume.from.clone(),
        ]);
    }
    Part {
        title: "Resumed",
        items: match run.resumes.is_empty() {
            true => Vec::new(),
            false => vec![Item::Table(table)],
        },
        in_text: true,
    }
}

/// A perplexity, which of a model that knows nothing has no bound.
fn perplexity(value: f64) -> String {
    match value {
        large if large >= 1e6 => format!("{large:.2e}"),
        value => grouped(value, 2),
    }
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
