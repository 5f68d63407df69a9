//! The evaluations of a run and its samples of text, made between steps.

use super::records::{EvaluationSummary, Sample};
use super::run_files::RunFiles;
use super::view::{Fact, Section, SectionItem};
use crate::numbers::grouped;
use crate::{Align, Table};

/// Number of the last evaluations that are listed.
const EVALUATIONS: usize = 5;
fn fact(evaluation: &EvaluationSummary, name: &'static str) -> Fact {
    let mut note = vec![format!("step {}", evaluation.step)];
    note.extend(
        evaluation
            .perplexity
            .map(|value| format!("perplexity {}", perplexity(value))),
    );
    note.extend(
        evaluation
            .bits_per_byte
            .map(|bits| format!("{bits:.4} bits per byte")),
    );
    Fact {
        name,
        value: evaluation
            .loss
            .map_or("not finite".into(), |loss| format!("{loss:.4}")),
        note: note.join(" · "),
    }
}

/// The best and the last evaluation, as facts at the top.
pub(super) fn facts(run: &RunFiles) -> impl Iterator<Item = Fact> {
    let best = run
        .best_evaluation()
        .map(|best| fact(best, "best evaluation loss"));
    let last = run
        .evaluations
        .last()
        .map(|last| fact(last, "last evaluation loss"));
    best.into_iter().chain(last)
}

/// The best evaluation and the last ones.
pub(super) fn evaluations(run: &RunFiles) -> Section {
    let mut table = Table::of(&[
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
    let items = match count {
        0 => Vec::new(),
        _ => vec![SectionItem::Say(say), SectionItem::Table(table)],
    };
    Section::new("Evaluations", items)
}

/// The last texts of the model.
pub(super) fn samples(samples: Vec<Sample>) -> Section {
    let items = match samples.is_empty() {
        true => Vec::new(),
        false => vec![SectionItem::Samples(samples)],
    };
    Section::new("Texts of the model's own", items)
}

/// The steps after which a run was resumed, and what was changed.
pub(super) fn resumes(run: &RunFiles) -> Section {
    let mut table = Table::new(&["resumed after", "changed by --allow-change", "from"], &[]);
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
    let items = match run.resumes.is_empty() {
        true => Vec::new(),
        false => vec![SectionItem::Table(table)],
    };
    Section::new("Resumed", items)
}

/// A perplexity. An untrained model's can be very large.
fn perplexity(value: f64) -> String {
    match value {
        large if large >= 1e6 => format!("{large:.2e}"),
        value => grouped(value, 2),
    }
}
