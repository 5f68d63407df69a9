//! What one call updates.

use memory::{Cover, Layout};
use std::ops::Range;

/// A range of the arenas that one call updates: all matrices or all vectors, with moments of one format.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Segment {
    pub(crate) range: Range<usize>,
    pub(crate) decays: bool,
}

/// Matrices and vectors of a cover, cut where quantised moments begin and end.
pub(crate) fn segments(layout: &Layout, quantised: &Range<usize>, cover: &Cover) -> Vec<Segment> {
    let mut segments = Vec::new();
    for (all, decays) in [(layout.matrices(), true), (layout.vectors(), false)] {
        let [start, end] =
            [quantised.start, quantised.end].map(|cut| cut.clamp(all.start, all.end));
        for kind in [all.start..start, start..end, end..all.end] {
            let ranges = cover.within(&kind);
            let segment = |range: &Range<usize>| Segment {
                range: range.clone(),
                decays,
            };
            segments.extend(ranges.ranges().iter().map(segment));
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::{Layer, LayoutBuilder};

    #[test]
    fn calls_do_not_depend_on_the_number_of_tensors() {
        let mut builder = LayoutBuilder::default();
        for layer in 0..40 {
            builder.add(Layer::Block(layer), format!("{layer}.small"), &[8, 8]);
            builder.add(Layer::Block(layer), format!("{layer}.large"), &[100, 100]);
            builder.add(Layer::Block(layer), format!("{layer}.norm"), &[5000]);
            builder.add(Layer::Block(layer), format!("{layer}.bias"), &[8]);
        }
        let layout = builder.build_precise(|_, elements| elements < 4096);
        let all = Cover::new([layout.matrices(), layout.vectors()]);
        let plain = segments(&layout, &(0..0), &all);
        let expected = [(layout.matrices(), true), (layout.vectors(), false)];
        let expected = expected.map(|(range, decays)| Segment { range, decays });
        assert_eq!(plain, expected);
        let quantised = segments(&layout, &layout.quantisable(), &all);
        assert_eq!(quantised.len(), 4);
        let decays: Vec<bool> = quantised.iter().map(|segment| segment.decays).collect();
        assert_eq!(decays, [true, true, false, false]);
        let joined: Vec<usize> = quantised
            .iter()
            .flat_map(|segment| segment.range.clone())
            .collect();
        assert!(joined.into_iter().eq(0..layout.elements()));
    }
}
