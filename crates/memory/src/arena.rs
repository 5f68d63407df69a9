//! Contiguous buffers that share one layout.

use crate::types::StoredRange;
use crate::{Buffer, Category, Cover, DType, In, Layout, Memory, Out, OutOfMemory, Types};
use std::ops::Range;
use std::rc::Rc;

/// One buffer that holds all elements of a layout, or some, each in its type.
pub struct Arena {
    /// Leased as bytes (u8).
    buffer: Buffer,
    layout: Rc<Layout>,
    held: Cover,
    types: Types,
    /// How they are stored, and where each run begins in the buffer.
    runs: Vec<(StoredRange, usize)>,
}

/// How an arena is leased: its place and lifetime, and its category and name in reports.
#[derive(Clone, Copy, Debug)]
pub struct ArenaLease {
    /// Where, and for how long.
    pub place: ArenaPlace,
    /// Its category in reports.
    pub category: Category,
    /// Its name in reports.
    pub name: &'static str,
}

impl ArenaLease {
    /// A lease of a place, under a category and a name.
    pub const fn new(place: ArenaPlace, category: Category, name: &'static str) -> ArenaLease {
        ArenaLease {
            place,
            category,
            name,
        }
    }
}

/// Where an arena lives, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArenaPlace {
    /// On the device, across steps; zeroed, padding included.
    Device,
    /// In pinned host memory, across steps; zeroed, padding included.
    Host,
    /// On the device, within a step. Its contents are unspecified.
    Step,
}

impl Arena {
    /// Leases an arena of some elements of a layout.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it does not fit.
    pub fn lease(
        memory: &Memory,
        lease: ArenaLease,
        layout: &Rc<Layout>,
        types: impl Into<Types>,
        held: Cover,
    ) -> Result<Arena, OutOfMemory> {
        let types = types.into();
        let mut bytes = 0;
        let run = |run: StoredRange| {
            let first_byte = bytes;
            bytes += run.bytes();
            (run, first_byte)
        };
        let runs = types.stored(&held).into_iter().map(run).collect();
        let ArenaLease {
            place,
            category,
            name,
        } = lease;
        Ok(Arena {
            buffer: match place {
                ArenaPlace::Device => {
                    memory.lease_persistent(category, name, [bytes], DType::U8)?
                }
                ArenaPlace::Host => memory.lease_pinned(category, name, [bytes], DType::U8)?,
                ArenaPlace::Step => memory.lease(category, name, [bytes], DType::U8)?,
            },
            layout: layout.clone(),
            held,
            types,
            runs,
        })
    }

    /// The elements of the layout that this arena holds.
    pub fn held(&self) -> &Cover {
        &self.held
    }

    /// The layout, which says where each tensor lies.
    pub fn layout(&self) -> &Rc<Layout> {
        &self.layout
    }

    /// The types of the layout's elements.
    pub fn types(&self) -> &Types {
        &self.types
    }

    /// Leased bytes.
    pub fn bytes(&self) -> u64 {
        self.buffer.bytes()
    }

    /// Reads a tensor that is not stored as codes.
    pub fn view(&self, index: usize) -> In<'_> {
        let entry = &self.layout.entries()[index];
        self.flat(entry.range()).reshape(entry.dims())
    }

    /// Writes a tensor that is not stored as codes.
    pub fn view_mut(&mut self, index: usize) -> Out<'_> {
        let dims = self.layout.entries()[index].dims();
        let range = self.layout.entries()[index].range();
        self.flat_mut(range).reshape(dims)
    }

    /// Views to write several ranges of the layout's elements, given in ascending order. Each range has one type.
    pub fn disjoint_mut(&mut self, ranges: &[Range<usize>]) -> Vec<Out<'_>> {
        let typed = ranges.iter().map(|range| self.place(range));
        let (places, types): (Vec<_>, Vec<_>) = typed.unzip();
        let views = self.buffer.view_mut().disjoint_rows(&places).into_iter();
        views
            .zip(types)
            .map(|(view, dtype)| view.cast(dtype))
            .collect()
    }

    /// Views a range of the layout's elements for reading. All of them have one type.
    pub fn flat(&self, range: Range<usize>) -> In<'_> {
        let (bytes, dtype) = self.place(&range);
        self.buffer.view().rows(bytes).cast(dtype)
    }

    /// Views a range of the layout's elements for writing. All of them have one type.
    pub fn flat_mut(&mut self, range: Range<usize>) -> Out<'_> {
        let (bytes, dtype) = self.place(&range);
        self.buffer.view_mut().rows(bytes).cast(dtype)
    }

    /// Views the bytes (u8) of a range of the layout's elements for reading. The range may mix types, and have codes.
    pub fn raw(&self, range: &Range<usize>) -> In<'_> {
        self.buffer.view().rows(self.raw_place(range))
    }

    /// Views the bytes (u8) of a range of the layout's elements for writing. The range may mix types.
    pub fn raw_mut(&mut self, range: &Range<usize>) -> Out<'_> {
        let bytes = self.raw_place(range);
        self.buffer.view_mut().rows(bytes)
    }

    /// Views to write the bytes (u8) of several ranges, given in ascending order.
    pub fn disjoint_raw_mut(&mut self, ranges: &[Range<usize>]) -> Vec<Out<'_>> {
        let places = ranges.iter().map(|range| self.raw_place(range));
        let places: Vec<Range<usize>> = places.collect();
        self.buffer.view_mut().disjoint_rows(&places)
    }

    /// Where a range of one type lies in the buffer, in bytes, and its type.
    fn place(&self, range: &Range<usize>) -> (Range<usize>, DType) {
        let run = self.run_of(range.start);
        let run = run.filter(|(run, _)| range.end <= run.elements.end);
        let place = run.and_then(|(run, first)| {
            let bytes = first + run.byte(range.start)..first + run.byte(range.end);
            Some((bytes, run.dtype()?))
        });
        place.unwrap_or_else(|| panic!("{range:?} must be held, and be numbers of one type"))
    }

    fn raw_place(&self, range: &Range<usize>) -> Range<usize> {
        let lies_in_one_piece = self.held.rows(range).is_some();
        assert!(lies_in_one_piece, "{range:?} must be held without a gap");
        let run = |element| self.run_of(element).expect("it is held");
        let ((run, first), (last, last_first)) = (run(range.start), run(range.end - 1));
        first + run.byte(range.start)..last_first + last.byte(range.end)
    }

    /// The run that an element belongs to, and where it begins in the buffer.
    fn run_of(&self, element: usize) -> Option<(&StoredRange, usize)> {
        let runs = &self.runs;
        let (run, first) =
            runs.get(runs.partition_point(|(run, _)| run.elements.end <= element))?;
        (run.elements.start <= element).then_some((run, *first))
    }

    /// Whether all padding is zero, as it must always be. Matrices of codes are not checked. Reads host memory.
    pub fn padding_is_zero(&self) -> bool {
        self.buffer.view().check_host();
        let plain = self.held.without(&self.layout.coded());
        let padding = Cover::new(self.layout.padding()).within_all(&plain);
        padding.ranges().iter().all(|range| {
            let padding = self.raw(range).slice::<u8>();
            padding.iter().all(|byte| *byte == 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layer, LayoutBuilder, Role};

    const LEASE: ArenaLease = ArenaLease::new(ArenaPlace::Device, Category::Parameter, "x");

    #[test]
    fn tensors_are_stored_in_types_of_their_own() {
        let memory = Memory::host();
        let mut builder = LayoutBuilder::default();
        let types = [
            ("embed", None),
            ("gate", Some(DType::F32)),
            ("codes", Some(DType::U8)),
        ];
        for (name, dtype) in types {
            builder.add_as((Role::Trained, dtype), Layer::Whole, name, &[2, 128]);
        }
        let layout = Rc::new(builder.build());
        let types = layout.types(DType::BF16);
        let mut arena = Arena::lease(&memory, LEASE, &layout, types, layout.all()).unwrap();
        assert_eq!(arena.bytes(), 256 * (2 + 4 + 1));
        let dtypes = [0, 1, 2].map(|index| arena.view(index).dtype());
        assert_eq!(dtypes, [DType::BF16, DType::F32, DType::U8]);
        arena.view_mut(1).slice_mut::<f32>()[0] = 1.0;
        let raw = arena.raw(&(255..258)).slice::<u8>();
        assert_eq!(raw, [0, 0, 0, 0, 0x80, 0x3f, 0, 0, 0, 0]);
        let some = Cover::new(std::iter::once(256..512));
        let part = Arena::lease(&memory, LEASE, &layout, layout.types(DType::BF16), some);
        assert_eq!(part.unwrap().bytes(), 256 * 4);
        assert_eq!(layout.joined(&[0, 1]), None, "of two types");
    }

    #[test]
    fn padding_is_watched() {
        let memory = Memory::host();
        let mut builder = LayoutBuilder::default();
        builder.add(Layer::Embedding, "embed", &[10, 3]);
        let layout = Rc::new(builder.build());
        let all = layout.all();
        let mut arena = Arena::lease(&memory, LEASE, &layout, DType::F32, all).unwrap();
        arena.view_mut(0).slice_mut::<f32>().fill(1.0);
        assert!(arena.padding_is_zero());
        arena.flat_mut(30..31).slice_mut::<f32>()[0] = 1.0;
        assert!(!arena.padding_is_zero());
    }
}
