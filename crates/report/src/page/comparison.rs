//! The page of two runs: their different settings, then their results.

use super::configuration::differing;
use super::ending::ending;
use super::figures::memory_beside;
use super::history::samples;
use super::records::EvaluationSummary;
use super::run_files::RunFiles;
use super::single::{about, course};
use super::view::{Page, Section, SectionItem};
use crate::Table;
use crate::numbers::{difference, exact, grouped};
use serde_json::Value;

/// The page of two runs, differences first.
pub(super) fn page(a: &RunFiles, b: &RunFiles) -> Page {
    let [name_a, name_b] = names(a, b);
    let heads = [name_a.as_str(), name_b.as_str()];
    let changed = match differing(heads, &a.config, &b.config) {
        Some(table) => SectionItem::Table(table),
        None => SectionItem::Say("The settings are the same.".into()),
    };
    let mut side_by_side = vec![SectionItem::Table(side_by_side(heads, a, b))];
    side_by_side.extend(same_losses(a, b).map(SectionItem::Say));
    let parts = [
        Section {
            title: "Settings that differ",
            items: vec![changed],
            in_text: true,
        },
        Section {
            title: "Side by side",
            items: side_by_side,
            in_text: true,
        },
        course(&[(name_a.clone(), a), (name_b.clone(), b)]),
        last_texts(heads, a, b),
        memory(heads, a, b),
    ];
    Page {
        title: format!("{name_b} against {name_a}"),
        about: match (about(a), about(b)) {
            (a, b) if a == b => a,
            (a, b) => format!("{name_a}: {a} — {name_b}: {b}"),
        },
        endings: vec![(name_a.clone(), ending(a)), (name_b.clone(), ending(b))],
        facts: Vec::new(),
        parts: parts
            .into_iter()
            .filter(|part| !part.items.is_empty())
            .collect(),
    }
}

/// The folders' names, or their paths if the names are equal.
fn names(a: &RunFiles, b: &RunFiles) -> [String; 2] {
    match (a.name(), b.name()) {
        (a_name, b_name) if a_name == b_name => [a, b].map(|run| run.folder.display().to_string()),
        (a, b) => [a, b],
    }
}

/// The last text of each run.
fn last_texts(heads: [&str; 2], a: &RunFiles, b: &RunFiles) -> Section {
    let last = |(name, run): (&str, &RunFiles)| Some(run.samples.back()?.of(name));
    samples(heads.into_iter().zip([a, b]).filter_map(last).collect())
}

fn memory(heads: [&str; 2], a: &RunFiles, b: &RunFiles) -> Section {
    let rounded = format!("{}, rounded", heads[1]);
    let measured = |run: &RunFiles| !run.peak_step.is_null();
    let (what, a, b, evaluation) = match measured(a) && measured(b) {
        true => (
            "Measured, in the step with the largest peak.",
            &a.peak_step,
            &b.peak_step,
            [a, b].map(|run| &run.peak_evaluation["peak_bytes"]),
        ),
        false => (
            "Planned: not both runs made a step.",
            &a.plan,
            &b.plan,
            [&Value::Null; 2],
        ),
    };
    let table = memory_beside([heads[0], heads[1], &rounded], a, b, evaluation);
    Section {
        title: "Memory",
        items: vec![SectionItem::Say(what.into()), SectionItem::Table(table)],
        in_text: true,
    }
}

/// In how many steps the loss is the same. Metrics have all digits, so equal numbers have equal bits.
fn same_losses(a: &RunFiles, b: &RunFiles) -> Option<String> {
    let both = || a.steps.iter().zip(&b.steps);
    let differs = both().find(|(a, b)| (a.step, a.loss) != (b.step, b.loss));
    let steps = both().count();
    Some(match differs {
        None if steps == 0 => return None,
        None => format!("The loss is the same in all {steps} steps that both made, bit for bit."),
        Some((first, _)) => format!("The loss differs from step {} on.", first.step),
    })
}

/// Figures of both runs, and the differences of B from A.
fn side_by_side(heads: [&str; 2], a: &RunFiles, b: &RunFiles) -> Table {
    let mut table = Table::new(&[""], &[heads[0], heads[1], "difference"]);
    let count = |run: &RunFiles| run.steps.last().map(|step| step.step);
    bytes(&mut table, "steps", [count(a), count(b)]);
    number(&mut table, "last loss", 4, [a.last_loss(), b.last_loss()]);
    evaluations(&mut table, [a, b]);
    let waited = [a.waited_percent(), b.waited_percent()];
    number(&mut table, "time that steps waited for data, %", 1, waited);
    speed(&mut table, [a.tokens_per_s(), b.tokens_per_s()]);
    let plan: fn(&RunFiles) -> &Value = |run| &run.plan;
    let fields = [
        ("planned peak, bytes", plan, "peak_bytes"),
        ("measured peak, bytes", |run| &run.peak_step, "peak_bytes"),
        ("reserved as planned, bytes", plan, "reserved_bytes"),
        ("host memory, offloaded, bytes", plan, "host_pinned_bytes"),
        ("on the disk, bytes", plan, "disk_bytes"),
        ("to the device in a step, bytes", plan, "h2d_bytes"),
        ("to the host in a step, bytes", plan, "d2h_bytes"),
        ("from the disk in a step, bytes", plan, "disk_read_bytes"),
        ("to the disk in a step, bytes", plan, "disk_written_bytes"),
        ("to other ranks in a step, bytes", plan, "sent_bytes"),
        (
            "resident set at most, bytes",
            |run| &run.end,
            "max_rss_bytes",
        ),
    ];
    for (name, of, field) in fields {
        bytes(&mut table, name, [a, b].map(|run| of(run)[field].as_u64()));
    }
    let extra = |run: &RunFiles| Some(100.0 * run.plan["recompute_flops_fraction"].as_f64()?);
    number(
        &mut table,
        "extra FLOPs of recompute, %",
        1,
        [extra(a), extra(b)],
    );
    field_of_replays(&mut table, a, b);
    table
}

/// The best evaluation of each run, and its number of targets.
fn evaluations(table: &mut Table, runs: [&RunFiles; 2]) {
    let best = runs.map(RunFiles::best_evaluation);
    let mut of = |name: &str, field: fn(&EvaluationSummary) -> Option<f64>| {
        number(table, name, 4, best.map(|best| field(best?)));
    };
    of("best evaluation loss", |best| best.loss);
    // A larger perplexity has too many digits; then the loss is enough.
    of("  its perplexity", |best| {
        best.perplexity.filter(|perplexity| *perplexity < 1e6)
    });
    of("  its bits per byte", |best| best.bits_per_byte);
    bytes(table, "  its step", best.map(|best| Some(best?.step)));
    bytes(table, "  its targets", best.map(|best| best?.targets));
}

fn field_of_replays(table: &mut Table, a: &RunFiles, b: &RunFiles) {
    let replays = [a, b].map(|run| {
        let counts = run.last_step["replayed"].as_object()?;
        Some(counts.values().filter_map(Value::as_u64).sum())
    });
    bytes(table, "stages replayed in a step", replays);
}

/// A row of integers; none if both are 0.
fn bytes(table: &mut Table, name: &str, [a, b]: [Option<u64>; 2]) {
    if a.unwrap_or(0) == 0 && b.unwrap_or(0) == 0 {
        return;
    }
    let cell = |value: Option<u64>| value.map_or(String::new(), exact);
    let differs = a.zip(b).map_or(String::new(), |(a, b)| difference(a, b));
    table.row([name.to_string(), cell(a), cell(b), differs]);
}

fn number(table: &mut Table, name: &str, decimals: usize, both: [Option<f64>; 2]) {
    compared(table, name, decimals, both, |a, b| match b - a {
        0.0 => "0".into(),
        more => format!("{more:+.decimals$}"),
    });
}

fn speed(table: &mut Table, both: [Option<f64>; 2]) {
    compared(table, "tokens/s, median", 0, both, |a, b| {
        format!("{:+.1} %", 100.0 * (b / a - 1.0))
    });
}

/// A row of numbers; none if there are none.
fn compared(
    table: &mut Table,
    name: &str,
    decimals: usize,
    [a, b]: [Option<f64>; 2],
    differs: impl Fn(f64, f64) -> String,
) {
    let cell = |value: Option<f64>| value.map_or(String::new(), |value| grouped(value, decimals));
    let differs = a.zip(b).map_or(String::new(), |(a, b)| differs(a, b));
    if a.is_some() || b.is_some() {
        table.row([name.to_string(), cell(a), cell(b), differs]);
    }
}
