//! Segments: the ranges that one call updates.

use crate::form::Form;
use crate::rule::{ParameterGroup, Rule};
use crate::update::WholeTensor;
use memory::{Cover, GRAIN_ELEMENTS, Layout, Rank};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

/// A range of the arenas that is updated at once. It is all matrices or all vectors of a group, with moments of one
/// format, or a single tensor that is updated as a whole, with the padding behind it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Segment {
    pub(crate) range: Range<usize>,
    pub(crate) decays: bool,
    /// The index of its group.
    pub(crate) group: usize,
    /// The tensor, if it is updated as a whole.
    pub(crate) whole: Option<Whole>,
}

/// Segments that are updated at once: one, or one matrix per rank if ranks have pieces of matrices.
pub(crate) type Round = Vec<Segment>;

/// A rank, and the range that it has.
pub(crate) type Piece = (usize, Range<usize>);

/// A tensor that is updated as a whole.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Whole {
    pub(crate) tensor: WholeTensor,
    /// The grains of the norm that contain its gradients.
    pub(crate) grains: Range<usize>,
    /// The range that each rank updates, without padding, in the order of the tensor. Ranks that have none are left out.
    pub(crate) pieces: Vec<Piece>,
}

impl Whole {
    /// The range that a rank updates; none if it has no part of the tensor.
    pub(crate) fn piece(&self, rank: Rank) -> Option<Range<usize>> {
        let mut pieces = self.pieces.iter();
        let own = pieces.find(|(number, _)| *number == rank.number);
        own.map(|(_, range)| range.clone())
    }
}

impl Segment {
    /// The tensor of a segment that is updated as a whole.
    pub(crate) fn whole(&self) -> &Whole {
        self.whole.as_ref().expect("its rule updates whole tensors")
    }
}

/// The rounds that update a cover, group by group. A rule that updates ranges gets only this rank's `own` ranges. A rule
/// that updates whole tensors gets every tensor, since ranks update these together.
pub(crate) fn rounds(
    layout: &Layout,
    form: &Form,
    (cover, own): (&Cover, &Cover),
    rank: Rank,
) -> Vec<Round> {
    let groups = form.groups.iter().enumerate();
    let of_group = groups.flat_map(|(number, group)| {
        let whole = || tensors_of(layout, (number, group), cover, rank);
        let (segments, at_once) = match group.rule {
            Rule::AdamW { .. } => {
                let own = own.within_all(cover).within_all(&group.cover);
                (segments_of(layout, form, &own, number), 1)
            }
            Rule::Muon(_) => (whole(), rank.of),
            Rule::Adafactor(_) => (whole(), 1),
        };
        let rounds = segments.chunks(at_once).map(<[Segment]>::to_vec);
        rounds.collect::<Vec<Round>>()
    });
    of_group.collect()
}

/// The tensors of a group that are in a cover. If each rank owns one at a time, the largest come first, so that ranks
/// have about equal work.
fn tensors_of(
    layout: &Layout,
    (number, group): (usize, &ParameterGroup),
    cover: &Cover,
    rank: Rank,
) -> Vec<Segment> {
    let tensors = group.tensors.iter().filter_map(|tensor| {
        let entry = &layout.entries()[tensor.entry];
        let range = entry.padded_range();
        cover.rows(&range)?;
        Some(Segment {
            decays: entry.is_matrix(),
            group: number,
            whole: Some(Whole {
                tensor: tensor.clone(),
                grains: grains_of(layout, &range),
                pieces: pieces(layout, tensor.entry, rank.of),
            }),
            range,
        })
    });
    let mut tensors: Vec<Segment> = tensors.collect();
    if matches!(group.rule, Rule::Muon(_)) && rank.of > 1 {
        tensors.sort_by_key(|segment| Reverse(segment.whole().tensor.elements()));
    }
    tensors
}

/// The range of a tensor that each rank has, without padding, in the order of the tensor. A rank has one piece of the tensor's bundle,
/// so at most one range of the tensor.
fn pieces(layout: &Layout, entry: usize, ranks: usize) -> Vec<Piece> {
    let bundle = match layout.unit_of(entry) {
        Some(unit) => layout.units()[unit].trained.clone(),
        None => layout.trained().within(&layout.vectors()),
    };
    let own = layout.entries()[entry].range();
    let of = |rank: Rank| {
        let piece = layout.piece(&bundle, rank).within(&own);
        Some((rank.number, piece.ranges().first()?.clone()))
    };
    let mut pieces: Vec<Piece> = Rank::all(ranks).filter_map(of).collect();
    pieces.sort_by_key(|(_, range)| range.start);
    pieces
}

/// The grains that a range overlaps.
fn grains_of(layout: &Layout, range: &Range<usize>) -> Range<usize> {
    let mut grained = layout.grained().iter();
    let own = grained.find(|(all, _)| all.start <= range.start && range.end <= all.end);
    let (all, first) = own.expect("what is trained is in grains");
    let grain = |element: usize| first + (element - all.start) / GRAIN_ELEMENTS;
    grain(range.start)..grain(range.end - 1) + 1
}

/// The matrices and vectors of a cover, split where their type changes, where quantised moments begin or end, and at
/// elements without numbers.
fn segments_of(layout: &Layout, form: &Form, cover: &Cover, group: usize) -> Vec<Segment> {
    let (matrices, quantised) = (layout.matrices(), &form.quantised);
    let mut cuts = BTreeSet::from([matrices.end, quantised.start, quantised.end]);
    cuts.extend(layout.tails().iter().map(|tail| tail.end));
    let parts = form.types.runs(cover).into_iter().flat_map(|(run, _)| {
        let within = cuts.range(run.start + 1..run.end).copied();
        let ends: Vec<usize> = within.chain([run.end]).collect();
        let starts = [run.start].into_iter().chain(ends.clone());
        starts.zip(ends).map(|(start, end)| start..end)
    });
    let segments = parts.map(|range| Segment {
        decays: matrices.contains(&range.start),
        range,
        group,
        whole: None,
    });
    segments.collect()
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
            range,
            decays,
            group: 0,
            whole: None,
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
                    let number = layout.untailed(segment.range.start);
                    number..number + segment.range.len() - tail
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
