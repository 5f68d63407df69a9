//! Where each tensor of a layout is placed, and how bundles are padded for ranks.

use crate::{Entry, GRAIN_ELEMENTS, Layer, Role};
use std::collections::HashMap;
use std::ops::Range;

/// Tensors that lie together. Sections are listed in the order of the layout.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    FrozenMatrices,
    PreciseMatrices,
    Matrices,
    Vectors,
    PreciseVectors,
    FrozenVectors,
    Buffers,
}

impl Section {
    const ALL: [Section; 7] = [
        Section::FrozenMatrices,
        Section::PreciseMatrices,
        Section::Matrices,
        Section::Vectors,
        Section::PreciseVectors,
        Section::FrozenVectors,
        Section::Buffers,
    ];

    fn of(entry: &Entry, is_precise: bool) -> Section {
        match (entry.is_matrix(), entry.role, is_precise) {
            (true, Role::Frozen, _) => Section::FrozenMatrices,
            (true, Role::Trained, true) => Section::PreciseMatrices,
            (true, Role::Trained, false) => Section::Matrices,
            (false, Role::Trained, false) => Section::Vectors,
            (false, Role::Trained, true) => Section::PreciseVectors,
            (false, Role::Frozen, _) => Section::FrozenVectors,
            (_, Role::Buffer, _) => Section::Buffers,
        }
    }
}

/// Where sections lie, and the padding between them.
pub(crate) struct Placed {
    /// Elements of all matrices.
    pub(crate) matrices: usize,
    pub(crate) trained: Range<usize>,
    pub(crate) quantisable: Range<usize>,
    /// Elements of everything but buffers.
    pub(crate) weights: usize,
    pub(crate) elements: usize,
    /// The padding of each part's matrices, or of the vectors ([`Layer::Whole`]), in order.
    pub(crate) tails: Vec<(Layer, Range<usize>)>,
}

/// Gives every entry its offset. `parts` has the part of each matrix; matrices are the first entries.
pub(crate) fn place(
    entries: &mut [Entry],
    parts: &[Layer],
    precise: &[bool],
    ranks: Option<usize>,
) -> Placed {
    let sections: Vec<Section> = entries
        .iter()
        .zip(precise)
        .map(|(entry, precise)| Section::of(entry, *precise))
        .collect();
    let mut placing = Placing::new(parts, &sections, entries, ranks);
    let ends = Section::ALL.map(|section| {
        let all = 0..entries.len();
        let members: Vec<usize> = all.filter(|index| sections[*index] == section).collect();
        placing.place(entries, section, &members);
        placing.next
    });
    let [
        frozen_matrices,
        precise_matrices,
        matrices,
        vectors,
        trained,
        weights,
        elements,
    ] = ends;
    Placed {
        matrices,
        trained: frozen_matrices..trained,
        quantisable: precise_matrices..vectors,
        weights,
        elements,
        tails: placing.tails,
    }
}

/// The state of placing tensors into a layout.
struct Placing<'a> {
    /// The part of each matrix.
    parts: &'a [Layer],
    ranks: Option<usize>,
    /// The first free element.
    next: usize,
    /// Where the section before the trained vectors ended.
    matrices_end: usize,
    /// Trained elements of each part: in precise matrices, and in others.
    placed: HashMap<Layer, [usize; 2]>,
    tails: Vec<(Layer, Range<usize>)>,
}

impl<'a> Placing<'a> {
    fn new(
        parts: &'a [Layer],
        sections: &[Section],
        entries: &[Entry],
        ranks: Option<usize>,
    ) -> Placing<'a> {
        let mut placed: HashMap<Layer, [usize; 2]> = HashMap::new();
        for ((part, section), entry) in parts.iter().zip(sections).zip(entries) {
            let of_part = placed.entry(*part).or_default();
            match section {
                Section::PreciseMatrices => of_part[0] += entry.padded_range().len(),
                Section::Matrices => of_part[1] += entry.padded_range().len(),
                _ => {}
            }
        }
        Placing {
            parts,
            ranks,
            next: 0,
            matrices_end: 0,
            placed,
            tails: Vec::new(),
        }
    }

    /// Places a section, and pads the bundles that end in it.
    fn place(&mut self, entries: &mut [Entry], section: Section, members: &[usize]) {
        let start = self.next;
        let part = |index: &usize| self.parts.get(*index).copied();
        let runs: Vec<(Option<Layer>, &[usize])> = members
            .chunk_by(|one, next| part(one) == part(next))
            .map(|run| (part(&run[0]), run))
            .collect();
        for (part, run) in runs {
            let start = self.next;
            for index in run {
                entries[*index].offset = self.next;
                self.next = entries[*index].padded_range().end;
            }
            if let Some(part) = part {
                self.end_matrices(part, section, self.next - start);
            }
        }
        match section {
            Section::Matrices => self.matrices_end = self.next,
            Section::PreciseVectors => self.pad(Layer::Whole, self.next - self.matrices_end),
            Section::FrozenVectors => self.pad(Layer::Whole, self.next - start),
            _ => {}
        }
    }

    /// Pads the end of a part's matrices. Precise ones are padded to whole grains if the part has other trained
    /// matrices in a later section.
    fn end_matrices(&mut self, part: Layer, section: Section, elements: usize) {
        let [precise, others] = self.placed[&part];
        let whole_grains = precise.next_multiple_of(GRAIN_ELEMENTS);
        match (section, others > 0) {
            (Section::PreciseMatrices, true) if self.ranks.is_some() => {
                self.add_tail(part, whole_grains - precise);
            }
            (Section::PreciseMatrices, true) => {}
            (Section::Matrices, _) => self.pad(part, whole_grains + others),
            _ => self.pad(part, elements),
        }
    }

    /// Pads a bundle of `elements` so that every rank gets the same number of grains.
    fn pad(&mut self, part: Layer, elements: usize) {
        if let Some(ranks) = self.ranks {
            let tail = elements.next_multiple_of(ranks * GRAIN_ELEMENTS) - elements;
            self.add_tail(part, tail);
        }
    }

    fn add_tail(&mut self, part: Layer, elements: usize) {
        if elements > 0 {
            self.tails.push((part, self.next..self.next + elements));
            self.next += elements;
        }
    }
}
