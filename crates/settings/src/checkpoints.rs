//! Which steps a run saves, and how many of its checkpoints exist at a time.

use super::keys::CheckpointConfig;

impl CheckpointConfig {
    /// The value of `every` with which no step is saved.
    pub const NEVER: usize = 0;

    /// Steps between two checkpoints; `None` if at most the last step is saved.
    pub fn interval(&self) -> Option<usize> {
        self.every.filter(|every| *every != Self::NEVER)
    }

    /// Whether a run saves its last step.
    pub fn saves(&self) -> bool {
        self.every != Some(Self::NEVER)
    }

    /// Whether step `step` of `steps` is saved.
    pub fn is_due(&self, step: usize, steps: usize) -> bool {
        let is_last = self.saves() && step == steps;
        is_last
            || self
                .interval()
                .is_some_and(|every| step.is_multiple_of(every))
    }

    /// How many checkpoints the disk needs room for, beyond those already there, while a run continues from step `made`
    /// to `steps` in a folder with `there` of them. Old ones are removed once a new one is whole.
    pub fn most_at_a_time(&self, (made, steps): (usize, usize), there: usize) -> usize {
        let between = self
            .interval()
            .map_or(0, |every| steps / every - made / every);
        let is_apart = made < steps
            && !self
                .interval()
                .is_some_and(|every| steps.is_multiple_of(every));
        let written = between + usize::from(self.saves() && is_apart);
        let kept = self
            .keep_last
            .map(|last| last + usize::from(self.keep_best));
        // One is written while the kept ones still exist.
        let room = kept.map_or(written, |kept| (kept + 1).saturating_sub(there).max(1));
        written.min(room)
    }
}

#[cfg(test)]
mod tests {
    use super::CheckpointConfig;
    use crate::Config;

    /// Saves every `every` steps, or only the last (`None`), and keeps the last `keep_last`.
    fn saving(every: Option<usize>, keep_last: Option<usize>) -> CheckpointConfig {
        CheckpointConfig {
            every,
            keep_last,
            ..Config::default().checkpoint
        }
    }

    #[test]
    fn which_steps_are_saved() {
        let saved = |every| -> Vec<usize> {
            let config = saving(every, None);
            (1..=10).filter(|step| config.is_due(*step, 10)).collect()
        };
        assert_eq!(saved(None), [10]);
        assert_eq!(saved(Some(4)), [4, 8, 10]);
        assert_eq!(saved(Some(5)), [5, 10]);
        assert_eq!(saved(Some(0)), [0; 0]);
        let mut config = Config::default();
        config.without_between_steps();
        assert!(!config.checkpoint.saves());
    }

    #[test]
    fn checkpoints_that_need_room_at_a_time() {
        for (every, keep_last, (made, steps), there, most) in [
            (None, None, (0, 10), 0, 1),
            (None, None, (10, 10), 1, 0),
            (Some(0), None, (0, 10), 0, 0),
            (Some(4), None, (0, 10), 0, 3),
            (Some(5), None, (0, 10), 0, 2),
            (Some(4), None, (4, 10), 1, 2),
            (Some(1), Some(2), (0, 10), 0, 3),
            (Some(1), Some(2), (5, 10), 2, 1),
            (Some(1), Some(2), (5, 10), 7, 1),
            (Some(9), Some(2), (0, 10), 0, 2),
        ] {
            let config = saving(every, keep_last);
            let said = config.most_at_a_time((made, steps), there);
            assert_eq!(said, most, "{every:?} {keep_last:?} {made} {steps} {there}");
        }
        let best = CheckpointConfig {
            keep_best: true,
            ..saving(Some(1), Some(2))
        };
        assert_eq!(best.most_at_a_time((0, 10), 0), 4);
    }
}
