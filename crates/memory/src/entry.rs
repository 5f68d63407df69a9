//! The tensors of a layout, and what they are padded to.

use crate::{DType, Dims, Role};
use std::ops::Range;

/// Every entry of a layout is padded to a multiple of this many elements, so that block-wise quantised states
/// restart at each tensor.
pub const PARAMETER_PADDING: usize = 256;

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
    /// Shape, of one to four dimensions: with two or more it is a matrix, or several of one kind.
    pub shape: Vec<usize>,
    /// How training treats it.
    pub role: Role,
    /// The type that it is stored in; none: the one that the model computes in.
    pub dtype: Option<DType>,
}

impl Entry {
    /// Number of elements, without padding.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The shape, as views have it.
    pub fn dims(&self) -> Dims {
        dims(&self.shape)
    }

    /// Whether it is a weight with rows: more than one dimension.
    pub fn is_matrix(&self) -> bool {
        self.shape.len() > 1 && self.role != Role::Buffer
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

/// A shape of one to four dimensions, as views have it.
pub(crate) fn dims(shape: &[usize]) -> Dims {
    Dims::try_from(shape).expect("a parameter has one to four dimensions")
}
