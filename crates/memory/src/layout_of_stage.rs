//! What the stages of a pipeline hold of a layout: each the matrices of its own parts of the model, and all vectors, which are small.

use crate::stages::Stages;
use crate::{Cover, GRAIN_ELEMENTS, Layer, Layout, Rank};
use std::ops::Range;

impl Layout {
    /// The same layout for a rank of one stage. Places, numbers of elements and grains stay those of the whole model, so random numbers
    /// and the norm do not depend on the number of stages. `virtual_stage_of` gives the virtual stage of a part: `k` is of the stage
    /// `k % own.of`.
    ///
    /// # Panics
    /// If it is the layout of a stage already.
    pub fn of_stage(mut self, own: Rank, virtual_stage_of: impl Fn(Layer) -> usize) -> Layout {
        assert!(self.stages.is_none(), "stages are not divided again");
        let is_elsewhere = |part| virtual_stage_of(part) % own.of != own.number;
        let others = self.units.iter_mut();
        let others = others.filter(|unit| is_elsewhere(unit.part));
        let elsewhere =
            others.flat_map(|unit| [&mut unit.trained, &mut unit.frozen].map(std::mem::take));
        let parts = self.parts.iter();
        self.stages = Some(Stages {
            own,
            elsewhere: Cover::joined(elsewhere),
            of_entry: parts.map(|part| virtual_stage_of(*part)).collect(),
        });
        self
    }

    /// The virtual stage that an entry belongs to; 0 without a pipeline.
    pub fn virtual_stage_of(&self, entry: usize) -> usize {
        let stages = self.stages.as_ref();
        stages.map_or(0, |stages| stages.of_entry[entry])
    }

    /// The stage that an entry belongs to; 0 without a pipeline.
    pub fn stage_of(&self, entry: usize) -> usize {
        self.virtual_stage_of(entry) % self.stage().of
    }

    /// This rank's stage; [`Rank::ALONE`] without a pipeline.
    pub fn stage(&self) -> Rank {
        let stages = self.stages.as_ref();
        stages.map_or(Rank::ALONE, |stages| stages.own)
    }

    /// The trained vectors of a stage's parts, padding included.
    pub fn vectors_of_stage(&self, stage: usize) -> Cover {
        self.trained_vectors(|entry| self.stage_of(entry) == stage)
    }

    /// The trained vectors of each virtual stage of this rank's stage, padding included. The first has the tails besides. Without a
    /// pipeline there is one, with all vectors.
    pub fn vectors_of_virtual_stages(&self) -> Vec<Cover> {
        let Rank { number, of } = self.stage();
        let entries = 0..self.entries().len();
        let last = entries.map(|entry| self.virtual_stage_of(entry)).max();
        let all = self.trained().within(&self.vectors());
        let vectors = |virtual_stage| match virtual_stage == number {
            true => all.without(
                &self.trained_vectors(|entry| self.virtual_stage_of(entry) != virtual_stage),
            ),
            false => self.trained_vectors(|entry| self.virtual_stage_of(entry) == virtual_stage),
        };
        (number..=last.unwrap_or(0).max(number))
            .step_by(of)
            .map(vectors)
            .collect()
    }

    fn trained_vectors(&self, is_among: impl Fn(usize) -> bool) -> Cover {
        let entries = self.entries().iter().enumerate();
        let own = entries.filter(|(index, entry)| {
            entry.role.is_trained() && !entry.is_matrix() && is_among(*index)
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
        let added = stages.iter().flat_map(Layout::vectors_of_virtual_stages);
        let added: Vec<usize> = added.map(|vectors| vectors.elements()).collect();
        let all = whole.trained().within(&whole.vectors()).elements();
        assert_eq!(added, [all - 3 * 512, all - 512], "each with the tails");
        let of_units = whole.grained().len() - 1;
        assert_eq!(grains.len(), of_units, "the vectors' grains are no stage's");
    }

    #[test]
    fn virtual_stages_of_a_stage_have_vectors_of_their_own() {
        let mut builder = LayoutBuilder::default();
        for part in 0..4 {
            builder.add(Layer::Block(part), format!("w{part}"), &[64, 100]);
            builder.add(Layer::Block(part), format!("norm{part}"), &[300]);
        }
        let second = Rank { number: 1, of: 2 };
        let layout = builder.for_ranks(Some(2)).build();
        let layout = layout.of_stage(second, |part| match part {
            Layer::Block(number) => number,
            _ => 0,
        });
        let norm = |name| layout.entries()[layout.find(name).unwrap()].padded_range();
        let vectors = layout.vectors_of_virtual_stages();
        let has = |cover: &Cover, name| cover.within(&norm(name)).elements() == 512;
        let has: Vec<_> = vectors
            .iter()
            .map(|cover| ["norm0", "norm1", "norm2", "norm3"].map(|name| has(cover, name)))
            .collect();
        assert_eq!(
            has,
            [[false, true, false, false], [false, false, false, true]]
        );
        assert_eq!(
            [0, 1, 2, 3].map(|entry| layout.stage_of(entry)),
            [0, 1, 0, 1]
        );
    }

    fn whole_vectors(layout: &Layout, stage: usize) -> usize {
        layout.vectors_of_stage(stage).elements()
    }
}
