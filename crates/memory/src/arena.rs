//! Contiguous buffers that share one layout.

use crate::{Buffer, Category, Cover, DType, In, Layout, Memory, Out, OutOfMemory, Space};
use std::ops::Range;
use std::rc::Rc;

/// One buffer that holds the elements of a layout, or some of them.
pub struct Arena {
    buffer: Buffer,
    layout: Rc<Layout>,
    held: Cover,
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
        let (space, all) = (Space::Device, layout.all());
        Arena::lease_part(memory, space, category, name, layout, dtype, all)
    }

    /// Leases an arena of some elements, on the device or in pinned host memory; else as [`Arena::lease`].
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
        held: Cover,
    ) -> Result<Arena, OutOfMemory> {
        let dims = [held.elements()];
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
    pub fn held(&self) -> &Cover {
        &self.held
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
        let entry = &self.layout.entries()[index];
        self.flat(entry.range()).reshape(entry.dims())
    }

    /// Writes a tensor.
    pub fn view_mut(&mut self, index: usize) -> Out<'_> {
        let dims = self.layout.entries()[index].dims();
        let range = self.layout.entries()[index].range();
        self.flat_mut(range).reshape(dims)
    }

    /// Writes several ranges of the layout's elements, in the order in which they lie.
    pub fn disjoint_mut(&mut self, ranges: &[Range<usize>]) -> Vec<Out<'_>> {
        let rows: Vec<Range<usize>> = ranges
            .iter()
            .map(|range| self.rows(range.clone()))
            .collect();
        self.buffer.view_mut().disjoint_rows(&rows)
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
        let rows = self.held.rows(&range);
        rows.unwrap_or_else(|| panic!("{range:?} is held"))
    }

    /// Whether all padding is zero, as it must always be. Reads host memory.
    pub fn padding_is_zero(&self) -> bool {
        let bytes = self.dtype().size_in_bytes();
        self.buffer.view().check_host();
        let padding = Cover::new(self.layout.padding()).within_all(&self.held);
        padding.ranges().iter().all(|range| {
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
    use crate::{Layer, LayoutBuilder};

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
}
