//! Numbers that stages count over a step.

use crate::position::StagePosition;
use kernels::Init;
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};
use std::ops::Range;

/// The counts of all stages that have some, one after the other. They are never zeroed: the first contribution in a step
/// overwrites.
pub(crate) struct Statistics {
    /// `[n]` f32; none if no stage counts.
    values: Option<Buffer>,
    stages: Vec<Counts>,
}

struct Counts {
    at: StagePosition,
    stage: &'static str,
    place: Range<usize>,
    is_stale: bool,
}

impl Statistics {
    /// Room for what these stages count ([`crate::Architecture::statistics`]).
    pub(crate) fn lease(
        memory: &Memory,
        stages: Vec<(StagePosition, &'static str, usize)>,
    ) -> Result<Statistics, OutOfMemory> {
        let mut total = 0;
        let counts = stages.into_iter().map(|(at, stage, count)| {
            total += count;
            Counts {
                at,
                stage,
                place: total - count..total,
                is_stale: true,
            }
        });
        let stages = counts.collect();
        let lease =
            || memory.lease_persistent(Category::Activation, "statistics", [total], DType::F32);
        Ok(Statistics {
            values: (total > 0).then(lease).transpose()?,
            stages,
        })
    }

    pub(crate) fn begin_step(&mut self) {
        let stages = self.stages.iter_mut();
        stages.for_each(|counts| counts.is_stale = true);
    }

    pub(crate) fn accumulate(&mut self, at: StagePosition) -> (Out<'_>, Init<'static>) {
        let counts = self.stages.iter_mut().find(|counts| counts.at == at);
        let counts = counts.expect("a stage that counts says how many numbers");
        let init = match std::mem::take(&mut counts.is_stale) {
            true => Init::Overwrite,
            false => Init::Accumulate,
        };
        let values = self.values.as_mut().expect("a stage counts");
        (values.view_mut().rows(counts.place.clone()), init)
    }

    /// All counts of the step, `[n]` f32 in the order of the stages; none if no stage counts.
    pub(crate) fn all(&self) -> Option<In<'_>> {
        self.values.as_ref().map(Buffer::view)
    }

    pub(crate) fn of(&self, layer: usize, stage: &str) -> Option<In<'_>> {
        let mut all = self.stages.iter();
        let counts = all.find(|counts| counts.at.layer == layer && counts.stage == stage);
        let counts = counts.filter(|counts| !counts.is_stale)?;
        Some(self.all()?.rows(counts.place.clone()))
    }
}
