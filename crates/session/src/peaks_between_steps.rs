//! The work between steps with empty inputs: for plans, and for rehearsals of matrix products.

use crate::shapes::{lengths, shape_of_a_micro_batch, shape_of_a_step};
use crate::{Generation, Result, Sampling, Session, SessionError};

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
            let micro = |seq: usize| Ok(shape_of_a_micro_batch(&settings, rows, seq));
            let evaluation = self
                .forward()?
                .evaluate::<SessionError>(lengths.into_iter().map(micro))?;
            between.evaluation = Some(evaluation.peak_bytes);
        }
        if let Some(window) = planned.sample {
            self.memory.begin_step();
            for (prompt, wanted) in longest_and_shortest(window) {
                self.forward()?
                    .generate(&[vec![0; prompt]], &wanted, |_, _| ())?;
            }
            between.sample = Some(self.memory.step_memory().phase_peaks.eval);
        }
        Ok(between)
    }
}

/// The two cases that need most memory: reading the longest prompt, and making a token after the shortest. Together
/// they cover every prompt.
pub fn longest_and_shortest(window: usize) -> [(usize, Generation); 2] {
    let wanted = |max_tokens| Generation {
        max_tokens,
        window,
        ends: Vec::new(),
        sampling: Sampling::GREEDY,
        uses_cache: true,
    };
    [(window, wanted(0)), (1, wanted(2))]
}
