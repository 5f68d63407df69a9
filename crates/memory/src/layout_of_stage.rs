//! What the stages of a pipeline hold of a layout: each the matrices of its own parts of the model, and all vectors, which are small.

use crate::stages::Stages;
use crate::{Cover, GRAIN_ELEMENTS, Layer, Layout, Rank};
use std::ops::Range;

impl Layout {
    /// The same layout for a rank of one stage. Places, numbers of elements and grains stay those of the whole model, so random numbers
    /// and the norm do not depend on the number of stages. `stage_of` gives the stage of a part.
    ///
    /// # Panics
    /// If it is the layout of a stage already.
    pub fn of_stage(mut self, own: Rank, stage_of: impl Fn(Layer) -> usize) -> Layout {
        assert!(self.stages.is_none(), "stages are not divided again");
        let others = self.units.iter_mut();
        let others = others.filter(|unit| stage_of(unit.part) != own.number);
        let elsewhere =
            others.flat_map(|unit| [&mut unit.trained, &mut unit.frozen].map(std::mem::take));
        self.stages = Some(Stages {
            own,
            elsewhere: Cover::joined(elsewhere),
            of_entry: self.parts.iter().map(|part| stage_of(*part)).collect(),
        });
        self
    }

    /// The stage that an entry belongs to; 0 without a pipeline.
    pub fn stage_of(&self, entry: usize) -> usize {
        let stages = self.stages.as_ref();
        stages.map_or(0, |stages| stages.of_entry[entry])
    }

    /// This rank's stage; [`Rank::ALONE`] without a pipeline.
    pub fn stage(&self) -> Rank {
        let stages = self.stages.as_ref();
        stages.map_or(Rank::ALONE, |stages| stages.own)
    }

    /// The trained vectors of a stage's parts, padding included.
    pub fn vectors_of_stage(&self, stage: usize) -> Cover {
        let entries = self.entries().iter().enumerate();
        let own = entries.filter(|(index, entry)| {
            entry.role.is_trained() && !entry.is_matrix() && self.stage_of(*index) == stage
        });
        Cover::new(own.map(|(_, entry)| entry.padded_range()))
    }

    /// The grains of the trained matrices of a stage's parts.
    pub fn grains_of_stage(&self, stage: usize) -> Vec<Range<usize>> {
        let stage_of = |range: &Range<usize>| {
            let unit = self.locate(&(range.start..range.start + 1))?;
            Some(self.stage_of(self.units[unit].entries[0]))
        };
        let own = self.grained().iter();
        let own = own.filter(|(range, _)| !range.is_empty() && stage_of(range) == Some(stage));
        let grains = |(range, first): &(Range<usize>, usize)| {
            *first..*first + range.len().div_ceil(GRAIN_ELEMENTS)
        };
        own.map(grains).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayoutBuilder;

    #[test]
    fn stages_hold_each_matrix_once_and_every_vector() {
        let layout = || {
            let mut builder = LayoutBuilder::default();
            for part in 0..4 {
                builder.add(Layer::Block(part), format!("w{part}"), &[64, 100]);
                builder.add(Layer::Block(part), format!("norm{part}"), &[300]);
            }
            builder.for_ranks(Some(2)).build()
        };
        let whole = layout();
        let stages = Rank::all(2).map(|stage| {
            layout().of_stage(stage, |part| match part {
                Layer::Block(0) => 0,
                _ => 1,
            })
        });
        let stages: Vec<Layout> = stages.collect();
        let matrices = |layout: &Layout| layout.trained().within(&layout.matrices());
        let both = Cover::joined(stages.iter().map(matrices));
        assert_eq!(both, matrices(&whole));
        let saved = stages
            .iter()
            .flat_map(|stage| Rank::all(2).map(|rank| stage.own(rank)));
        assert_eq!(
            Cover::joined(saved),
            whole.all(),
            "all save everything once"
        );
        let mut grains = Vec::new();
        for (number, stage) in stages.iter().enumerate() {
            assert_eq!(stage.grained(), whole.grained());
            assert_eq!(
                stage.trained().within(&stage.vectors()),
                whole.trained().within(&whole.vectors())
            );
            grains.extend(stage.grains_of_stage(number));
        }
        let vectors = [0, 1].map(|stage| whole_vectors(&stages[0], stage));
        assert_eq!(vectors, [512, 3 * 512]);
        let of_units = whole.grained().len() - 1;
        assert_eq!(grains.len(), of_units, "the vectors' grains are no stage's");
    }

    fn whole_vectors(layout: &Layout, stage: usize) -> usize {
        layout.vectors_of_stage(stage).elements()
    }
}
