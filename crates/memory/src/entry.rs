//! The tensors of a layout, and the padding between them.

use crate::{Codes, DType, Dims, Role};
use std::ops::Range;

/// Every entry of a layout is padded to a multiple of this many elements, so that the blocks of quantised states begin
/// anew at each tensor.
pub const PARAMETER_PADDING: usize = 256;

/// Elements of a grain. The squares of a grain's gradients are added up on their own. So the norm has the same bits
/// wherever gradients live and however they are divided. Grains begin anew with every unit and with the vectors.
pub const GRAIN_ELEMENTS: usize = 4096;

/// One tensor of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The tensor's name. Parameters have Hugging Face's names.
    pub name: String,
    /// First element.
    pub offset: usize,
    /// Shape, of one to four dimensions. With two or more it is a matrix, or a stack of matrices.
    pub shape: Vec<usize>,
    /// How training treats it.
    pub role: Role,
    /// The type that it is stored in. None means the type that the model computes in.
    pub dtype: Option<DType>,
    /// How a frozen matrix is stored as codes. None means as plain numbers.
    pub codes: Option<Codes>,
}

impl Entry {
    /// Number of elements, without padding.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The shape as [`Dims`].
    pub fn dims(&self) -> Dims {
        dims(&self.shape)
    }

    /// Whether it has more than one dimension.
    pub fn is_matrix(&self) -> bool {
        self.shape.len() > 1 && self.role != Role::Buffer
    }

    /// Its elements in the arena, without padding.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements()
    }

    /// Its elements in the arena, with the padding behind them.
    pub fn padded_range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements().next_multiple_of(PARAMETER_PADDING)
    }
}

/// Converts a shape of one to four dimensions.
pub(crate) fn dims(shape: &[usize]) -> Dims {
    Dims::try_from(shape).expect("a parameter has one to four dimensions")
}
