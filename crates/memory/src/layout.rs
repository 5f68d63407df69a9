//! Where each tensor lies in the buffers that share a layout, which tensors form a unit, and each rank's piece.

use crate::entry::dims;
use crate::placing::{Placed, place};
use crate::stages::Stages;
use crate::types::StoredAs;
use crate::{Codes, Cover, DType, Dims, Entry, GRAIN_ELEMENTS, Layer, Rank, Role, Types};
use std::collections::HashMap;
use std::iter;
use std::ops::Range;
use std::rc::Rc;

/// The matrices of one part of the model, or a group of the experts of one of them. A matrix belongs to the part that reads it first. They
/// are fetched, released and sent together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The part of the model.
    pub part: Layer,
    /// Its matrices, by their index in the layout.
    pub entries: Vec<usize>,
    /// The elements of these matrices, padding included.
    pub cover: Cover,
    /// Its trained elements: one range, or two if some matrices must stay precise.
    pub trained: Cover,
    /// Its frozen elements: one range, or none.
    pub frozen: Cover,
}

impl Unit {
    /// Its bundles, each of which is divided among ranks separately.
    pub fn bundles(&self) -> impl Iterator<Item = &Cover> {
        let bundles = [&self.trained, &self.frozen].into_iter();
        bundles.filter(|bundle| bundle.elements() > 0)
    }
}

/// Where each tensor lies in every arena that shares the layout. Matrices come first, in forward order, then vectors,
/// then buffers; so weight decay applies to one range. Frozen tensors lie at both ends of matrices and vectors, so
/// trained ones form one range, which gradients and optimizer states cover. Within it, tensors that must stay precise
/// (see [`LayoutBuilder::build_precise`]) lie at both ends. So those that may be quantised form one range too.
///
/// A layout for several ranks divides its *bundles*: the trained and the frozen matrices of each unit, and the trained
/// and the frozen vectors. A *tail* pads each bundle so that every rank's piece of it has the same number of grains.
/// Tail padding gets no element numbers ([`Layout::untailed`]), so the norm's grains and random numbers do not depend
/// on the rank count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    entries: Vec<Entry>,
    /// The part of the model that each entry belongs to.
    pub(crate) parts: Vec<Layer>,
    pub(crate) units: Vec<Unit>,
    /// Which stage of a pipeline holds which part; none without a pipeline.
    pub(crate) stages: Option<Stages>,
    /// The ranges of [`Layout::grained`].
    grained: Vec<(Range<usize>, usize)>,
    /// The units of each entry: one, or one for each of its groups; none for vectors.
    units_of: Vec<Range<usize>>,
    finding: Finding,
    matrix_elements: usize,
    trained: Range<usize>,
    quantisable: Range<usize>,
    weights: usize,
    elements: usize,
    /// The padding of bundles, in order.
    tails: Vec<Range<usize>>,
    /// How many neighbouring ranks have all weights together; none if all ranks have.
    pub(crate) shard_group_size: Option<usize>,
    /// The ranges that are stored in a type of their own, or as codes, in order.
    stored: Rc<[(Range<usize>, StoredAs)]>,
}

/// Indexes for fast lookup: a layout may have tens of thousands of entries.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    entries: HashMap<String, usize>,
    units: HashMap<Layer, usize>,
    /// The first element of each range of a unit, in order, with the unit's index.
    starts: Vec<(usize, usize)>,
}

impl Finding {
    fn new(entries: &[Entry], units: &[Unit]) -> Finding {
        let named = entries.iter().enumerate();
        let parts = units.iter().enumerate();
        let ranges = parts.clone().flat_map(|(index, unit)| {
            let ranges = unit.cover.ranges().iter();
            ranges.map(move |range| (range.start, index))
        });
        let mut starts: Vec<(usize, usize)> = ranges.collect();
        starts.sort_unstable();
        Finding {
            entries: named
                .map(|(index, entry)| (entry.name.clone(), index))
                .collect(),
            // The first of a part's units has what is in no group.
            units: parts
                .rev()
                .map(|(index, unit)| (unit.part, index))
                .collect(),
            starts,
        }
    }
}

/// A tensor to be placed.
struct Tensor {
    part: Layer,
    entry: Entry,
    /// How many units it is divided into, each with as many of its rows; 1: it is part of its part's unit.
    groups: usize,
}

/// Collects tensors in forward order.
#[derive(Default)]
pub struct LayoutBuilder {
    tensors: Vec<Tensor>,
    ranks: Option<usize>,
}

impl LayoutBuilder {
    /// Adds a trained tensor to a part of the model.
    pub fn add(&mut self, part: Layer, name: impl Into<String>, shape: &[usize]) {
        self.add_as((Role::Trained, None), part, name, shape);
    }

    /// Adds a tensor of any role to a part of the model, with its own type if one is given.
    pub fn add_as(
        &mut self,
        (role, dtype): (Role, Option<DType>),
        part: Layer,
        name: impl Into<String>,
        shape: &[usize],
    ) {
        let entry = Entry {
            name: name.into(),
            offset: 0,
            shape: shape.to_vec(),
            role,
            dtype,
            codes: None,
        };
        self.tensors.push(Tensor {
            part,
            entry,
            groups: 1,
        });
    }

    /// Stores the tensor that was added last as codes.
    ///
    /// # Panics
    /// If it is no frozen matrix.
    pub fn as_codes(&mut self, codes: Codes) {
        let last = &mut self.last().entry;
        assert!(last.role == Role::Frozen && last.is_matrix());
        last.codes = Some(codes);
    }

    /// Divides the tensor that was added last, `[rows, ..]`, into so many units with equally many rows each, in their order. Elements stay where they
    /// are.
    ///
    /// # Panics
    /// If it is no matrix, or its rows cannot be divided so.
    pub fn in_groups(&mut self, groups: usize) {
        let last = self.last();
        assert!(last.entry.is_matrix() && last.entry.shape[0].is_multiple_of(groups));
        last.groups = groups;
    }

    fn last(&mut self) -> &mut Tensor {
        self.tensors.last_mut().expect("a tensor was added")
    }

    /// Places matrices, then vectors, each in the order added.
    pub fn build(self) -> Layout {
        self.build_precise(|_, _| false)
    }

    /// Divides the layout among this many ranks. With `None` it is not divided.
    pub fn for_ranks(self, ranks: Option<usize>) -> LayoutBuilder {
        LayoutBuilder { ranks, ..self }
    }

    /// Places frozen matrices, precise matrices, other matrices, other vectors, precise vectors, frozen vectors and
    /// buffers, each in the order added. `is_precise(name, elements)` says which tensors must never be quantised.
    /// Indexes of entries are those of [`LayoutBuilder::build`], wherever the entries lie.
    pub fn build_precise(self, is_precise: impl Fn(&str, usize) -> bool) -> Layout {
        let mut tensors = self.tensors;
        tensors.sort_by_key(|one| (one.entry.role == Role::Buffer, !one.entry.is_matrix()));
        let matrices = tensors.iter().filter(|one| one.entry.is_matrix());
        let of_matrices: Vec<Layer> = matrices.map(|one| one.part).collect();
        let parts = tensors.iter().map(|one| one.part).collect();
        let groups: Vec<usize> = tensors.iter().map(|one| one.groups).collect();
        let mut entries: Vec<Entry> = tensors.into_iter().map(|one| one.entry).collect();
        let precise = entries.iter();
        let precise: Vec<bool> = precise
            .map(|entry| is_precise(&entry.name, entry.elements()))
            .collect();
        let placed = place(&mut entries, &of_matrices, &precise, self.ranks);
        let whole = units(&of_matrices, &entries, &placed);
        let tails: Vec<Range<usize>> = placed.tails.into_iter().map(|(_, tail)| tail).collect();
        let bundles = whole.iter().map(|unit| unit.trained.clone());
        let vectors = placed.matrices..placed.trained.end;
        let grained = grains_of_bundles(bundles.chain([Cover::new([vectors])]), &tails);
        let (units, units_of) = in_groups(whole, &entries, &groups);
        Layout {
            finding: Finding::new(&entries, &units),
            stored: stored(&entries),
            parts,
            units,
            stages: None,
            shard_group_size: None,
            grained,
            units_of,
            entries,
            matrix_elements: placed.matrices,
            trained: placed.trained,
            quantisable: placed.quantisable,
            weights: placed.weights,
            elements: placed.elements,
            tails,
        }
    }
}

/// The elements of entries that have their own type, or are codes.
fn stored(entries: &[Entry]) -> Rc<[(Range<usize>, StoredAs)]> {
    let own = entries.iter().filter_map(|entry| {
        let stored = match (entry.codes, entry.dtype) {
            (Some(codes), _) => StoredAs::Codes(codes.places(entry.elements()).bytes),
            (None, dtype) => StoredAs::Numbers(dtype?),
        };
        Some((entry.padded_range(), stored))
    });
    let mut own: Vec<(Range<usize>, StoredAs)> = own.collect();
    own.sort_by_key(|(range, _)| range.start);
    own.dedup_by(|(next, stored), (before, other)| {
        let is_one =
            before.end == next.start && stored == other && matches!(stored, StoredAs::Numbers(_));
        if is_one {
            before.end = next.end;
        }
        is_one
    });
    own.into()
}

/// Units in the order in which their parts first appear.
fn units(parts: &[Layer], entries: &[Entry], placed: &Placed) -> Vec<Unit> {
    let (mut units, mut numbers): (Vec<Unit>, HashMap<Layer, usize>) = Default::default();
    for (index, part) in parts.iter().enumerate() {
        let number = *numbers.entry(*part).or_insert(units.len());
        if number == units.len() {
            units.push(Unit {
                part: *part,
                entries: Vec::new(),
                cover: Cover::default(),
                trained: Cover::default(),
                frozen: Cover::default(),
            });
        }
        units[number].entries.push(index);
    }
    let mut covers = vec![Vec::new(); units.len()];
    for (part, tail) in &placed.tails {
        if let Some(number) = numbers.get(part) {
            covers[*number].push(tail.clone());
        }
    }
    for (unit, mut cover) in units.iter_mut().zip(covers) {
        let matrices = unit.entries.iter();
        cover.extend(matrices.map(|index| entries[*index].padded_range()));
        unit.cover = Cover::new(cover);
        unit.trained = unit.cover.within(&placed.trained);
        unit.frozen = unit.cover.without(&unit.trained);
    }
    units
}

/// Makes units of groups, behind the unit that they are taken from. Returns the units of each entry too.
fn in_groups(
    whole: Vec<Unit>,
    entries: &[Entry],
    groups: &[usize],
) -> (Vec<Unit>, Vec<Range<usize>>) {
    let (mut units, mut units_of) = (Vec::new(), vec![0..0; entries.len()]);
    for mut unit in whole {
        let (grouped, others) = unit.entries.iter().partition(|entry| groups[**entry] > 1);
        let grouped: Vec<usize> = grouped;
        unit.entries = others;
        let own = units.len();
        for entry in &unit.entries {
            units_of[*entry] = own..own + 1;
        }
        let of_groups = grouped.into_iter().flat_map(|entry| {
            let first = entries[entry].offset;
            let elements = entries[entry].elements() / groups[entry];
            let starts = (0..groups[entry]).map(move |group| first + group * elements);
            starts.map(move |start| (entry, start..start + elements))
        });
        let of_groups: Vec<(usize, Range<usize>)> = of_groups.collect();
        let groups = of_groups.into_iter().map(|(entry, elements)| {
            let [cover, trained, frozen] =
                [&unit.cover, &unit.trained, &unit.frozen].map(|all| all.within(&elements));
            Unit {
                part: unit.part,
                entries: vec![entry],
                cover,
                trained,
                frozen,
            }
        });
        let groups: Vec<Unit> = groups.collect();
        let taken = Cover::joined(groups.iter().map(|group| group.cover.clone()));
        for all in [&mut unit.cover, &mut unit.trained, &mut unit.frozen] {
            *all = all.without(&taken);
        }
        units.push(unit);
        for group in groups {
            let entry = &mut units_of[group.entries[0]];
            let number = units.len();
            *entry = match entry.len() {
                0 => number..number + 1,
                _ => entry.start..number + 1,
            };
            units.push(group);
        }
    }
    (units, units_of)
}

/// The ranges of bundles without their tails, each with the number of its first grain.
fn grains_of_bundles(
    bundles: impl Iterator<Item = Cover>,
    tails: &[Range<usize>],
) -> Vec<(Range<usize>, usize)> {
    let ranges = bundles.flat_map(|bundle| bundle.ranges().to_vec());
    let mut first = 0;
    let count = |range: Range<usize>| {
        let tail = tails.binary_search_by_key(&range.end, |tail| tail.end);
        let range = range.start..tail.map_or(range.end, |tail| tails[tail].start);
        let own = first;
        first += range.len().div_ceil(GRAIN_ELEMENTS);
        (range, own)
    };
    ranges.map(count).collect()
}

impl Layout {
    /// The units, in forward order. Vectors belong to none.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The index in [`Layout::units`] of the unit that a matrix belongs to; none for vectors, and for matrices in groups.
    pub fn unit_of(&self, entry: usize) -> Option<usize> {
        let units = &self.units_of[entry];
        (units.len() == 1).then_some(units.start)
    }

    /// The units of a matrix: one, or those of its groups ([`LayoutBuilder::in_groups`]); none for vectors.
    pub fn units_of(&self, entry: usize) -> Range<usize> {
        self.units_of[entry].clone()
    }

    /// The elements of a group of a matrix, by its unit, and its shape.
    pub fn group(&self, entry: usize, unit: usize) -> (Range<usize>, Dims) {
        let (units, entry) = (self.units_of(entry), &self.entries[entry]);
        let mut shape = entry.shape.clone();
        shape[0] /= units.len();
        let elements = entry.elements() / units.len();
        let start = entry.offset + (unit - units.start) * elements;
        (start..start + elements, dims(&shape))
    }

    /// Whether every rank has whole grains of each group, and these are the grains that the norm has without groups.
    pub fn groups_are_whole_grains(&self, ranks: usize) -> bool {
        let starts_grain = |range: &Range<usize>| {
            let mut all = self.grained.iter().map(|(all, _)| all);
            let all = all.find(|all| all.start <= range.start && range.end <= all.end);
            all.is_some_and(|all| (range.start - all.start).is_multiple_of(GRAIN_ELEMENTS))
        };
        let groups = self.units_of.iter().filter(|units| units.len() > 1);
        let mut groups = groups.flat_map(|units| &self.units[units.clone()]);
        groups.all(|group| {
            let is_divided = group
                .cover
                .elements()
                .is_multiple_of(ranks * GRAIN_ELEMENTS);
            is_divided && group.trained.ranges().iter().all(starts_grain)
        })
    }

    /// The first unit of a part, which has all its matrices that are not in groups; none if it has no matrix.
    pub fn unit_of_part(&self, part: Layer) -> Option<usize> {
        self.finding.units.get(&part).copied()
    }

    /// The unit that holds all elements of a range; none if no unit does.
    pub fn locate(&self, range: &Range<usize>) -> Option<usize> {
        let starts = &self.finding.starts;
        let before = starts.partition_point(|(start, _)| *start <= range.start);
        let unit = starts[before.checked_sub(1)?].1;
        self.units[unit].cover.rows(range).map(|_| unit)
    }

    /// The ranges in which grains ([`GRAIN_ELEMENTS`]) are counted, each with the number of its first grain. Units come
    /// first, then the vectors, all without their tails; those of other stages of a pipeline too.
    pub fn grained(&self) -> &[(Range<usize>, usize)] {
        &self.grained
    }

    /// The elements that only other stages hold.
    fn elsewhere(&self) -> Cover {
        let stages = self.stages.as_ref();
        stages.map_or(Cover::default(), |stages| stages.elsewhere.clone())
    }

    /// All elements that this stage holds, tails included.
    pub fn all(&self) -> Cover {
        Cover::new(iter::once(0..self.elements)).without(&self.elsewhere())
    }

    /// The same but those of buffers.
    pub fn weights(&self) -> Cover {
        Cover::new(iter::once(0..self.weights)).without(&self.elsewhere())
    }

    /// The elements of this stage's matrices that are stored as codes, padding included.
    pub fn coded(&self) -> Cover {
        let coded = self.entries.iter().filter(|entry| entry.codes.is_some());
        Cover::new(coded.map(Entry::padded_range)).without(&self.elsewhere())
    }

    /// The types that parameters are stored in if the model computes in `compute`.
    pub fn types(&self, compute: DType) -> Types {
        Types::new(self.stored.clone(), compute)
    }

    /// The elements of buffers, padding included.
    pub fn buffers(&self) -> Cover {
        Cover::new(iter::once(self.weights..self.elements))
    }

    /// The elements of this stage that have gradients and optimizer states, tails included.
    pub fn trained(&self) -> Cover {
        Cover::new([self.trained.clone()]).without(&self.elsewhere())
    }

    /// The trained bundles, in the order in which they are divided among ranks: each unit's, then the vectors'. Tails
    /// are included. Those of units of other stages are empty.
    pub fn bundles(&self) -> Vec<Cover> {
        let units = self.units.iter().map(|unit| unit.trained.clone());
        let vectors = self.trained().within(&self.vectors());
        units.chain([vectors]).collect()
    }

    /// A rank's pieces of all trained bundles.
    pub fn own_trained(&self, rank: Rank) -> Cover {
        let bundles = self.bundles();
        Cover::joined(bundles.iter().map(|bundle| self.piece(bundle, rank)))
    }

    /// A rank's pieces of all bundles, so that all ranks together have every element once: vectors, which every stage of a
    /// pipeline holds, count as the first stage's. The first rank's include all buffers.
    pub fn own(&self, rank: Rank) -> Cover {
        let buffers = (rank.number == 0).then(|| self.buffers());
        let vectors = Cover::new([self.vectors()]).without(&self.trained());
        let frozen = self.units.iter().map(|unit| &unit.frozen);
        let pieces = frozen
            .chain([&vectors])
            .map(|bundle| self.piece(bundle, rank));
        let all = Cover::joined(pieces.chain([self.own_trained(rank)]).chain(buffers));
        match self.stage().number {
            0 => all,
            _ => all.within(&self.matrices()),
        }
    }

    /// The padding that gives every rank whole grains of each bundle.
    pub fn tails(&self) -> &[Range<usize>] {
        &self.tails
    }

    /// An element's number, without counting elements of the tails before it.
    pub fn untailed(&self, element: usize) -> usize {
        let before = self.tails.partition_point(|tail| tail.end <= element);
        element - self.tails[..before].iter().map(Range::len).sum::<usize>()
    }

    /// All tensors: matrices, then vectors, then buffers, each in the order added.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The index of a tensor.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.finding.entries.get(name).copied()
    }

    /// Several tensors as one: its elements, and its shape, with each tensor's rows below those of the one before. They
    /// must be of one role and type, in one unit or all vectors. None unless they lie in this order with no padding
    /// between them.
    pub fn joined(&self, entries: &[usize]) -> Option<(Range<usize>, Dims)> {
        let of = |entry: &usize| &self.entries[*entry];
        let lie_together = entries.windows(2).all(|pair| {
            let [before, next] = [of(&pair[0]), of(&pair[1])];
            before.range().end == next.offset
                && (before.role, before.dtype, before.codes) == (next.role, next.dtype, next.codes)
                && before.shape[1..] == next.shape[1..]
                && self.units_of[pair[0]] == self.units_of[pair[1]]
        });
        let (first, last) = (of(entries.first()?), of(entries.last()?));
        let mut shape = first.shape.clone();
        shape[0] = entries.iter().map(|entry| of(entry).shape[0]).sum();
        lie_together.then(|| (first.offset..last.range().end, dims(&shape)))
    }

    /// Number of elements of an arena, padding included.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Number of parameters, without padding and buffers.
    pub fn parameters(&self) -> usize {
        let weights = self
            .entries
            .iter()
            .filter(|entry| entry.role != Role::Buffer);
        weights.map(Entry::elements).sum()
    }

    /// Number of trained parameters, without padding.
    pub fn trained_parameters(&self) -> usize {
        let trained = self.entries.iter().filter(|entry| entry.role.is_trained());
        trained.map(Entry::elements).sum()
    }

    /// The range of all matrices, padding included.
    pub fn matrices(&self) -> Range<usize> {
        0..self.matrix_elements
    }

    /// The range of all vectors, padding included.
    pub fn vectors(&self) -> Range<usize> {
        self.matrix_elements..self.weights
    }

    /// The range of all trained tensors that may be quantised, padding included. Without precise tensors this is the
    /// whole trained range.
    pub fn quantisable(&self) -> Range<usize> {
        self.quantisable.clone()
    }

    /// The padding behind each tensor, and the tails, as ranges.
    pub fn padding(&self) -> impl Iterator<Item = Range<usize>> {
        self.entries
            .iter()
            .map(|entry| entry.range().end..entry.padded_range().end)
            .chain(self.tails.iter().cloned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PARAMETER_PADDING;
    use proptest::prelude::*;

    #[test]
    fn neighbours_of_one_unit_are_one_tensor() {
        let mut builder = LayoutBuilder::default();
        for (part, name, shape) in [
            (0, "q", &[64, 8][..]),
            (0, "k", &[32, 8]),
            (0, "k_bias", &[256]),
            (0, "v", &[32, 8]),
            (0, "v_bias", &[256]),
            (0, "odd", &[3, 8]),
            (0, "after", &[32, 8]),
            (0, "wide", &[16, 16]),
            (1, "next", &[32, 8]),
            (1, "short_bias", &[3]),
            (1, "bias", &[3]),
            (2, "experts", &[8, 4, 16]),
            (2, "more_experts", &[2, 4, 16]),
            (2, "other_experts", &[2, 8, 16]),
        ] {
            builder.add(Layer::Block(part), name, shape);
        }
        let layout = builder.build();
        let joined = |names: &[&str]| {
            let entries: Vec<usize> = names
                .iter()
                .map(|name| layout.find(name).unwrap())
                .collect();
            layout.joined(&entries)
        };
        assert_eq!(joined(&["q", "k", "v"]), Some((0..1024, [128, 8].into())));
        assert_eq!(joined(&["k"]), Some((512..768, [32, 8].into())));
        let biases = joined(&["k_bias", "v_bias"]).expect("vectors may lie together too");
        assert_eq!((biases.0.len(), biases.1), (512, [512].into()));
        let (range, dims) = joined(&["experts", "more_experts"]).expect("of any rank");
        assert_eq!((range.len(), dims), (640, [10, 4, 16].into()));
        for apart in [
            &["k", "q"][..],
            &["more_experts", "other_experts"],
            &["q", "v"],
            &["odd", "after"],
            &["after", "wide"],
            &["wide", "next"],
            &["short_bias", "bias"],
            &[],
        ] {
            assert_eq!(joined(apart), None, "{apart:?}");
        }
    }

    /// A block with attention, experts and shared experts, whose experts are divided into so many groups.
    fn with_experts(groups: usize) -> Layout {
        let mut builder = LayoutBuilder::default();
        for part in 0..2 {
            builder.add(Layer::Block(part), format!("attention{part}"), &[64, 64]);
            builder.add(Layer::Block(part), format!("experts{part}"), &[8, 64, 32]);
            if groups > 1 {
                builder.in_groups(groups);
            }
            builder.add(Layer::Block(part), format!("shared{part}"), &[50, 64]);
            builder.add(Layer::Block(part), format!("norm{part}"), &[64]);
        }
        builder.for_ranks(Some(2)).build()
    }

    #[test]
    fn groups_are_units_and_nothing_moves() {
        let (whole, grouped) = (with_experts(1), with_experts(2));
        assert_eq!(grouped.entries(), whole.entries());
        assert_eq!(grouped.grained(), whole.grained());
        assert_eq!(grouped.tails(), whole.tails());
        assert_eq!((whole.units().len(), grouped.units().len()), (2, 2 * 3));
        let experts = grouped.find("experts1").unwrap();
        assert_eq!(grouped.units_of(experts), 4..6);
        assert_eq!(grouped.unit_of(experts), None);
        assert_eq!(grouped.unit_of_part(Layer::Block(1)), Some(3));
        let offset = grouped.entries()[experts].offset;
        for (number, unit) in grouped.units()[4..6].iter().enumerate() {
            let start = offset + number * 4 * 64 * 32;
            let elements = start..start + 4 * 64 * 32;
            assert_eq!(unit.cover.ranges(), std::slice::from_ref(&elements));
            assert_eq!((unit.part, &unit.trained), (Layer::Block(1), &unit.cover));
            assert_eq!(grouped.locate(&(start..start + 1)), Some(4 + number));
        }
        let all =
            |layout: &Layout| Cover::joined(layout.units().iter().map(|unit| unit.cover.clone()));
        assert_eq!(all(&grouped), all(&whole));
        let own = Rank::all(2).map(|rank| grouped.own_trained(rank));
        let own: Vec<Cover> = own.collect();
        assert_eq!(own[0].elements(), own[1].elements());
        assert_eq!(Cover::joined(own), whole.trained());
        assert!(grouped.groups_are_whole_grains(2) && whole.groups_are_whole_grains(2));
        assert!(!grouped.groups_are_whole_grains(3));
        assert!(!with_experts(8).groups_are_whole_grains(2));
    }

    #[test]
    fn matrices_come_first_and_everything_is_padded() {
        let mut builder = LayoutBuilder::default();
        builder.add(Layer::Embedding, "embed", &[10, 3]);
        builder.add(Layer::Block(0), "norm", &[3]);
        builder.add(Layer::Block(0), "q", &[30, 10]);
        let layout = builder.build();
        let offsets: Vec<_> = layout
            .entries()
            .iter()
            .map(|entry| (entry.name.as_str(), entry.offset))
            .collect();
        assert_eq!(offsets, [("embed", 0), ("q", 256), ("norm", 768)]);
        assert_eq!((layout.matrices(), layout.vectors()), (0..768, 768..1024));
        assert_eq!(layout.parameters(), 333);
        assert_eq!(
            layout.padding().collect::<Vec<_>>(),
            [30..256, 556..768, 771..1024]
        );
    }

    /// Every `frozen_every`-th tensor is frozen; at 0 or 1 none is.
    fn role(index: usize, frozen_every: usize) -> Role {
        match frozen_every > 1 && index.is_multiple_of(frozen_every) {
            true => Role::Frozen,
            false => Role::Trained,
        }
    }

    #[test]
    fn what_is_trained_is_one_range() {
        let mut builder = LayoutBuilder::default();
        let frozen = ["embed", "q", "norm"];
        for (part, name, shape) in [
            (0, "embed", &[4, 256][..]),
            (1, "q", &[2, 256]),
            (1, "k", &[1, 256]),
            (1, "statistics", &[2, 3]),
            (1, "norm", &[256]),
            (1, "bias", &[256]),
        ] {
            let role = match name {
                "statistics" => Role::Buffer,
                _ if frozen.contains(&name) => Role::Frozen,
                _ => Role::Trained,
            };
            builder.add_as((role, None), Layer::Block(part), name, shape);
        }
        let layout = builder.build();
        let offset = |name| layout.entries()[layout.find(name).unwrap()].offset;
        let offsets = ["embed", "q", "k", "bias", "norm"].map(offset);
        assert_eq!(offsets, [0, 1024, 1536, 1792, 2048]);
        let only = |range| Cover::new(iter::once(range));
        assert_eq!(layout.trained(), only(1536..2048));
        assert_eq!((layout.matrices(), layout.vectors()), (0..1792, 1792..2304));
        assert_eq!(layout.trained_parameters(), 512);
        assert_eq!(layout.parameters(), 512 + 1024 + 512 + 256);
        let statistics = layout.find("statistics").unwrap();
        assert_eq!((statistics, layout.unit_of(statistics)), (5, None));
        assert_eq!(layout.buffers(), only(2304..2560));
        assert_eq!(layout.all().elements(), layout.elements());
        let unit = &layout.units()[1];
        assert_eq!(
            (&unit.cover, &unit.trained),
            (&only(1024..1792), &only(1536..1792))
        );
        let together = ["q", "k"].map(|name| layout.find(name).unwrap());
        assert_eq!(
            layout.joined(&together),
            None,
            "one has a gradient, and one has none"
        );
    }

    #[test]
    fn what_may_be_quantised_is_one_range() {
        let mut builder = LayoutBuilder::default();
        let shapes: [(&str, &[usize]); 5] = [
            ("norm", &[300]),
            ("q", &[20, 20]),
            ("embed", &[10, 30]),
            ("bias", &[3]),
            ("k", &[2, 128]),
        ];
        for (name, shape) in shapes {
            builder.add(Layer::Whole, name, shape);
        }
        let layout = builder.build_precise(|name, elements| name == "embed" || elements < 10);
        let offsets: Vec<_> = layout
            .entries()
            .iter()
            .map(|entry| (entry.name.as_str(), entry.offset))
            .collect();
        let expected = [
            ("q", 512),
            ("embed", 0),
            ("k", 1024),
            ("norm", 1280),
            ("bias", 1792),
        ];
        assert_eq!(offsets, expected);
        assert_eq!((layout.matrices(), layout.vectors()), (0..1280, 1280..2048));
        assert_eq!(layout.quantisable(), 512..1792);
    }

    proptest! {
        #[test]
        fn tensors_are_aligned_disjoint_and_of_one_unit(
            shapes in proptest::collection::vec(proptest::collection::vec(1usize..12, 1..5), 1..30),
            precise_below in 0usize..400,
            frozen_every in 1usize..6,
        ) {
            let mut builder = LayoutBuilder::default();
            for (index, shape) in shapes.iter().enumerate() {
                builder.add_as((role(index, frozen_every), None), Layer::Block(index / 4), format!("t{index}"), shape);
            }
            let layout = builder.build_precise(|_, elements| elements < precise_below);
            let mut by_offset: Vec<&Entry> = layout.entries().iter().collect();
            by_offset.sort_by_key(|entry| entry.offset);
            let mut end = 0;
            for entry in by_offset {
                prop_assert_eq!(entry.offset % PARAMETER_PADDING, 0);
                prop_assert!(entry.offset >= end);
                end = entry.range().end;
                let kind = if entry.shape.len() > 1 { layout.matrices() } else { layout.vectors() };
                prop_assert!(kind.contains(&entry.offset));
                let precise = entry.elements() < precise_below;
                let is_trained = entry.role.is_trained();
                prop_assert_eq!(layout.quantisable().contains(&entry.offset), is_trained && !precise);
                prop_assert_eq!(layout.trained().rows(&entry.padded_range()).is_some(), is_trained);
            }
            prop_assert!(end <= layout.elements());
            let padding: usize = layout.padding().map(|range| range.len()).sum();
            prop_assert_eq!(padding + layout.parameters(), layout.elements());
            let grained = layout.grained();
            prop_assert_eq!(grained.iter().map(|(range, _)| range.len()).sum::<usize>(), layout.trained().elements());
            for (unit, index) in layout.units().iter().zip(0..) {
                prop_assert!(unit.trained.ranges().len() <= 2 && unit.frozen.ranges().len() <= 1);
                prop_assert_eq!(Cover::joined(unit.bundles().cloned()), unit.cover.clone());
                for entry in &unit.entries {
                    prop_assert!(unit.cover.rows(&layout.entries()[*entry].padded_range()).is_some());
                    let entry = (*entry, &layout.entries()[*entry]);
                    prop_assert_eq!(layout.unit_of(entry.0), Some(index));
                    prop_assert_eq!(layout.locate(&entry.1.range()), Some(index));
                    prop_assert_eq!(layout.find(&entry.1.name), Some(entry.0));
                    let dims = entry.1.dims();
                    prop_assert_eq!(dims.as_slice(), &entry.1.shape[..]);
                }
            }
        }

        #[test]
        fn pieces_of_all_ranks_are_the_layout_whatever_their_number(
            shapes in proptest::collection::vec(proptest::collection::vec(1usize..90, 1..3), 1..30),
            precise_below in 0usize..4000,
            (group, groups) in (1usize..6, 1usize..4),
            frozen_every in 1usize..6,
        ) {
            let ranks = group * groups;
            let build = |ranks| {
                let mut builder = LayoutBuilder::default();
                for (index, shape) in shapes.iter().enumerate() {
                    builder.add_as((role(index, frozen_every), None), Layer::Block(index / 4), format!("t{index}"), shape);
                }
                builder.for_ranks(ranks).build_precise(|_, elements| elements < precise_below)
            };
            let (whole, layout) = (build(None), build(Some(ranks)).in_shard_groups(group));
            let all: usize = Rank::all(ranks).map(|rank| layout.own(rank).elements()).sum();
            prop_assert_eq!(all, layout.elements());
            let trained: usize = Rank::all(ranks).map(|rank| layout.own_trained(rank).elements()).sum();
            prop_assert_eq!(trained, layout.trained().elements());
            for bundle in layout.bundles() {
                let pieces: Vec<usize> = Rank::all(ranks).map(|rank| layout.piece(&bundle, rank).elements()).collect();
                prop_assert!(pieces.iter().all(|piece| *piece == pieces[0] && piece % GRAIN_ELEMENTS == 0));
                prop_assert_eq!(pieces.iter().sum::<usize>(), bundle.elements());
                let is_of_vectors = !bundle.within(&layout.vectors()).ranges().is_empty();
                for rank in Rank::all(ranks).filter(|_| !is_of_vectors) {
                    let shards = layout.ranks_of_shard_group(rank).map(|rank| layout.shard(&bundle, rank));
                    prop_assert_eq!(Cover::joined(shards), bundle.clone());
                    let pieces = layout.ranks_of_shard(rank).map(|rank| layout.piece(&bundle, rank));
                    prop_assert_eq!(Cover::joined(pieces), layout.shard(&bundle, rank));
                }
            }
            for (entry, other) in layout.entries().iter().zip(whole.entries()) {
                let both_ends = [(entry.range().start, other.range().start), (entry.padded_range().end - 1, other.padded_range().end - 1)];
                let untailed = both_ends.iter().all(|(own, other)| layout.untailed(*own) == *other);
                prop_assert!(untailed);
            }
            let counted = |layout: &Layout| layout.grained().iter().map(|(range, first)| (range.len(), *first)).collect::<Vec<_>>();
            prop_assert_eq!(counted(&build(Some(1))), counted(&layout));
        }
    }
}
