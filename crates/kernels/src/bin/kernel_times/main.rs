//! Times each kernel by itself on the first GPU, for the shapes of some models, by the GPU's own clock.
//!
//! ```console
//! $ kernel_times [--json] [--case NAME]... [--seconds S] [--list] [--tiny]
//! ```
//!
//! A time is the median of 20 after 3 that do not count, each with an emptied cache, on random data. FLOPs and bytes are the
//! operation's own least cost ([`kernels::Cost`]), where those of FP8 count half. NVML tells clock and power right after; power is a
//! mean of up to a second. Operations that have other kernels for Hopper are timed by both kinds. A case is a kernel and a model;
//! NAME is that of either, or both: `rms_norm/llama-3-8b`. A variant is a kernel with the threads and the dynamic shared memory of
//! a block. `--list` needs no GPU. `--tiny` has small shapes, for an emulated GPU.

mod models;
mod operands;
#[rustfmt::skip]
mod table;
mod timing;

use kernels::cuda::KernelKind;
use models::{MODELS, ModelShapes};
use serde_json::{Value, json};
use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};
use table::{Build, TABLE};
use timing::{Bench, ListedCase, list};

const USAGE: &str = "kernel_times [--json] [--case NAME]... [--seconds S] [--list] [--tiny]";

/// Elements of the copy whose rate stands beside all others: far beyond the cache.
const COPIED: usize = 128 << 20;

#[derive(Default)]
struct Arguments {
    json: bool,
    list: bool,
    tiny: bool,
    cases: Vec<String>,
    limit: Option<Duration>,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Option<Arguments> {
        let mut parsed = Arguments::default();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--json" => parsed.json = true,
                "--list" => parsed.list = true,
                "--tiny" => parsed.tiny = true,
                "--case" => parsed.cases.push(words.next()?),
                "--seconds" => {
                    let seconds = words.next()?.parse().ok()?;
                    parsed.limit = Some(Duration::try_from_secs_f64(seconds).ok()?);
                }
                _ => return None,
            }
        }
        Some(parsed)
    }

    fn wants(&self, kernel: &str, model: &str) -> bool {
        let names = [kernel, model, &format!("{kernel}/{model}")];
        let is_named = |case: &String| names.contains(&case.as_str());
        self.cases.is_empty() || self.cases.iter().any(is_named)
    }
}

fn main() {
    let arguments = Arguments::parse(std::env::args().skip(1)).ok_or(USAGE.into());
    if let Err(error) = arguments.and_then(run) {
        eprintln!("error: {error}");
        std::process::exit(2);
    }
}

fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let mut bench = match (arguments.list, arguments.tiny) {
        (true, _) => None,
        (_, true) => Some(Bench::open([1, 2], 1 << 16)?),
        (_, false) => Some(Bench::open([3, 20], COPIED)?),
    };
    let mut stdout = std::io::stdout();
    let (mut done, mut left) = (0, 0);
    for (kernel, build) in TABLE {
        let wanted = MODELS
            .iter()
            .filter(|model| arguments.wants(kernel, model.name));
        for model in wanted {
            if arguments.limit.is_some_and(|limit| start.elapsed() > limit) {
                left += 1;
                continue;
            }
            let model = if arguments.tiny { model.tiny() } else { *model };
            for (kind, listed) in by_kinds(*build, &model)? {
                let mut record = json!({"kernel": kernel, "model": model.name, "shape": listed.sizes, "kind": kind});
                let figures = match &mut bench {
                    None => json!({"flops": listed.cost.flops, "bytes": listed.cost.bytes}),
                    // One that this GPU does not have is no reason to time no other.
                    Some(bench) => (bench.measure(&listed, *build, &model, kind))
                        .unwrap_or_else(|error| json!({"refused": error.to_string()})),
                };
                if let (Value::Object(record), Value::Object(figures)) = (&mut record, figures) {
                    record.extend(figures);
                }
                match arguments.json {
                    true => writeln!(stdout, "{record}")?,
                    false => writeln!(stdout, "{}", row(&record, done == 0))?,
                }
                done += 1;
            }
        }
    }
    if left > 0 {
        eprintln!("the time is over: {left} cases are left");
    }
    if done + left == 0 {
        return Err("no case has this name; --list has them all".into());
    }
    Ok(())
}

/// A case by the kernels for 8.0, and by those for Hopper where these have other names.
fn by_kinds(
    build: Build,
    model: &ModelShapes,
) -> Result<Vec<(KernelKind, ListedCase)>, Box<dyn Error>> {
    let mut cases: Vec<(KernelKind, ListedCase)> = Vec::new();
    for kind in [KernelKind::Sm80, KernelKind::Sm90] {
        let listed = list(build, model, kind)?;
        cases.extend(listed.map(|listed| (kind, listed)));
    }
    cases.dedup_by(|later, first| later.1.kernels() == first.1.kernels());
    Ok(cases)
}

/// A line of the table, after its head if it is the first.
fn row(record: &Value, is_first: bool) -> String {
    const WIDTHS: [usize; 14] = [24, 14, 26, 10, 10, 8, 8, 9, 6, 6, 11, 11, 13, 0];
    let cell = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => {
            let values = values
                .iter()
                .map(|value| value.to_string().replace('"', ""));
            values.collect::<Vec<_>>().join(",")
        }
        Value::Number(number) if number.is_f64() => {
            format!("{:.1}", number.as_f64().unwrap_or_default())
        }
        other => other.to_string(),
    };
    let line = |cells: &mut dyn Iterator<Item = String>| {
        let cells = cells.zip(WIDTHS);
        let padded = cells.map(|(cell, width)| format!("{cell:<width$} "));
        padded.collect::<String>().trim_end().to_string()
    };
    let record = record.as_object().expect("a record has fields");
    let values = line(&mut record.values().map(cell));
    match is_first {
        true => format!("{}\n{values}", line(&mut record.keys().cloned())),
        false => values,
    }
}
