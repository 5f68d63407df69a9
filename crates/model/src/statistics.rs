//! What stages count over a step.

use crate::Architecture;
use crate::architecture::Position;
use kernels::Init;
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};

/// The counts of all stages that have some. Nothing is zeroed: the first contribution in a step overwrites.
pub(crate) struct Statistics(Vec<Counts>);

struct Counts {
    at: Position,
    stage: &'static str,
    values: Buffer,
    is_stale: bool,
}

impl Statistics {
    /// Room for what the stages of all blocks count.
    pub(crate) fn lease(
        memory: &Memory,
        architecture: &Architecture,
    ) -> Result<Statistics, OutOfMemory> {
        let mut all = Vec::new();
        for (layer, block) in architecture.blocks().iter().enumerate() {
            for (number, declared) in block.stages().iter().enumerate() {
                let Some(count) = declared.stage.statistics() else {
                    continue;
                };
                let category = Category::Activation;
                all.push(Counts {
                    at: Position::new(layer, number),
                    stage: declared.stage.name(),
                    values: memory.lease_persistent(category, "statistics", [count], DType::F32)?,
                    is_stale: true,
                });
            }
        }
        Ok(Statistics(all))
    }

    pub(crate) fn begin_step(&mut self) {
        self.0.iter_mut().for_each(|counts| counts.is_stale = true);
    }

    pub(crate) fn accumulate(&mut self, at: Position) -> (Out<'_>, Init<'static>) {
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
