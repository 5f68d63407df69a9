//! A leased tensor.

use crate::memory::Held;
use crate::view::Reach;
use crate::{Category, DType, Dims, In, Out};

/// A leased, row-major tensor; dropping it gives the lease back.
///
/// Written through `&mut`, read through `&`: shared in an `Rc` it is frozen.
pub struct Buffer {
    pointer: *mut u8,
    reach: Reach,
    dims: Dims,
    dtype: DType,
    held: Held,
}

impl Buffer {
    pub(crate) fn new(held: Held, pointer: *mut u8, dims: Dims, dtype: DType) -> Buffer {
        Buffer {
            pointer,
            reach: held.reach(),
            dims,
            dtype,
            held,
        }
    }

    /// Reads the tensor.
    pub fn view(&self) -> In<'_> {
        // SAFETY: the lease covers `dims` elements of `dtype`, and lives as long as the borrow.
        unsafe { In::new(self.pointer, self.reach, self.dtype, self.dims) }
    }

    /// Writes the tensor.
    pub fn view_mut(&mut self) -> Out<'_> {
        // SAFETY: as in `view`, and the borrow is exclusive.
        unsafe { Out::new(self.pointer, self.reach, self.dtype, self.dims) }
    }

    /// Shape, outermost dimension first.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Leased bytes, rounded to the granularity.
    pub fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Whether there is no memory behind the shape.
    pub fn is_shape(&self) -> bool {
        self.held.is_shape()
    }

    /// Changes what the lease is for in every report from now on.
    pub fn recategorize(&mut self, category: Category) {
        self.held.recategorize(category);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:?} {:?})", self.dtype, self.dims)
    }
}
