//! The work between steps with empty inputs: for plans, and for rehearsals of matrix products.

use crate::shapes::{lengths, shape_of_a_micro_batch, shape_of_a_step};
use crate::{Generation, Result, Sampling, Session, SessionError, WhichModel};
use settings::{SampledText, StepObjective};

/// The most live device bytes of the work between steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeaksBetween {
    /// The peak of an evaluation, if there are evaluations.
    pub evaluation: Option<u64>,
    /// The peak of a sample of the model's text, if there are samples.
    pub sample: Option<u64>,
}

impl PeaksBetween {
    /// The largest of these peaks and a step's.
    pub fn most(self, peak_bytes: u64) -> u64 {
        let between = [self.evaluation, self.sample].into_iter().flatten();
        between.fold(peak_bytes, u64::max)
    }
}

impl Session {
    /// Makes a micro-batch of an evaluation and a sample, if the settings have them, in a session that computes
    /// nothing. Peaks are counted from here.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn between_steps_on_shapes(&mut self) -> Result<PeaksBetween> {
        let planned = self.settings.between;
        let lengths = lengths(&self.settings);
        // Shorter steps need no more than the longest, but placement may lose more of the slab.
        for seq in &lengths[1..] {
            self.step(&shape_of_a_step(&self.settings, *seq))?;
        }
        let mut between = PeaksBetween::default();
        if let Some(rows) = planned.evaluation {
            self.memory.begin_step();
            let settings = self.settings.clone();
            let micro = |seq: &usize| Ok(shape_of_a_micro_batch(&settings, rows, *seq));
            let micro = lengths.iter().map(micro);
            let mut forward = self.forward()?;
            between.evaluation = Some(match settings.objective {
                StepObjective::Policy => {
                    forward.token_losses::<SessionError>(WhichModel::Reference, micro.clone())?;
                    forward
                        .token_losses::<SessionError>(WhichModel::Trained, micro)?
                        .1
                }
                _ => forward.evaluate::<SessionError>(micro)?.peak_bytes,
            });
        }
        if let Some(SampledText { sequences, tokens }) = planned.sample {
            self.memory.begin_step();
            for (prompts, wanted) in longest_and_shortest(sequences, tokens) {
                self.forward()?.generate(&prompts, &wanted, |_, _| ())?;
            }
            between.sample = Some(self.memory.step_memory().phase_peaks.eval);
        }
        Ok(between)
    }
}

/// The two cases that need most memory: reading the longest prompt, and making a token after the shortest. Together they cover all
/// prompts: these are read one after the other, so one long prompt needs as much as many.
pub fn longest_and_shortest(sequences: usize, window: usize) -> [(Vec<Vec<u32>>, Generation); 2] {
    [(window, 0), (1, 2)].map(|(longest, max_tokens)| {
        let mut prompts = vec![vec![0]; sequences];
        prompts[0] = vec![0; longest];
        let wanted = Generation {
            max_tokens,
            window,
            ends: Vec::new(),
            sampling: Sampling::GREEDY,
            uses_cache: true,
        };
        (prompts, wanted)
    })
}
