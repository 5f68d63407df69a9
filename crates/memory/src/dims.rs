//! Shapes of up to four dimensions, copied by value.

use crate::DType;

/// A shape of up to four dimensions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    rank: u8,
    sizes: [usize; 4],
}

impl Dims {
    /// The sizes, outermost first.
    pub fn as_slice(&self) -> &[usize] {
        &self.sizes[..self.rank as usize]
    }

    /// Number of elements; 1 for a scalar.
    pub fn elements(&self) -> usize {
        self.as_slice().iter().product()
    }

    /// Bytes of a tensor of this shape; none if the number does not fit.
    pub fn bytes(&self, dtype: DType) -> Option<u64> {
        let sizes = self.as_slice().iter().map(|size| *size as u64);
        let bytes = sizes
            .chain([dtype.size_in_bytes() as u64])
            .try_fold(1, u64::checked_mul)?;
        (bytes < isize::MAX as u64).then_some(bytes)
    }

    /// The distance between neighbours in each dimension of a row-major tensor, in elements.
    pub fn row_major_strides(&self) -> Dims {
        let mut strides = *self;
        let mut stride = 1;
        for dimension in (0..self.rank as usize).rev() {
            strides.sizes[dimension] = stride;
            stride *= self.sizes[dimension];
        }
        strides
    }

    pub(crate) fn swap(&self, a: usize, b: usize) -> Dims {
        let mut swapped = *self;
        swapped.sizes.swap(a, b);
        swapped
    }

    pub(crate) fn with_first(&self, size: usize) -> Dims {
        let mut changed = *self;
        changed.sizes[0] = size;
        changed
    }
}

impl std::ops::Index<usize> for Dims {
    type Output = usize;

    fn index(&self, dimension: usize) -> &usize {
        &self.as_slice()[dimension]
    }
}

impl std::fmt::Debug for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_slice().fmt(f)
    }
}

impl<const N: usize> From<[usize; N]> for Dims {
    fn from(shape: [usize; N]) -> Dims {
        const { assert!(N <= 4, "a shape has at most four dimensions") };
        let mut sizes = [1; 4];
        sizes[..N].copy_from_slice(&shape);
        Dims {
            rank: N as u8,
            sizes,
        }
    }
}

impl TryFrom<&[usize]> for Dims {
    type Error = usize;

    /// Fails with the number of dimensions if it is above four.
    fn try_from(shape: &[usize]) -> Result<Dims, usize> {
        let mut sizes = [1; 4];
        sizes
            .get_mut(..shape.len())
            .ok_or(shape.len())?
            .copy_from_slice(shape);
        Ok(Dims {
            rank: shape.len() as u8,
            sizes,
        })
    }
}
