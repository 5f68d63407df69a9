//! Times each kernel by itself on the first GPU, for the shapes of some models, by the GPU's own clock.
//!
//! ```console
//! $ kernel_times [--json] [--case TEXT]... [--seconds S] [--list] [--tiny]
//! ```
//!
//! A time is the median of 20 after 3 that do not count, each after the cache was emptied, on random data. FLOPs and bytes are the
//! operation's own least cost ([`kernels::Cost`]); FP8 counts half there. NVML tells clock and power while the operation runs; power is a
//! mean of up to a second. A case is a kernel and a model, as `rms_norm/llama-3-8b`; TEXT is any part of its name, or a kernel's
//! whole name. `--list` needs no GPU. `--tiny` has small shapes, which an emulated GPU computes too.

mod models;
mod operands;
#[rustfmt::skip]
mod table;
mod timing;

use kernels::cuda::Call;
use models::{MODELS, Model};
use serde_json::{Value, json};
use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};
use table::{Build, TABLE};
use timing::{Bench, Listed, Rounds, list};

/// Elements of the copy whose rate stands beside all others: far beyond the cache.
const COPY_ELEMENTS: usize = 128 << 20;

#[derive(Default)]
struct Arguments {
    json: bool,
    list: bool,
    tiny: bool,
    cases: Vec<String>,
    limit: Option<Duration>,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
        let mut parsed = Arguments::default();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} wants a value"));
            match word.as_str() {
                "--json" => parsed.json = true,
                "--list" => parsed.list = true,
                "--tiny" => parsed.tiny = true,
                "--case" => parsed.cases.push(value()?),
                "--seconds" => {
                    let seconds = value()?.parse().ok();
                    let limit =
                        seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                    parsed.limit = Some(limit.ok_or("--seconds wants a number of seconds")?);
                }
                _ => {
                    return Err(format!(
                        "{word}: kernel_times [--json] [--case TEXT]... [--seconds S] [--list] [--tiny]"
                    ));
                }
            }
        }
        Ok(parsed)
    }

    fn wants(&self, kernel: &str, model: &Model) -> bool {
        let name = format!("{kernel}/{}", model.name);
        let is_named = |text: &String| {
            kernel == text
                || text.contains('/') && name.contains(text.as_str())
                || model.name == text
        };
        self.cases.is_empty() || self.cases.iter().any(is_named)
    }
}

fn main() {
    let outcome = Arguments::parse(std::env::args().skip(1))
        .map_err(Into::into)
        .and_then(|arguments| run(&arguments));
    if let Err(error) = outcome {
        eprintln!("error: {error}");
        std::process::exit(2);
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let models = MODELS.map(|model| if arguments.tiny { model.tiny() } else { model });
    let cases = TABLE
        .iter()
        .flat_map(|(kernel, build)| models.iter().map(move |model| (*kernel, *build, model)));
    let wanted = cases.filter(|(kernel, _, model)| arguments.wants(kernel, model));
    let cases: Vec<(&str, Build, &Model)> = wanted.collect();
    if cases.is_empty() {
        return Err("no case has this name; --list names them".into());
    }
    let mut bench = match (arguments.list, arguments.tiny) {
        (true, _) => None,
        (false, true) => Some((
            Bench::open(Rounds {
                warm_up: 1,
                timed: 2,
            })?,
            1 << 16,
        )),
        (false, false) => Some((
            Bench::open(Rounds {
                warm_up: 3,
                timed: 20,
            })?,
            COPY_ELEMENTS,
        )),
    };
    let copy_gbps = bench
        .as_mut()
        .map(|(bench, elements)| bench.copy_gbps(*elements))
        .transpose()?;
    for (place, (kernel, build, model)) in cases.iter().enumerate() {
        if arguments.limit.is_some_and(|limit| start.elapsed() > limit) {
            eprintln!(
                "{} seconds are over: {} of {} cases are left",
                start.elapsed().as_secs(),
                cases.len() - place,
                cases.len()
            );
            break;
        }
        let Some(listed) = list(*build, model)? else {
            continue;
        };
        let mut record = json!({"kernel": kernel, "model": model.name, "shape": listed.sizes});
        if let (Some((bench, _)), Some(copy_gbps)) = (&mut bench, copy_gbps) {
            let timed = measure(bench, &listed, *build, model, copy_gbps);
            // A kernel that this GPU does not have is no reason to time no other.
            let timed = timed.unwrap_or_else(|error| json!({"refused": error.to_string()}));
            merge(&mut record, timed);
        } else {
            merge(
                &mut record,
                json!({"flops": listed.cost.flops, "bytes": listed.cost.bytes}),
            );
        }
        let line = if arguments.json {
            record.to_string()
        } else {
            row(&record, place == 0)
        };
        writeln!(std::io::stdout(), "{line}")?;
    }
    Ok(())
}

fn measure(
    bench: &mut Bench,
    listed: &Listed,
    build: Build,
    model: &Model,
    copy_gbps: f64,
) -> Result<Value, Box<dyn Error>> {
    let room = bench.room()?;
    if listed.bytes > room {
        return Err(format!(
            "its tensors take {} bytes, and {room} are free",
            listed.bytes
        )
        .into());
    }
    let launches = bench.launches(&listed.calls)?;
    let times = bench.times(build, model)?;
    let (us, cost) = (times.median_us(), listed.cost);
    let products = listed
        .calls
        .iter()
        .filter(|call| matches!(call, Call::Product(_)));
    let variant = launches.iter().map(|launch| launch.variant.clone());
    let variant: Vec<String> = variant.chain(products.map(|_| "cublaslt".into())).collect();
    let of = |figure: fn(&timing::Launch) -> i32| launches.iter().map(figure).collect::<Vec<i32>>();
    Ok(json!({
        "us": us,
        "min_us": times.min_us(),
        "tflops": cost.flops as f64 / us / 1e6,
        "gbps": cost.bytes as f64 / us / 1e3,
        "copy_gbps": copy_gbps,
        "sm_mhz": times.sm_mhz,
        "watts": times.watts,
        "registers": of(|launch| launch.registers),
        "local_bytes": of(|launch| launch.local_bytes),
        "blocks_per_sm": of(|launch| launch.blocks_per_sm),
        "variant": variant,
    }))
}

fn merge(record: &mut Value, more: Value) {
    if let (Value::Object(record), Value::Object(more)) = (record, more) {
        record.extend(more);
    }
}

/// A line of the table.
fn row(record: &Value, is_first: bool) -> String {
    const COLUMNS: [(&str, usize); 9] = [
        ("kernel", 24),
        ("model", 14),
        ("shape", 26),
        ("us", 10),
        ("min_us", 10),
        ("tflops", 8),
        ("gbps", 8),
        ("sm_mhz", 6),
        ("watts", 6),
    ];
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Array(sizes) => sizes
            .iter()
            .map(Value::to_string)
            .collect::<Vec<_>>()
            .join("x"),
        Value::Number(number) if number.is_f64() => {
            format!("{:.1}", number.as_f64().unwrap_or_default())
        }
        Value::Null => "-".into(),
        other => other.to_string(),
    };
    let line = |cell: &dyn Fn(&str) -> String| {
        COLUMNS
            .map(|(key, width)| format!("{:<width$}", cell(key)))
            .join(" ")
    };
    let names = if is_first {
        line(&|key| key.into()) + " registers, blocks a multiprocessor, variant\n"
    } else {
        String::new()
    };
    let ends = ["registers", "blocks_per_sm", "variant", "refused"].map(|key| match &record[key] {
        Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join("+"),
        value => text(value),
    });
    let ends: Vec<&String> = ends.iter().filter(|text| *text != "-").collect();
    let ends = ends
        .iter()
        .map(|text| text.as_str())
        .collect::<Vec<_>>()
        .join(" ");
    format!("{names}{} {ends}", line(&|key| text(&record[key])))
}
