//! Writes token files with progress, and reports what is in them.

use super::PrepareArgs;
use crate::failure::{Failure, Result};
use crate::interrupt::Interrupt;
use crate::stdout::print;
use crate::threads::threads_of;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use planner::HostRoom;
use prepare::{Options, PrepareError, Progress, Summary, Teaching, Turns};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Writes the token files, and reports what is in them.
pub(crate) fn prepare(args: &PrepareArgs) -> Result {
    let options = Options {
        inputs: args.inputs.clone(),
        out: args.out.clone(),
        tokenizer: args.tokenizer.clone(),
        validation: args.validation,
        shard_tokens: args.shard_tokens,
        threads: threads_of(args.threads.map(usize::from)),
        teaching: Teaching {
            turns: args.turns.as_deref().map(turns),
            allow_empty: args.allow_empty_answers,
        },
        memory_bytes: HostRoom::ask().left_bytes(),
    };
    let interrupt = Interrupt::new()
        .map_err(|error| Failure::Usage(format!("signals cannot be watched: {error}")))?;
    let stopped = interrupt.watch();
    // Drawn only on a terminal.
    let bar = if args.quiet {
        ProgressBar::hidden()
    } else {
        bar()
    };
    let began = Instant::now();
    let summary = prepare::prepare(&options, |Progress { bytes, total }| {
        bar.set_length(total.max(bytes));
        bar.set_position(bytes);
        if stopped() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    bar.finish_and_clear();
    match (summary, interrupt.signal()) {
        (Err(PrepareError::Interrupted), Some(signal)) => {
            Err(Failure::PrepareInterrupted { signal })
        }
        (summary, _) => {
            let summary = summary?;
            if summary.tokenizer.end_of_text.is_none() {
                tracing::warn!(
                    "the tokenizer has no end-of-text token, so texts run together; name one as `eos_token` in its \
                     tokenizer_config.json"
                );
            }
            for warning in summary.warnings.lines() {
                tracing::warn!("{warning}");
            }
            print(describe(&summary, &options, began.elapsed()))
        }
    }
}

fn turns(name: &str) -> Turns {
    match name {
        "each" => Turns::Each,
        "last" => Turns::Last,
        _ => Turns::All,
    }
}

fn bar() -> ProgressBar {
    let style =
        ProgressStyle::with_template("{bar:12} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left");
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn describe(summary: &Summary, options: &Options, took: Duration) -> String {
    let Summary {
        train, validation, ..
    } = summary;
    let tokens = train.tokens + validation.tokens;
    let bytes = (train.text_bytes + validation.text_bytes) as f64;
    let seconds = took.as_secs_f64();
    let mut lines = vec![format!(
        "{} {}, {tokens} tokens, {:.2} bytes a token, in {seconds:.1} s ({:.1} MB/s)",
        summary.documents,
        if summary.preferences {
            "pairs"
        } else {
            "documents"
        },
        bytes / tokens as f64,
        bytes / 1e6 / seconds,
    )];
    for (name, split) in [("train", train), ("validation", validation)] {
        if !split.shards.is_empty() {
            let (tokens, shards) = (split.tokens, split.shards.len());
            let masked = match split.masked_tokens {
                0 => String::new(),
                masked => format!(" ({masked} not to be learnt)"),
            };
            lines.push(format!(
                "{name}: {tokens} tokens{masked} in {shards} shards"
            ));
        }
    }
    lines.push(format!("wrote {}\n", options.out.display()));
    lines.join("\n")
}
