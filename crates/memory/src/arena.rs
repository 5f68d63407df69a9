//! Contiguous buffers that share one layout.

use crate::{Buffer, Category, DType, Dims, In, Memory, Out, OutOfMemory};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::rc::Rc;

/// Every entry of a layout is padded to a multiple of this many elements, so that block-wise quantised states
/// restart at each tensor.
pub const PARAMETER_PADDING: usize = 256;

/// Every entry starts at a multiple of this many bytes, whatever the dtype: the padding guarantees it.
pub const PARAMETER_ALIGNMENT_BYTES: usize = PARAMETER_PADDING;

/// One tensor of a layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

    /// The elements within the arena, without padding.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements()
    }

    /// The elements within the arena, with the padding behind them.
    pub fn padded_range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements().next_multiple_of(PARAMETER_PADDING)
    }
}

/// Where each tensor lies in every arena that shares the layout: matrices first, in forward order, then vectors, so
/// that weight decay by kind is two ranges. Tensors that must stay precise (see [`LayoutBuilder::build_precise`])
/// stand at both ends, so that the others, which may be quantised, are one range too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    entries: Vec<Entry>,
    matrix_elements: usize,
    quantisable: Range<usize>,
    elements: usize,
}

/// Collects tensors in forward order.
#[derive(Default)]
pub struct LayoutBuilder {
    tensors: Vec<(String, Vec<usize>)>,
}

impl LayoutBuilder {
    /// Adds a tensor.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.tensors.push((name.into(), shape.to_vec()));
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
            .partition(|(_, shape)| shape.len() > 1);
        let matrix_count = matrices.len();
        let mut entries: Vec<Entry> = matrices
            .into_iter()
            .chain(vectors)
            .map(|(name, shape)| Entry {
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
        Layout {
            entries,
            matrix_elements: ends[1],
            quantisable: ends[0]..ends[2],
            elements: ends[3],
        }
    }
}

impl Layout {
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

/// One buffer that holds every tensor of a layout.
pub struct Arena {
    buffer: Buffer,
    layout: Rc<Layout>,
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
        let buffer = memory.lease_persistent(category, name, [layout.elements()], dtype)?;
        Ok(Arena {
            buffer,
            layout: layout.clone(),
        })
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
        self.flat(entry.range()).reshape(shape(entry))
    }

    /// Writes a tensor.
    pub fn view_mut(&mut self, index: usize) -> Out<'_> {
        let dims = shape(&self.layout.entries[index]);
        let range = self.layout.entries[index].range();
        self.flat_mut(range).reshape(dims)
    }

    /// Writes several tensors, in the order in which they lie.
    pub fn all_mut<const N: usize>(&mut self, indices: [usize; N]) -> [Out<'_>; N] {
        let entries = indices.map(|index| {
            (
                self.layout.entries[index].range(),
                shape(&self.layout.entries[index]),
            )
        });
        let (mut rest, mut first) = (Some(self.flat_mut(0..self.layout.elements)), 0);
        entries.map(|(range, dims)| {
            let all = rest.take().expect("the rest is put back");
            let (before, after) = all.split_at(range.end - first);
            let view = before.rows(range.start - first..range.end - first);
            (rest, first) = (Some(after), range.end);
            view.reshape(dims)
        })
    }

    /// Reads a range of elements.
    pub fn flat(&self, range: Range<usize>) -> In<'_> {
        self.buffer.view().rows(range)
    }

    /// Writes a range of elements.
    pub fn flat_mut(&mut self, range: Range<usize>) -> Out<'_> {
        self.buffer.view_mut().rows(range)
    }

    /// Whether all padding is zero, as it must always be. Reads host memory.
    pub fn padding_is_zero(&self) -> bool {
        let bytes = self.dtype().size_in_bytes();
        let all = self.buffer.view();
        all.check_host();
        self.layout.padding().all(|range| {
            let padding = all.rows(range.clone());
            // SAFETY: `padding` covers that many contiguous elements of host memory.
            let raw = unsafe { std::slice::from_raw_parts(padding.pointer(), range.len() * bytes) };
            raw.iter().all(|byte| *byte == 0)
        })
    }
}

fn shape(entry: &Entry) -> Dims {
    Dims::try_from(entry.shape.as_slice()).expect("a parameter has one or two dimensions")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn matrices_come_first_and_everything_is_padded() {
        let mut builder = LayoutBuilder::default();
        builder.add("embed", &[10, 3]);
        builder.add("norm", &[3]);
        builder.add("q", &[30, 10]);
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
            builder.add(name, shape);
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
        builder.add("embed", &[10, 3]);
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
        fn tensors_are_aligned_disjoint_and_survive_serialisation(
            shapes in proptest::collection::vec(proptest::collection::vec(1usize..40, 1..3), 1..30),
            precise_below in 0usize..400,
        ) {
            let mut builder = LayoutBuilder::default();
            for (index, shape) in shapes.iter().enumerate() {
                builder.add(format!("t{index}"), shape);
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
            let copy: Layout = serde_json::from_str(&serde_json::to_string(&layout).unwrap()).unwrap();
            prop_assert_eq!(copy, layout);
        }
    }
}
