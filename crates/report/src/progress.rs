//! Shows a run's progress: lines, and on a terminal a bar below them.

use crate::metrics::{EvalRecord, SampleRecord, StepRecord};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use memory::format_bytes;
use std::cell::Cell;
use std::fmt;
use std::io::{IsTerminal, Write, stderr};
use std::time::Duration;

/// Reports on stderr how a run proceeds.
pub struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    every: usize,
    total: usize,
    /// Steps made before this run.
    done: usize,
    /// Micro-batches in a step.
    accum: usize,
    pace: Cell<Pace>,
}

impl Progress {
    /// Writes a line every `every` steps, and shows a bar if stderr is a terminal. Shows nothing if `quiet`.
    pub fn new(total: usize, every: usize, quiet: bool) -> Progress {
        let terminal = !quiet && stderr().is_terminal();
        let bar = terminal.then(|| {
            let bar =
                ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
            let template = "{bar:12} {pos}/{len}{prefix}  {msg}";
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
            done: 0,
            accum: 1,
            pace: Cell::default(),
        }
    }

    /// The same for a run that is resumed after `done` steps.
    pub fn after(self, done: usize) -> Progress {
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
        }
        Progress { done, ..self }
    }

    /// The same for steps of `accum` micro-batches.
    pub fn accumulating(self, accum: usize) -> Progress {
        if let Some(bar) = &self.bar {
            bar.set_prefix(accumulation(accum));
        }
        Progress { accum, ..self }
    }

    /// Reports that `done` of a step's `of` micro-batches are done, on a terminal, if steps take over a second.
    pub fn micro_batch(&self, done: usize, of: usize) {
        if let (Some(bar), true) = (&self.bar, of > 1 && self.pace.get().is_slow()) {
            bar.set_prefix(format!(" ({done} of {of})"));
        }
    }

    /// Reports that a step is done.
    pub fn step(&self, record: &StepRecord) {
        self.pace.set(self.pace.get().after(record.timing.step_ms));
        let eta = self.pace.get().eta(self.total.saturating_sub(record.step));
        if let Some(bar) = &self.bar {
            bar.set_position(record.step as u64);
            bar.set_prefix(accumulation(self.accum));
            // A narrow terminal cuts off the end.
            let epoch = record.epoch;
            bar.set_message(format!("{}{eta}  epoch {epoch:.2}", short_status(record)));
        }
        let is_due = record.step == self.done + 1
            || record.step == self.total
            || record.step.is_multiple_of(self.every);
        if is_due {
            let (step, total, accum) = (record.step, self.total, accumulation(self.accum));
            self.tell(&format!(
                "step {step:>4}/{total}{accum} {}{eta}",
                status(record)
            ));
        }
    }

    /// Reports an evaluation.
    pub fn evaluation(&self, record: &EvalRecord) {
        let bits = record.bits_per_byte;
        let bits = bits.map_or(String::new(), |bits| format!("  {bits:.3} bits/byte"));
        let best = if record.is_best { "  (best)" } else { "" };
        self.tell(&format!(
            "eval {:>4}  loss {:.4}  perplexity {:.2}{bits}{best}",
            record.step, record.loss, record.perplexity
        ));
    }

    /// Reports a sample of the model's text.
    pub fn sample(&self, record: &SampleRecord) {
        let text = format!("{}{}", record.prompt, record.text);
        // Characters that control a terminal are replaced.
        let text: String = text
            .chars()
            .map(|character| match character.is_control() {
                true => ' ',
                false => character,
            })
            .collect();
        self.tell(&format!("text {:>4}  {text}", record.step));
    }

    /// Writes a line.
    fn tell(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None if self.quiet => {}
            // Training continues if the reader of stderr has left (`2>&1 | head`).
            None => {
                let _ = writeln!(stderr(), "{line}");
            }
        }
    }

    /// Removes the bar at the end of the run.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Shows on a terminal what takes time before the first step, and for how long, until it is dropped.
pub struct Busy(ProgressBar);

impl Busy {
    /// Shows that `what` is being done, such as `loading the model`. `what` is called again each time. Shows nothing if
    /// `quiet`, or if stderr is not a terminal.
    pub fn with(what: impl Fn() -> String + Clone + Send + Sync + 'static, quiet: bool) -> Busy {
        if quiet || !stderr().is_terminal() {
            return Busy(ProgressBar::hidden());
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{spinner} {what} ({elapsed})");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner());
        let shown = move |_: &ProgressState, to: &mut dyn fmt::Write| {
            let _ = to.write_str(&what());
        };
        bar.set_style(style.with_key("what", shown));
        bar.tick();
        bar.enable_steady_tick(Duration::from_millis(200));
        Busy(bar)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// The time of a step: a mean in which the last steps count most.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    steps: usize,
    step_ms: f64,
}

/// Earlier steps than this hardly count, because steps get slower when the machine is busy.
const STEPS_THAT_COUNT: usize = 20;

impl Pace {
    fn after(self, step_ms: f64) -> Pace {
        let steps = self.steps + 1;
        let weight = 1.0 / steps.min(STEPS_THAT_COUNT) as f64;
        Pace {
            steps,
            step_ms: self.step_ms + (step_ms - self.step_ms) * weight,
        }
    }

    /// Whether steps take longer than a second. Assumed before the first step, which takes longest.
    fn is_slow(self) -> bool {
        self.steps == 0 || self.step_ms > 1000.0
    }

    /// Such as `  eta 1m 20s`; empty if no step is left.
    fn eta(self, steps_left: usize) -> String {
        match steps_left {
            0 => String::new(),
            left => format!("  eta {}", duration(self.step_ms * left as f64 / 1e3)),
        }
    }
}

/// Such as ` (accum 4)`; empty if a step has only one micro-batch.
fn accumulation(accum: usize) -> String {
    match accum {
        0 | 1 => String::new(),
        accum => format!(" (accum {accum})"),
    }
}

/// Seconds in the two largest units: `45s`, `1m 20s`, `2h 05m`, `3d 04h`.
fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m {:02}s", seconds % 60),
        3600..86400 => format!("{hours}h {:02}m", minutes % 60),
        _ => format!("{days}d {:02}h", hours % 24),
    }
}

/// `loss 2.31  41200 tok/s  peak 18.2 MiB (plan 18.2 MiB)`: less than 80 columns with the bar.
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

/// `loss 2.3112  norm 0.71  lr 3.0e-3  epoch 0.53  41200 tok/s  peak 18.2 MiB (plan 18.2 MiB)`.
fn status(record: &StepRecord) -> String {
    format!(
        "loss {:.4}  norm {:.3}  lr {:.1e}  epoch {:.2}  {:.0} tok/s  {}",
        record.loss,
        record.grad_norm,
        record.lr,
        record.epoch,
        record.timing.tokens_per_s,
        peak(record),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_units() {
        let cases = [
            (0.2, "0s"),
            (59.4, "59s"),
            (59.6, "1m 00s"),
            (80.0, "1m 20s"),
            (7500.0, "2h 05m"),
            (273_600.0, "3d 04h"),
        ];
        for (seconds, text) in cases {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn the_time_left_follows_the_last_steps() {
        let paced = |times: &[f64]| {
            let steps = times.iter();
            steps.fold(Pace::default(), |pace, ms| pace.after(*ms))
        };
        assert_eq!(paced(&[3000.0, 1000.0]).eta(40), "  eta 1m 20s");
        assert_eq!(paced(&[3000.0, 1000.0]).eta(0), "");
        let [fast, slow] = [[500.0; 100], [2000.0; 100]];
        let eta = |pace: Pace| pace.step_ms;
        assert!((eta(paced(&[fast, slow].concat())) - 2000.0).abs() < 20.0);
        assert!(paced(&[]).is_slow() && paced(&slow).is_slow() && !paced(&fast).is_slow());
    }

    #[test]
    fn accumulation_shows_where_there_is_any() {
        assert_eq!(
            (accumulation(1), accumulation(4)),
            (String::new(), " (accum 4)".into())
        );
    }
}
