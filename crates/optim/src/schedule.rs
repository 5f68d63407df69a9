//! Learning-rate schedules.

use choices::choices;
use std::f64::consts::PI;

choices! {
    /// How the learning rate falls after warmup.
    ScheduleKind {
        /// It stays at its peak.
        Constant = "constant",
        /// It falls in a straight line.
        Linear = "linear",
        /// It falls along half a cosine wave.
        Cosine = "cosine",
        /// It stays at its peak, and falls in a straight line over the last steps: warmup, stable, decay (Hu et al.
        /// 2024).
        Wsd = "wsd",
    }
}

/// The learning rate of every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// How it falls.
    pub kind: ScheduleKind,
    /// The highest learning rate.
    pub peak: f64,
    /// Steps over which it rises from 0 in a straight line.
    pub warmup_steps: usize,
    /// Steps over which it falls. Absent: the rest of the run; for WSD the last tenth.
    pub decay_steps: Option<usize>,
    /// The last learning rate, as a fraction of `peak`.
    pub min_ratio: f64,
    /// Steps of the whole run.
    pub total_steps: usize,
}

impl Schedule {
    /// The learning rate of a step, from 1.
    pub fn rate(&self, step: usize) -> f64 {
        if step <= self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        let after_warmup = self.total_steps.saturating_sub(self.warmup_steps);
        let (start, length) = match self.kind {
            ScheduleKind::Constant => return self.peak,
            ScheduleKind::Linear | ScheduleKind::Cosine => {
                (self.warmup_steps, self.decay_steps.unwrap_or(after_warmup))
            }
            ScheduleKind::Wsd => {
                let length = self.decay_steps.unwrap_or(self.total_steps / 10);
                let length = length.min(after_warmup);
                (self.total_steps - length, length)
            }
        };
        let progress = step.saturating_sub(start) as f64 / length.max(1) as f64;
        let progress = progress.min(1.0);
        let kept = match self.kind {
            ScheduleKind::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
            _ => 1.0 - progress,
        };
        self.peak * (self.min_ratio + (1.0 - self.min_ratio) * kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule {
            kind,
            peak: 1.0,
            warmup_steps: 10,
            decay_steps: None,
            min_ratio: 0.1,
            total_steps: 110,
        }
    }

    fn assert_rates(schedule: Schedule, expected: &[(usize, f64)]) {
        for (step, rate) in expected {
            let actual = schedule.rate(*step);
            assert!(
                (actual - rate).abs() < 1e-12,
                "{:?} step {step}: {actual}",
                schedule.kind
            );
        }
    }

    #[test]
    fn every_schedule_warms_up_and_ends_where_it_should() {
        let warmup = [(1, 0.1), (5, 0.5), (10, 1.0)];
        let cases: [(ScheduleKind, &[(usize, f64)]); 4] = [
            (ScheduleKind::Constant, &[(11, 1.0), (110, 1.0)]),
            (ScheduleKind::Linear, &[(60, 0.55), (110, 0.1), (200, 0.1)]),
            (
                ScheduleKind::Cosine,
                &[
                    (35, 0.1 + 0.9 * (0.5 + 0.5 * 0.5f64.sqrt())),
                    (60, 0.55),
                    (110, 0.1),
                ],
            ),
            (
                ScheduleKind::Wsd,
                &[
                    (60, 1.0),
                    (99, 1.0),
                    (104, 1.0 - 0.9 * 5.0 / 11.0),
                    (110, 0.1),
                ],
            ),
        ];
        for (kind, expected) in cases {
            assert_rates(schedule(kind), &warmup);
            assert_rates(schedule(kind), expected);
        }
    }

    #[test]
    fn decay_steps_say_how_long_the_fall_takes() {
        let short = Schedule {
            decay_steps: Some(20),
            ..schedule(ScheduleKind::Linear)
        };
        assert_rates(short, &[(20, 0.55), (30, 0.1), (110, 0.1)]);
        let wsd = Schedule {
            decay_steps: Some(50),
            ..schedule(ScheduleKind::Wsd)
        };
        assert_rates(wsd, &[(60, 1.0), (85, 0.55), (110, 0.1)]);
        let no_warmup = Schedule {
            warmup_steps: 0,
            ..schedule(ScheduleKind::Constant)
        };
        assert_rates(no_warmup, &[(1, 1.0)]);
    }
}
