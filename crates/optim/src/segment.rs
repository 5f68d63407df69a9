//! What one call updates.

use crate::form::Form;
use crate::rule::{Group, WholeTensor};
use memory::{Cover, GRAIN_ELEMENTS, Layout};
use std::ops::Range;

/// A range of the arenas that is updated at once: all matrices or all vectors of a group, with moments of one format, or a
/// single tensor that is updated as a whole.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Segment {
    pub(crate) range: Range<usize>,
    /// The number of its first element, which random numbers go by.
    pub(crate) number: usize,
    pub(crate) decays: bool,
    /// The group that it is of.
    pub(crate) group: usize,
    /// The tensor that it is, or is of, where that is updated as a whole.
    pub(crate) whole: Option<WholeTensor>,
    /// The grains of the norm that its gradients are in, where it is such a tensor.
    pub(crate) grains: Range<usize>,
}

impl Segment {
    /// The elements that are updated: without the padding of such a tensor.
    pub(crate) fn own(&self) -> Range<usize> {
        let elements = self.whole.as_ref().map(WholeTensor::elements);
        let end = elements.map(|elements| self.range.end.min(self.range.start + elements));
        self.range.start..end.unwrap_or(self.range.end)
    }

    /// A range of it.
    pub(crate) fn part(&self, range: &Range<usize>, layout: &Layout) -> Segment {
        Segment {
            range: range.clone(),
            number: layout.untailed(range.start),
            ..self.clone()
        }
    }
}

/// What a cover has of each group.
pub(crate) fn segments(layout: &Layout, form: &Form, cover: &Cover) -> Vec<Segment> {
    let groups = form.groups().iter().enumerate();
    let of_group = groups.flat_map(|(group, one)| {
        let own = cover.within_all(&one.cover);
        match one.tensors.is_empty() {
            true => segments_of(layout, form, &own, group),
            false => tensors_of(layout, one, &own, group),
        }
    });
    of_group.collect()
}

/// The tensors of a group that a cover has.
pub(crate) fn tensors_of(
    layout: &Layout,
    one: &Group,
    cover: &Cover,
    group: usize,
) -> Vec<Segment> {
    let grained = layout.grained();
    let tensors = one.tensors.iter().map(|tensor| {
        let entry = &layout.entries()[tensor.entry];
        let range = entry.padded_range();
        Segment {
            number: layout.untailed(range.start),
            grains: grains_of(&grained, &range),
            range,
            decays: entry.is_matrix(),
            group,
            whole: Some(tensor.clone()),
        }
    });
    let is_here = |segment: &Segment| cover.rows(&segment.range).is_some();
    tensors.filter(is_here).collect()
}

/// The grains that a range has something of, among those that ranges are counted in ([`Layout::grained`]).
fn grains_of(grained: &[(Range<usize>, usize)], range: &Range<usize>) -> Range<usize> {
    let holds =
        |(all, _): &&(Range<usize>, usize)| all.start <= range.start && range.end <= all.end;
    let (all, first) = grained
        .iter()
        .find(holds)
        .expect("what is trained is in grains");
    let grain = |element: usize| first + (element - all.start) / GRAIN_ELEMENTS;
    grain(range.start)..grain(range.end - 1) + 1
}

/// Matrices and vectors of a cover, cut where their type changes, where quantised moments begin and end, and where elements that
/// are not numbered do.
fn segments_of(layout: &Layout, form: &Form, cover: &Cover, group: usize) -> Vec<Segment> {
    let (mut segments, quantised) = (Vec::new(), form.quantised());
    for (all, decays) in [(layout.matrices(), true), (layout.vectors(), false)] {
        let [start, end] =
            [quantised.start, quantised.end].map(|cut| cut.clamp(all.start, all.end));
        for kind in [all.start..start, start..end, end..all.end] {
            let runs = form.types().runs(&cover.within(&kind)).into_iter();
            let ranges = runs.flat_map(|(run, _)| numbered(layout, &run));
            segments.extend(ranges.map(|range| Segment {
                number: layout.untailed(range.start),
                range,
                decays,
                group,
                whole: None,
                grains: 0..0,
            }));
        }
    }
    segments
}

/// The pieces of a range within which elements are numbered one after the other.
fn numbered(layout: &Layout, range: &Range<usize>) -> Vec<Range<usize>> {
    let tails = layout.tails().iter().map(|tail| tail.end);
    let cuts = tails.filter(|cut| range.start < *cut && *cut < range.end);
    let mut start = range.start;
    let pieces = cuts.chain([range.end]).map(|end| {
        let piece = start..end;
        start = end;
        piece
    });
    pieces.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hyperparameters, MasterFormat, MomentFormat};
    use memory::{DType, Layer, LayoutBuilder, Rank, Role};

    fn form(layout: &Layout, moments: MomentFormat) -> Form {
        let groups = Hyperparameters::default().groups(layout, &[]);
        let formats = (moments, MasterFormat::F32);
        Form::new(layout, formats, DType::BF16, groups)
    }

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
        let all = layout.all();
        let plain = segments_of(&layout, &form(&layout, MomentFormat::F32), &all, 0);
        let expected = [(layout.matrices(), true), (layout.vectors(), false)];
        let expected = expected.map(|(range, decays)| Segment {
            number: range.start,
            range,
            decays,
            group: 0,
            whole: None,
            grains: 0..0,
        });
        assert_eq!(plain, expected);
        let quantised = segments_of(&layout, &form(&layout, MomentFormat::Quantised), &all, 0);
        assert_eq!(quantised.len(), 4);
        let decays: Vec<bool> = quantised.iter().map(|segment| segment.decays).collect();
        assert_eq!(decays, [true, true, false, false]);
        let joined: Vec<usize> = quantised
            .iter()
            .flat_map(|segment| segment.range.clone())
            .collect();
        assert!(joined.into_iter().eq(0..layout.elements()));
    }

    #[test]
    fn what_is_updated_in_one_call_has_one_type() {
        let mut builder = LayoutBuilder::default();
        for (name, dtype) in [
            ("q", None),
            ("gate", Some(DType::F32)),
            ("up", None),
            ("down", None),
        ] {
            builder.add_as((Role::Trained, dtype), Layer::Block(0), name, &[2, 128]);
        }
        let layout = builder.build();
        let form = form(&layout, MomentFormat::F32);
        let segments = segments_of(&layout, &form, &layout.all(), 0);
        let calls = segments.iter().map(|segment| {
            let states = form.tensors(&segment.range);
            (segment.range.clone(), states[0].kind)
        });
        let expected = [
            (0..256, "master"),
            (256..512, "first_moment"),
            (512..1024, "master"),
        ];
        assert!(calls.eq(expected), "f32 weights are their own masters");
    }

    #[test]
    fn numbers_are_those_without_tails() {
        let build = |ranks| {
            let mut builder = LayoutBuilder::default();
            for layer in 0..3 {
                builder.add(Layer::Block(layer), format!("{layer}.matrix"), &[70, 70]);
                builder.add(Layer::Block(layer), format!("{layer}.norm"), &[300]);
            }
            builder.for_ranks(ranks).build()
        };
        let numbers = |ranks: usize| {
            let layout = build(Some(ranks));
            let form = form(&layout, MomentFormat::F32);
            let own =
                Rank::all(ranks).flat_map(|rank| segments_of(&layout, &form, &layout.own(rank), 0));
            let mut numbers: Vec<usize> = own
                .flat_map(|segment| {
                    let tails = Cover::new(layout.tails().iter().cloned());
                    let tail = tails.within(&segment.range).elements();
                    segment.number..segment.number + segment.range.len() - tail
                })
                .collect();
            numbers.sort_unstable();
            numbers
        };
        let all: Vec<usize> = (0..build(None).elements()).collect();
        assert!(build(Some(3)).tails().len() > 2);
        for ranks in [1, 2, 3] {
            assert_eq!(numbers(ranks), all, "{ranks} ranks");
        }
    }
}
