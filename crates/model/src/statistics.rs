//! Numbers that stages count over a step.

use crate::position::StagePosition;
use kernels::Init;
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};

/// The counts of all stages that have some. They are never zeroed: the first contribution in a step overwrites.
pub(crate) struct Statistics(Vec<Counts>);

struct Counts {
    at: StagePosition,
    stage: &'static str,
    values: Buffer,
    is_stale: bool,
}

impl Statistics {
    /// Room for what these stages count ([`crate::Architecture::statistics`]).
    pub(crate) fn lease(
        memory: &Memory,
        stages: Vec<(StagePosition, &'static str, usize)>,
    ) -> Result<Statistics, OutOfMemory> {
        let category = Category::Activation;
        let counts = stages.into_iter().map(|(at, stage, count)| {
            Ok(Counts {
                at,
                stage,
                values: memory.lease_persistent(category, "statistics", [count], DType::F32)?,
                is_stale: true,
            })
        });
        Ok(Statistics(counts.collect::<Result<_, OutOfMemory>>()?))
    }

    pub(crate) fn begin_step(&mut self) {
        self.0.iter_mut().for_each(|counts| counts.is_stale = true);
    }

    pub(crate) fn accumulate(&mut self, at: StagePosition) -> (Out<'_>, Init<'static>) {
        let counts = self.0.iter_mut().find(|counts| counts.at == at);
        let counts = counts.expect("a stage that counts says how many numbers");
        let init = match std::mem::take(&mut counts.is_stale) {
            true => Init::Overwrite,
            false => Init::Accumulate,
        };
        (counts.values.view_mut(), init)
    }

    pub(crate) fn of(&self, layer: usize, stage: &str) -> Option<In<'_>> {
        let mut all = self.0.iter();
        let counts = all.find(|counts| counts.at.layer == layer && counts.stage == stage);
        let counts = counts.filter(|counts| !counts.is_stale)?;
        Some(counts.values.view())
    }
}
