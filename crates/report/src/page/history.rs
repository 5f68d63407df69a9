//! The evaluations of a run and its samples of text, made between steps.

use super::records::{EvaluationSummary, Sample};
use super::run_files::RunFiles;
use super::view::{Fact, Section, SectionItem};
use crate::Align::{Left, Right};
use crate::Table;
use crate::numbers::grouped;

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
#[rustfmt::skip]
pub(super) fn evaluations(run: &RunFiles) -> Section {
    let best = run.best_evaluation().map(|best| best.step);
    let first = run.evaluations.len().saturating_sub(EVALUATIONS);
    let rows = run.evaluations.iter().enumerate();
    let rows = rows.filter(|(index, row)| *index >= first || Some(row.step) == best);
    let cell = |value: Option<f64>| value.map(|value| grouped(value, 4));
    let ms = |row: &EvaluationSummary| row.ms.map(|ms| format!("{} ms", grouped(ms, 0)));
    let mark = |row: &EvaluationSummary| if Some(row.step) == best { "best" } else { "" };
    let table = Table::of_items(rows.map(|(_, row)| row), &[
        ("evaluation", Left, &|row| format!("step {}", row.step)),
        ("loss", Right, &|row| cell(row.loss).unwrap_or("not finite".into())),
        ("perplexity", Right, &|row| row.perplexity.map(perplexity).unwrap_or_default()),
        ("bits per byte", Right, &|row| cell(row.bits_per_byte).unwrap_or_default()),
        ("time", Right, &|row| ms(row).unwrap_or_default()),
        ("", Left, &|row| mark(row).into()),
    ]);
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
