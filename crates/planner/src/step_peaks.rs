//! Peaks of steps and evaluations that are smaller than planned. Micro-batches of padded documents are only as long as
//! their longest row, and the last micro-batch of an evaluation may have fewer rows.

use crate::Plan;
use data::padded_lengths;
use kernels::Target;
use kernels::meta::FlopCounter;
use memory::Memory;
use session::{Result, Session, SessionError, shape_of_a_micro_batch, shape_of_micro_batches};
use settings::Settings;
use std::collections::{BTreeSet, HashMap};

/// Computes the peak of a step or an evaluation of any shape, on shapes. Results are cached.
///
/// Nothing that is live between two micro-batches depends on their lengths. So the peak of a step is the largest peak
/// of its micro-batches, each of which depends on its place in the step but not on the others' lengths.
pub struct StepPeaks {
    settings: Settings,
    target: Target,
    /// The peak of a step with micro-batches of full length.
    longest: u64,
    /// Peaks of steps in which the micro-batch at this place has this length, and the others are as short as possible.
    steps: HashMap<(Place, usize), u64>,
    /// Peaks of an evaluation's micro-batches, by rows and length.
    evaluations: HashMap<(usize, usize), u64>,
}

/// The place of a micro-batch in its step: the first overwrites gradients, the last completes their sums.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Only,
    First,
    Middle,
    Last,
}

impl Place {
    fn of(index: usize, count: usize) -> Place {
        match (index == 0, index + 1 == count) {
            (true, true) => Place::Only,
            (true, false) => Place::First,
            (false, true) => Place::Last,
            (false, false) => Place::Middle,
        }
    }
}

impl StepPeaks {
    /// For the run that `plan` was made for.
    pub fn new(settings: &Settings, target: Target, plan: &Plan) -> StepPeaks {
        StepPeaks {
            settings: settings.clone(),
            target,
            longest: plan.peak_bytes,
            steps: HashMap::new(),
            evaluations: HashMap::new(),
        }
    }

    /// The peak of a step whose micro-batches of this rank have these lengths.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub fn of_step(&mut self, lengths: &[usize]) -> Result<u64> {
        let is_planned = lengths.len() == self.settings.accum
            && lengths
                .iter()
                .all(|length| *length == self.settings.own_seq());
        if is_planned {
            return Ok(self.longest);
        }
        let mut most = 0;
        for (index, length) in lengths.iter().enumerate() {
            let place = Place::of(index, lengths.len());
            let known = self.steps.get(&(place, *length)).copied();
            let peak = match known {
                Some(peak) => peak,
                None => self.step_with(place, *length, lengths.len())?,
            };
            self.steps.insert((place, *length), peak);
            most = most.max(peak);
        }
        Ok(most)
    }

    fn step_with(&self, place: Place, length: usize, count: usize) -> Result<u64> {
        // All micro-batches in the middle have the same peak.
        let count = count.min(3);
        let shortest = padded_lengths(self.settings.seq).next();
        let mut lengths = vec![shortest.unwrap_or(length).min(length); count];
        let index = match place {
            Place::Only | Place::First => 0,
            Place::Middle => 1,
            Place::Last => count - 1,
        };
        lengths[index] = length;
        let batch = shape_of_micro_batches(&self.settings, &lengths);
        let mut session = self.session()?;
        Ok(session.step(&batch)?.memory.peak.bytes)
    }

    /// The peak of an evaluation whose micro-batches have these rows and lengths.
    ///
    /// # Errors
    /// As [`StepPeaks::of_step`].
    pub fn of_evaluation(&mut self, shapes: &BTreeSet<(usize, usize)>) -> Result<u64> {
        let mut most = 0;
        for (rows, seq) in shapes {
            let known = self.evaluations.get(&(*rows, *seq)).copied();
            let peak = match known {
                Some(peak) => peak,
                None => self.evaluation_of(*rows, *seq)?,
            };
            self.evaluations.insert((*rows, *seq), peak);
            most = most.max(peak);
        }
        Ok(most)
    }

    fn evaluation_of(&self, rows: usize, seq: usize) -> Result<u64> {
        let micro = shape_of_a_micro_batch(&self.settings, rows, seq);
        let mut session = self.session()?;
        session.memory().begin_step();
        let evaluation = session.forward()?.evaluate::<SessionError>([Ok(micro)])?;
        Ok(evaluation.peak_bytes)
    }

    fn session(&self) -> Result<Session> {
        let (settings, flops) = (self.settings.clone(), FlopCounter::default());
        Session::on_shapes(settings, &Memory::shapes(), self.target, flops)
    }
}
