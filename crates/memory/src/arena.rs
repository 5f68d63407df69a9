//! Contiguous buffers that share one layout.

use crate::{Buffer, Category, Cover, DType, Dims, In, Layer, Memory, Out, OutOfMemory, Space};
use std::ops::Range;
use std::rc::Rc;

/// Every entry of a layout is padded to a multiple of this many elements, so that block-wise quantised states
/// restart at each tensor.
pub const PARAMETER_PADDING: usize = 256;

/// Every entry starts at a multiple of this many bytes, whatever the dtype: the padding guarantees it.
pub const PARAMETER_ALIGNMENT_BYTES: usize = PARAMETER_PADDING;

/// Elements of a grain: the pieces of gradients whose squares are added up on their own, so that the norm has the same bits
/// wherever gradients live and in whatever pieces they come. Grains begin anew with every unit and with the vectors.
pub const GRAIN_ELEMENTS: usize = 4096;

/// One tensor of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name; Hugging Face's for parameters.
    pub name: String,
    /// First element.
    pub offset: usize,
    /// Shape, of one or two dimensions.
    pub shape: Vec<usize>,
}

impl Entry {
    /// Number of elements, without padding.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The shape, as views have it.
    pub fn dims(&self) -> Dims {
        Dims::try_from(self.shape.as_slice()).expect("a parameter has one or two dimensions")
    }

    /// The elements within the arena, without padding.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements()
    }

    /// The elements within the arena, with the padding behind them.
    pub fn padded_range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements().next_multiple_of(PARAMETER_PADDING)
    }
}

/// The matrices of one part of the model, by what reads them first: what is fetched, released and sent as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The part.
    pub part: Layer,
    /// Its matrices, by their index in the layout.
    pub entries: Vec<usize>,
    /// The elements that they take, padding included: one range, or two where some of them must stay precise.
    pub cover: Cover,
}

/// Where each tensor lies in every arena that shares the layout: matrices first, in forward order, then vectors, so
/// that weight decay by kind is two ranges. Tensors that must stay precise (see [`LayoutBuilder::build_precise`])
/// stand at both ends, so that the others, which may be quantised, are one range too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    entries: Vec<Entry>,
    units: Vec<Unit>,
    /// The unit of each entry.
    unit_of: Vec<Option<usize>>,
    matrix_elements: usize,
    quantisable: Range<usize>,
    elements: usize,
}

/// Collects tensors in forward order.
#[derive(Default)]
pub struct LayoutBuilder {
    tensors: Vec<(Layer, String, Vec<usize>)>,
}

impl LayoutBuilder {
    /// Adds a tensor of a part of the model.
    pub fn add(&mut self, part: Layer, name: impl Into<String>, shape: &[usize]) {
        self.tensors.push((part, name.into(), shape.to_vec()));
    }

    /// Places matrices, then vectors, each in the order added.
    pub fn build(self) -> Layout {
        self.build_precise(|_, _| false)
    }

    /// Places precise matrices, other matrices, other vectors, precise vectors, each in the order added.
    /// `is_precise(name, elements)` says which tensors must never be quantised. Entries are numbered as
    /// [`LayoutBuilder::build`] numbers them, wherever they lie.
    pub fn build_precise(self, is_precise: impl Fn(&str, usize) -> bool) -> Layout {
        let (matrices, vectors): (Vec<_>, Vec<_>) = self
            .tensors
            .into_iter()
            .partition(|(_, _, shape)| shape.len() > 1);
        let matrix_count = matrices.len();
        let parts: Vec<Layer> = matrices.iter().map(|(part, ..)| *part).collect();
        let mut entries: Vec<Entry> = matrices
            .into_iter()
            .chain(vectors)
            .map(|(_, name, shape)| Entry {
                name,
                offset: 0,
                shape,
            })
            .collect();
        let precise: Vec<bool> = entries
            .iter()
            .map(|entry| is_precise(&entry.name, entry.elements()))
            .collect();
        let mut ends = [0; 4];
        let mut offset = 0;
        for (group, end) in ends.iter_mut().enumerate() {
            let (of_matrices, of_precise) = (group < 2, group == 0 || group == 3);
            for (index, entry) in entries.iter_mut().enumerate() {
                if (index < matrix_count) == of_matrices && precise[index] == of_precise {
                    entry.offset = offset;
                    offset = entry.padded_range().end;
                }
            }
            *end = offset;
        }
        let units = units(&parts, &entries);
        let mut unit_of = vec![None; entries.len()];
        for (index, unit) in units.iter().enumerate() {
            unit.entries
                .iter()
                .for_each(|entry| unit_of[*entry] = Some(index));
        }
        Layout {
            units,
            unit_of,
            entries,
            matrix_elements: ends[1],
            quantisable: ends[0]..ends[2],
            elements: ends[3],
        }
    }
}

/// Units in the order in which their parts first appear.
fn units(parts: &[Layer], entries: &[Entry]) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        match units.iter_mut().find(|unit| unit.part == *part) {
            Some(unit) => unit.entries.push(index),
            None => units.push(Unit {
                part: *part,
                entries: vec![index],
                cover: Cover::new([]),
            }),
        }
    }
    for unit in &mut units {
        let matrices = unit
            .entries
            .iter()
            .map(|index| entries[*index].padded_range());
        unit.cover = Cover::new(matrices);
    }
    units
}

impl Layout {
    /// The matrices by the parts of the model that read them first, in forward order; vectors belong to no unit.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The unit that a matrix belongs to, by its index among [`Layout::units`]; none for vectors.
    pub fn unit_of(&self, entry: usize) -> Option<usize> {
        self.unit_of[entry]
    }

    /// The ranges that grains ([`GRAIN_ELEMENTS`]) are counted from, each with its first grain: those of one unit after the
    /// other, then the vectors.
    pub fn grained(&self) -> Vec<(Range<usize>, usize)> {
        let units = self.units.iter().flat_map(|unit| unit.cover.ranges());
        let ranges = units.cloned().chain([self.vectors()]);
        let mut first = 0;
        let count = |range: Range<usize>| {
            let own = first;
            first += range.len().div_ceil(GRAIN_ELEMENTS);
            (range, own)
        };
        ranges.map(count).collect()
    }

    /// All tensors: matrices, then vectors, each in the order added.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The index of a tensor.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.name == name)
    }

    /// Elements of an arena, padding included.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Elements without padding: the number of parameters.
    pub fn parameters(&self) -> usize {
        self.entries.iter().map(Entry::elements).sum()
    }

    /// The range of all matrices, padding included.
    pub fn matrices(&self) -> Range<usize> {
        0..self.matrix_elements
    }

    /// The range of all vectors, padding included.
    pub fn vectors(&self) -> Range<usize> {
        self.matrix_elements..self.elements
    }

    /// The range of all tensors that may be quantised, padding included: all, unless some must stay precise.
    pub fn quantisable(&self) -> Range<usize> {
        self.quantisable.clone()
    }

    /// The padding behind each tensor, as ranges.
    pub fn padding(&self) -> impl Iterator<Item = Range<usize>> {
        self.entries
            .iter()
            .map(|entry| entry.range().end..entry.padded_range().end)
    }
}

/// One buffer that holds the tensors of a layout, or those within one range of it.
pub struct Arena {
    buffer: Buffer,
    layout: Rc<Layout>,
    held: Range<usize>,
}

impl Arena {
    /// Leases an arena that lives across steps; zeroed, padding included.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it does not fit.
    pub fn lease(
        memory: &Memory,
        category: Category,
        name: &'static str,
        layout: &Rc<Layout>,
        dtype: DType,
    ) -> Result<Arena, OutOfMemory> {
        let (space, all) = (Space::Device, 0..layout.elements());
        Arena::lease_part(memory, space, category, name, layout, dtype, all)
    }

    /// Leases an arena of the tensors within a range, on the device or in pinned host memory; else as [`Arena::lease`].
    ///
    /// # Errors
    /// As [`Arena::lease`].
    pub fn lease_part(
        memory: &Memory,
        space: Space,
        category: Category,
        name: &'static str,
        layout: &Rc<Layout>,
        dtype: DType,
        held: Range<usize>,
    ) -> Result<Arena, OutOfMemory> {
        let dims = [held.len()];
        Ok(Arena {
            buffer: match space {
                Space::Device => memory.lease_persistent(category, name, dims, dtype)?,
                Space::Host => memory.lease_pinned(category, name, dims, dtype)?,
            },
            layout: layout.clone(),
            held,
        })
    }

    /// The elements of the layout that are held.
    pub fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    /// Where each tensor lies.
    pub fn layout(&self) -> &Rc<Layout> {
        &self.layout
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.buffer.dtype()
    }

    /// Leased bytes.
    pub fn bytes(&self) -> u64 {
        self.buffer.bytes()
    }

    /// Reads a tensor.
    pub fn view(&self, index: usize) -> In<'_> {
        let entry = &self.layout.entries[index];
        self.flat(entry.range()).reshape(entry.dims())
    }

    /// Writes a tensor.
    pub fn view_mut(&mut self, index: usize) -> Out<'_> {
        let dims = self.layout.entries[index].dims();
        let range = self.layout.entries[index].range();
        self.flat_mut(range).reshape(dims)
    }

    /// Writes several tensors, in the order in which they lie.
    pub fn all_mut<const N: usize>(&mut self, indices: [usize; N]) -> [Out<'_>; N] {
        let entries = indices.map(|index| {
            (
                self.layout.entries[index].range(),
                self.layout.entries[index].dims(),
            )
        });
        let (mut rest, mut first) = (Some(self.buffer.view_mut()), self.held.start);
        entries.map(|(range, dims)| {
            let all = rest.take().expect("the rest is put back");
            let (before, after) = all.split_at(range.end - first);
            let view = before.rows(range.start - first..range.end - first);
            (rest, first) = (Some(after), range.end);
            view.reshape(dims)
        })
    }

    /// Reads a range of the layout's elements.
    pub fn flat(&self, range: Range<usize>) -> In<'_> {
        self.buffer.view().rows(self.rows(range))
    }

    /// Writes a range of the layout's elements.
    pub fn flat_mut(&mut self, range: Range<usize>) -> Out<'_> {
        let rows = self.rows(range);
        self.buffer.view_mut().rows(rows)
    }

    fn rows(&self, range: Range<usize>) -> Range<usize> {
        let Range { start, end } = self.held;
        assert!(
            start <= range.start && range.end <= end,
            "{range:?} is held"
        );
        range.start - start..range.end - start
    }

    /// Whether all padding is zero, as it must always be. Reads host memory.
    pub fn padding_is_zero(&self) -> bool {
        let bytes = self.dtype().size_in_bytes();
        self.buffer.view().check_host();
        let held =
            |range: &Range<usize>| self.held.start <= range.start && range.end <= self.held.end;
        self.layout.padding().filter(held).all(|range| {
            let padding = self.flat(range.clone());
            // SAFETY: `padding` covers that many contiguous elements of host memory.
            let raw = unsafe { std::slice::from_raw_parts(padding.pointer(), range.len() * bytes) };
            raw.iter().all(|byte| *byte == 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    #[test]
    fn padding_is_watched() {
        let memory = Memory::host();
        let mut builder = LayoutBuilder::default();
        builder.add(Layer::Embedding, "embed", &[10, 3]);
        let mut arena = Arena::lease(
            &memory,
            Category::Parameter,
            "x",
            &Rc::new(builder.build()),
            DType::F32,
        )
        .unwrap();
        arena.view_mut(0).slice_mut::<f32>().fill(1.0);
        assert!(arena.padding_is_zero());
        arena.flat_mut(30..31).slice_mut::<f32>()[0] = 1.0;
        assert!(!arena.padding_is_zero());
    }

    proptest! {
        #[test]
        fn tensors_are_aligned_disjoint_and_of_one_unit(
            shapes in proptest::collection::vec(proptest::collection::vec(1usize..40, 1..3), 1..30),
            precise_below in 0usize..400,
        ) {
            let mut builder = LayoutBuilder::default();
            for (index, shape) in shapes.iter().enumerate() {
                builder.add(Layer::Block(index / 4), format!("t{index}"), shape);
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
                prop_assert_eq!(layout.quantisable().contains(&entry.offset), !precise);
            }
            prop_assert!(end <= layout.elements());
            let padding: usize = layout.padding().map(|range| range.len()).sum();
            prop_assert_eq!(padding + layout.parameters(), layout.elements());
            let grained = layout.grained();
            prop_assert_eq!(grained.iter().map(|(range, _)| range.len()).sum::<usize>(), layout.elements());
            for (unit, index) in layout.units().iter().zip(0..) {
                prop_assert!(unit.cover.ranges().len() <= 2);
                for entry in &unit.entries {
                    prop_assert!(unit.cover.rows(&layout.entries()[*entry].padded_range()).is_some());
                    prop_assert_eq!(layout.unit_of(*entry), Some(index));
                }
            }
        }
    }
}
