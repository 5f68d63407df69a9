//! Progress of a run: a bar on a terminal, lines elsewhere.

use crate::metrics::StepRecord;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use memory::format_bytes;
use std::io::{IsTerminal, Write, stderr};

/// Tells how a run is going, on stderr.
pub struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    every: usize,
    total: usize,
}

impl Progress {
    /// A bar if stderr is a terminal; else a line every `every` steps. Nothing if `quiet`.
    pub fn new(total: usize, every: usize, quiet: bool) -> Progress {
        let terminal = !quiet && stderr().is_terminal();
        let bar = terminal.then(|| {
            let bar =
                ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
            let template = "{bar:12} {pos}/{len}  {msg}  {eta}";
            bar.set_style(
                ProgressStyle::with_template(template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar
        });
        Progress {
            bar,
            quiet,
            every,
            total,
        }
    }

    /// A step is done.
    pub fn step(&self, record: &StepRecord) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(record.step as u64);
                bar.set_message(short_status(record));
            }
            None if self.quiet => {}
            None => {
                let due = record.step == 1
                    || record.step == self.total
                    || record.step.is_multiple_of(self.every);
                if due {
                    let (step, total) = (record.step, self.total);
                    // A reader that left (`2>&1 | head`) is no reason to stop training.
                    let _ = writeln!(stderr(), "step {step:>4}/{total} {}", status(record));
                }
            }
        }
    }

    /// The run is over: the bar goes.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// `loss 2.31  41200 tok/s  peak 18.2 MiB (plan 18.2 MiB)`: with the bar under 80 columns.
fn short_status(record: &StepRecord) -> String {
    format!(
        "loss {:.2}  {:.0} tok/s  {}",
        record.loss,
        record.timing.tokens_per_s,
        peak(record)
    )
}

fn peak(record: &StepRecord) -> String {
    let (peak, plan) = (record.peak_bytes, record.planned_peak_bytes);
    format!("peak {} (plan {})", format_bytes(peak), format_bytes(plan))
}

/// `loss 2.3112  norm 0.71  lr 3.0e-3  41200 tok/s  peak 18.2 MiB (plan 18.2 MiB)`.
fn status(record: &StepRecord) -> String {
    format!(
        "loss {:.4}  norm {:.3}  lr {:.1e}  {:.0} tok/s  {}",
        record.loss,
        record.grad_norm,
        record.lr,
        record.timing.tokens_per_s,
        peak(record),
    )
}
