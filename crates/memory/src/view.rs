//! Strided views of leased tensors: what kernels read and write.

use crate::{DType, Dims, Element};
use std::marker::PhantomData;
use std::ops::Range;

/// Whether the processor can read through a view's pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The processor can: it is memory of this process.
    Host,
    /// Only the device's kernels and copies can.
    Device,
}

/// A strided view for reading.
#[derive(Clone, Copy)]
pub struct In<'a> {
    pointer: *const u8,
    reach: Reach,
    dtype: DType,
    dims: Dims,
    strides: Dims,
    lifetime: PhantomData<&'a [u8]>,
}

/// A strided view for writing.
pub struct Out<'a> {
    pointer: *mut u8,
    reach: Reach,
    dtype: DType,
    dims: Dims,
    strides: Dims,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view is a borrow of plain numbers. `In` is shared and never written through; `Out` is exclusive.
unsafe impl Send for In<'_> {}
// SAFETY: as above.
unsafe impl Sync for In<'_> {}
// SAFETY: as above.
unsafe impl Send for Out<'_> {}
// SAFETY: as above.
unsafe impl Sync for Out<'_> {}

macro_rules! geometry {
    ($pointer:ty) => {
        /// A row-major view.
        ///
        /// # Safety
        /// `pointer` must start `dims` elements of `dtype` within `reach` (or be null: a shape). During `'a`, nothing else writes
        /// them, and if the view is for writing, nothing else reads them.
        pub(crate) unsafe fn new(
            pointer: $pointer,
            reach: Reach,
            dtype: DType,
            dims: Dims,
        ) -> Self {
            Self {
                pointer,
                reach,
                dtype,
                dims,
                strides: dims.row_major_strides(),
                lifetime: PhantomData,
            }
        }

        /// A row-major view of device memory that another library owns.
        ///
        /// # Safety
        /// `pointer` starts `dims` elements of `dtype` in memory of the device. During `'a`, nothing else writes them, and if the
        /// view is for writing, nothing else reads them.
        pub unsafe fn of_device(pointer: $pointer, dtype: DType, dims: impl Into<Dims>) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self::new(pointer, Reach::Device, dtype, dims.into()) }
        }

        /// Address of the first element; null for a shape.
        pub fn pointer(&self) -> $pointer {
            self.pointer
        }

        /// Some rows of the first dimension.
        pub fn rows(self, rows: Range<usize>) -> Self {
            assert!(
                rows.start <= rows.end && rows.end <= self.dims[0],
                "rows {rows:?} of {:?}",
                self.dims
            );
            let pointer = self.pointer.wrapping_add(self.offset_of_row(rows.start));
            Self {
                pointer,
                dims: self.dims.with_first(rows.len()),
                ..self
            }
        }

        /// The same elements in another shape.
        pub fn reshape(self, dims: impl Into<Dims>) -> Self {
            let dims = dims.into();
            assert!(
                self.is_contiguous(),
                "only a contiguous view can be reshaped"
            );
            assert_eq!(
                dims.elements(),
                self.dims.elements(),
                "{:?} reshaped to {dims:?}",
                self.dims
            );
            Self {
                dims,
                strides: dims.row_major_strides(),
                ..self
            }
        }

        /// Element type.
        pub fn dtype(&self) -> DType {
            self.dtype
        }

        /// Shape, outermost dimension first.
        pub fn dims(&self) -> &[usize] {
            self.dims.as_slice()
        }

        /// Distance between neighbours in each dimension, in elements.
        pub fn strides(&self) -> &[usize] {
            self.strides.as_slice()
        }

        /// Number of elements.
        pub fn elements(&self) -> usize {
            self.dims.elements()
        }

        /// Bytes of all elements, without gaps between them in a strided view.
        pub fn bytes(&self) -> usize {
            self.elements() * self.dtype.size_in_bytes()
        }

        /// Whether the elements lie one after the other in row-major order.
        pub fn is_contiguous(&self) -> bool {
            self.strides == self.dims.row_major_strides()
        }

        /// The same memory as elements of another type, in one dimension.
        ///
        /// # Panics
        /// If the view is strided, or its bytes are not a whole number of aligned elements.
        pub fn cast(self, dtype: DType) -> Self {
            assert!(self.is_contiguous(), "only a contiguous view can be cast");
            let bytes = self.bytes();
            let size = dtype.size_in_bytes();
            assert!(
                bytes % size == 0 && (self.pointer as usize) % size == 0,
                "{bytes} bytes are not a whole number of aligned {dtype:?}"
            );
            let dims = Dims::from([bytes / size]);
            Self {
                dtype,
                dims,
                strides: dims.row_major_strides(),
                ..self
            }
        }

        /// Bytes from the first element to a row. 0 for a shape, whose pointer stays null.
        fn offset_of_row(&self, row: usize) -> usize {
            if self.pointer.is_null() {
                return 0;
            }
            row * self.strides[0] * self.dtype.size_in_bytes()
        }

        /// Some columns of a view of rows and columns. The distance between rows stays the same.
        ///
        /// # Panics
        /// If the view does not have two dimensions, or `columns` goes beyond them.
        pub fn columns(self, columns: Range<usize>) -> Self {
            let &[rows, all] = self.dims() else {
                panic!("{:?} must have two dimensions", self.dims);
            };
            assert!(
                columns.start <= columns.end && columns.end <= all,
                "columns {columns:?} of {:?}",
                self.dims
            );
            let offset = match self.pointer.is_null() {
                true => 0,
                false => columns.start * self.strides[1] * self.dtype.size_in_bytes(),
            };
            Self {
                pointer: self.pointer.wrapping_add(offset),
                dims: Dims::from([rows, columns.len()]),
                ..self
            }
        }

        /// Whether the view has two dimensions, each row is contiguous, and no two rows overlap.
        pub fn is_by_rows(&self) -> bool {
            match (self.dims(), self.strides()) {
                (&[rows, columns], &[row, column]) => {
                    (column == 1 || columns <= 1) && (row >= columns || rows <= 1)
                }
                _ => false,
            }
        }

        fn check_slice<T: Element>(&self) {
            assert_eq!(self.dtype, T::DTYPE, "the view holds {:?}", self.dtype);
            assert!(
                self.is_contiguous(),
                "a strided view is not a slice: {:?} by {:?}",
                self.dims,
                self.strides
            );
            self.check_host();
        }

        /// Panics if the processor cannot read through the pointer.
        pub(crate) fn check_host(&self) {
            assert!(!self.pointer.is_null(), "a shape has no data");
            assert_eq!(
                self.reach,
                Reach::Host,
                "the view is of device memory, which the processor cannot read: download it"
            );
        }
    };
}

impl<'a> In<'a> {
    /// A view of host data.
    pub fn of_slice<T: Element>(data: &'a [T], dims: impl Into<Dims>) -> In<'a> {
        let dims = dims.into();
        assert_eq!(data.len(), dims.elements(), "the slice fills the shape");
        // SAFETY: the slice is borrowed for 'a.
        unsafe { In::new(data.as_ptr().cast(), Reach::Host, T::DTYPE, dims) }
    }

    geometry!(*const u8);

    /// The view without its lifetime, for work that goes on after the call that enqueued it.
    ///
    /// # Safety
    /// What is viewed stays alive, and nothing writes it, for as long as the view is used.
    pub unsafe fn outliving(self) -> In<'static> {
        In {
            lifetime: PhantomData,
            ..self
        }
    }

    /// The last two dimensions exchanged.
    pub fn t(self) -> In<'a> {
        let rank = self.dims().len();
        assert!(
            rank >= 2,
            "a transpose needs two dimensions, not {:?}",
            self.dims
        );
        let (a, b) = (rank - 2, rank - 1);
        In {
            dims: self.dims.swap(a, b),
            strides: self.strides.swap(a, b),
            ..self
        }
    }

    /// The elements of a contiguous view in host memory.
    ///
    /// # Panics
    /// If the view holds another type, is strided, has no data, or is of device memory.
    pub fn slice<T: Element>(self) -> &'a [T] {
        self.check_slice::<T>();
        // SAFETY: in bounds by construction, aligned because leases are and views step by whole elements, and
        // nothing writes during 'a.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.elements()) }
    }
}

impl<'a> Out<'a> {
    /// A view of host data.
    pub fn of_slice<T: Element>(data: &'a mut [T], dims: impl Into<Dims>) -> Out<'a> {
        let dims = dims.into();
        assert_eq!(data.len(), dims.elements(), "the slice fills the shape");
        // SAFETY: the slice is borrowed exclusively for 'a.
        unsafe { Out::new(data.as_mut_ptr().cast(), Reach::Host, T::DTYPE, dims) }
    }

    geometry!(*mut u8);

    /// The view without its lifetime, for work that goes on after the call that enqueued it.
    ///
    /// # Safety
    /// What is viewed stays alive, and nothing else touches it, for as long as the view is used.
    pub unsafe fn outliving(self) -> Out<'static> {
        Out {
            lifetime: PhantomData,
            ..self
        }
    }

    /// A shorter borrow of the same view.
    pub fn reborrow(&mut self) -> Out<'_> {
        Out {
            lifetime: PhantomData,
            ..*self
        }
    }

    /// The same view for reading. It cannot be written through while that view is used.
    pub fn as_in(&self) -> In<'_> {
        In {
            pointer: self.pointer,
            reach: self.reach,
            dtype: self.dtype,
            dims: self.dims,
            strides: self.strides,
            lifetime: PhantomData,
        }
    }

    /// The same view for reading, with the same lifetime. It cannot be written through any more.
    pub fn into_in(self) -> In<'a> {
        In {
            lifetime: PhantomData,
            ..self.as_in()
        }
    }

    /// Splits the view before `row` of the first dimension.
    pub fn split_at(self, row: usize) -> (Out<'a>, Out<'a>) {
        let rows = self.dims[0];
        // Both views have the same dims for a moment; the halves returned share no element.
        let first = Out {
            lifetime: PhantomData,
            ..self
        };
        (first.rows(0..row), self.rows(row..rows))
    }

    /// Splits a view of rows and columns before `column`.
    pub fn split_at_column(self, column: usize) -> (Out<'a>, Out<'a>) {
        let columns = self.dims[1];
        // As in `Out::split_at`.
        let first = Out {
            lifetime: PhantomData,
            ..self
        };
        (first.columns(0..column), self.columns(column..columns))
    }

    /// Several ranges of rows, in ascending order, without overlap.
    pub fn disjoint_rows(self, ranges: &[Range<usize>]) -> Vec<Out<'a>> {
        let (mut rest, mut first) = (Some(self), 0);
        let view = |range: &Range<usize>| {
            let all = rest.take().expect("the rest is put back");
            let (before, after) = all.split_at(range.end - first);
            let view = before.rows(range.start - first..range.end - first);
            (rest, first) = (Some(after), range.end);
            view
        };
        ranges.iter().map(view).collect()
    }

    /// The elements of a contiguous view in host memory.
    ///
    /// # Panics
    /// If the view holds another type, is strided, has no data, or is of device memory.
    pub fn slice_mut<T: Element>(self) -> &'a mut [T] {
        self.check_slice::<T>();
        // SAFETY: as in `In::slice`, and the view is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.elements()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_step_through_rows_and_transposes() {
        let data: Vec<f32> = (0..12).map(|value| value as f32).collect();
        let view = In::of_slice(&data, [4, 3]);
        assert_eq!(
            view.rows(1..3).slice::<f32>(),
            [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
        );
        let transposed = view.t();
        assert_eq!(
            (transposed.dims(), transposed.strides()),
            (&[3, 4][..], &[1, 3][..])
        );
        assert!(!transposed.is_contiguous());
        assert_eq!(view.reshape([2, 6]).rows(1..2).slice::<f32>()[0], 6.0);
        let inner = view.columns(1..3);
        assert_eq!((inner.dims(), inner.strides()), (&[4, 2][..], &[3, 1][..]));
        assert_eq!(inner.pointer(), view.pointer().wrapping_add(4));
        assert!(inner.is_by_rows() && !inner.is_contiguous() && !inner.t().is_by_rows());
        let bits = view.rows(1..2).cast(DType::U32);
        assert_eq!(bits.dims(), [3]);
        assert_eq!(bits.slice::<u32>()[0], 3.0f32.to_bits());
    }
}
