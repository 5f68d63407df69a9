//! Writes the table of strategies for a terminal, as Markdown and as comma-separated values.

use super::measure::Outcome;
use super::paper::GPUS;
use super::rows::Row;
use memory::format_bytes;
use report::{Align, Table};

/// The columns. Numbers are aligned to the right.
const COLUMNS: [(&str, Align); 19] = [
    ("strategy", Align::Left),
    ("result", Align::Left),
    ("tokens/s", Align::Right),
    ("spread", Align::Right),
    ("TFLOP/s", Align::Right),
    ("MFU", Align::Right),
    ("speed", Align::Right),
    ("planned peak", Align::Right),
    ("measured peak", Align::Right),
    ("saved", Align::Right),
    ("sent a step", Align::Right),
    ("ms/GiB", Align::Right),
    ("all ranks", Align::Right),
    ("computes, on paper", Align::Right),
    ("step, on paper", Align::Right),
    ("cost a GiB", Align::Right),
    (GPUS[0].1, Align::Left),
    (GPUS[1].1, Align::Left),
    ("dominated by", Align::Left),
];

/// How much longer than what it computes a step must be to have a column of its own.
const NOTABLY: f64 = 1.005;

/// All rows as a table, without empty columns.
pub(crate) fn table(rows: &[Row]) -> Table {
    let mut table = Table::of(&COLUMNS);
    rows.iter().for_each(|row| table.row(cells(row)));
    table.without_empty_columns()
}

/// Why strategies have no measurements, a line each.
pub(crate) fn reasons(rows: &[Row]) -> String {
    let lines = rows.iter().filter_map(|row| {
        let reason = row.reason.as_ref()?;
        Some(format!(
            "  {}: {}: {reason}\n",
            row.strategy,
            row.result.name()
        ))
    });
    lines.collect()
}

fn cells(row: &Row) -> [String; COLUMNS.len()] {
    let number = |value: Option<f64>, text: fn(f64) -> String| value.map_or(String::new(), text);
    let bytes = |value: Option<u64>| value.map_or(String::new(), format_bytes);
    let saved = row.saved_bytes.filter(|saved| *saved != 0);
    let paper = row.paper.as_ref();
    let fits = |gpu: &str| {
        let fits = paper.map(|paper| paper.fits.contains(&gpu));
        fits.map_or(String::new(), |fits| {
            if fits { "fits" } else { "no" }.into()
        })
    };
    let ranks = paper.map(|paper| (paper.least_peak_bytes, paper.most_peak_bytes));
    let ranks = ranks.filter(|_| row.ranks.is_some_and(|ranks| ranks > 1));
    let is_alone = row.ranks.is_none_or(|ranks| ranks == 1);
    let longer_step = paper.filter(|paper| is_alone && paper.step_ms > paper.compute_ms * NOTABLY);
    let longer_step = longer_step.map(|paper| paper.step_ms);
    [
        row.strategy.clone(),
        match (row.result, paper) {
            (Outcome::Ok, Some(_)) if row.tokens_per_s.is_none() => "planned".into(),
            (result, _) => result.name().into(),
        },
        number(row.tokens_per_s, |speed| format!("{speed:.0}")),
        number(row.spread, |spread| format!("{:.1} %", 100.0 * spread)),
        number(row.tflops, |tflops| format!("{tflops:.3}")),
        number(row.mfu, |mfu| format!("{:.1} %", 100.0 * mfu)),
        number(row.against_baseline, |ratio| format!("{ratio:.3}")),
        bytes(row.planned_peak_bytes),
        bytes(row.peak_bytes),
        saved.map_or(String::new(), signed_bytes),
        bytes(row.planned_sent_bytes),
        // Adding 0 avoids "-0".
        number(row.ms_per_gib_saved, |ms| {
            format!("{:.0}", ms.round() + 0.0)
        }),
        ranks.map_or(String::new(), |(least, most)| match least == most {
            true => format_bytes(most),
            false => format!("{} to {}", format_bytes(least), format_bytes(most)),
        }),
        number(paper.map(|paper| paper.compute_ms), |ms| {
            format!("{ms:.0} ms")
        }),
        number(longer_step, |ms| format!("{ms:.0} ms")),
        number(paper.and_then(|paper| paper.ms_per_gib_saved), |ms| {
            format!("{:.2} ms", ms + 0.0)
        }),
        fits(GPUS[0].1),
        fits(GPUS[1].1),
        row.dominated_by.clone().unwrap_or_default(),
    ]
}

fn signed_bytes(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", format_bytes(bytes.unsigned_abs()))
}

/// All fields of all rows that have a single value, for spreadsheets, with sizes in bytes.
pub(crate) fn csv(rows: &[Row]) -> String {
    let mut text = String::from(
        "strategy,result,tokens_per_s,spread,step_ms,tflops,mfu,against_baseline,planned_peak_bytes,peak_bytes,\
         saved_bytes,ms_per_gib_saved,planned_sent_bytes,recompute_flops_fraction,dominated_by,reason\n",
    );
    for row in rows {
        let number = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
        let whole = |value: Option<u64>| value.map_or(String::new(), |value| value.to_string());
        let fields = [
            quoted(&row.strategy),
            row.result.name().to_string(),
            number(row.tokens_per_s),
            number(row.spread),
            number(row.step_ms),
            number(row.tflops),
            number(row.mfu),
            number(row.against_baseline),
            whole(row.planned_peak_bytes),
            whole(row.peak_bytes),
            row.saved_bytes
                .map_or(String::new(), |bytes| bytes.to_string()),
            number(row.ms_per_gib_saved),
            whole(row.planned_sent_bytes),
            number(row.recompute_flops_fraction),
            quoted(row.dominated_by.as_deref().unwrap_or_default()),
            quoted(row.reason.as_deref().unwrap_or_default()),
        ];
        text += &fields.join(",");
        text.push('\n');
    }
    text
}

/// Quotes a field according to RFC 4180.
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.into(),
    }
}

/// The number of strategies whose run failed.
pub(crate) fn failures(rows: &[Row]) -> usize {
    rows.iter()
        .filter(|row| row.result == Outcome::Failed)
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_with_commas_are_quoted() {
        assert_eq!(quoted("core_attn,mlp"), "\"core_attn,mlp\"");
        assert_eq!(quoted("none"), "none");
        assert_eq!(quoted("a \"b\""), "\"a \"\"b\"\"\"");
    }

    #[test]
    fn what_grows_is_negative() {
        assert_eq!(signed_bytes(-2048), "-2.00 KiB");
    }
}
