//! Launches and matrix products: the calls that a driver gets for computation.

use crate::Queue;
use memory::{DType, In, Out};
use std::ffi::c_void;

/// A kernel of `kernels/*.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Its file, without `.cu`.
    pub source: &'static str,
    /// Its unmangled name.
    pub name: &'static str,
}

/// A launch of a kernel.
#[derive(Debug)]
pub struct Launch<'a> {
    /// Where it runs: [`Queue::Compute`] or [`Queue::Update`].
    pub queue: Queue,
    /// The kernel.
    pub kernel: Kernel,
    /// Blocks along x, y and z; at least one.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z: whole warps.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block. For more than 48 KB a driver sets the function's
    /// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` before the launch. 163 KB fit on an A100, 227 KB on an H100,
    /// less what the kernel declares itself.
    pub shared_bytes: u32,
    /// One per parameter, in order.
    pub arguments: &'a [Argument],
}

/// An argument of a kernel, by its type in CUDA C++.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// A pointer; null for an optional tensor that was left out.
    Pointer(*const u8),
    /// `size_t`.
    Size(usize),
    /// `int`; a flag is 0 or 1.
    Int(i32),
    /// `float`.
    Float(f32),
}

impl Argument {
    /// No tensor.
    pub const NULL: Argument = Argument::Pointer(std::ptr::null());

    /// The address of the value, in the form that a launch needs.
    pub fn address(&self) -> *mut c_void {
        match self {
            Argument::Pointer(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Size(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Int(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
        }
    }
}

/// A tensor's address; null if it was left out.
macro_rules! from_view {
    ($view:ident) => {
        impl From<&$view<'_>> for Argument {
            fn from(view: &$view) -> Argument {
                assert!(!view.pointer().is_null(), "a shape has no data");
                Argument::Pointer(view.pointer())
            }
        }

        impl From<&Option<$view<'_>>> for Argument {
            fn from(view: &Option<$view>) -> Argument {
                view.as_ref().map_or(Argument::NULL, Argument::from)
            }
        }
    };
}

from_view!(In);
from_view!(Out);

impl From<usize> for Argument {
    fn from(value: usize) -> Argument {
        Argument::Size(value)
    }
}

impl From<bool> for Argument {
    fn from(value: bool) -> Argument {
        Argument::Int(value.into())
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Argument {
        Argument::Float(value)
    }
}

/// The arguments of a launch by their values, in the order of the kernel's parameters. In braces they may stand side by side.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {
        [$($crate::cuda::Argument::from($value)),*]
    };
}
pub(super) use arguments;

/// `batch` matrices in device memory, each `batch_stride` elements after the one before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    /// The first element.
    pub pointer: *const u8,
    /// f32 or bf16, or codes of FP8.
    pub dtype: DType,
    /// Elements from one row to the next. Either this or `column_stride` is 1, except for matrices of one row or
    /// column.
    pub row_stride: usize,
    /// Elements from one column to the next.
    pub column_stride: usize,
    /// Elements from one matrix to the next; 0 repeats one matrix.
    pub batch_stride: usize,
}

impl Matrix {
    /// The matrices without their first rows and columns.
    fn from(self, row: usize, column: usize) -> Matrix {
        let elements = row * self.row_stride + column * self.column_stride;
        Matrix {
            pointer: self
                .pointer
                .wrapping_add(elements * self.dtype.size_in_bytes()),
            ..self
        }
    }

    /// The transposed matrices.
    pub fn t(self) -> Matrix {
        Matrix {
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// `out [m, n] = init + alpha a [m, k] b [k, n] + bias [n]`, with the bias added to every row, for every matrix of a
/// batch. Sums are f32 and rounded once.
///
/// Deterministic: the algorithm follows from sizes, types, strides and the alignment of the pointers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    /// m, k, n.
    pub sizes: [usize; 3],
    /// Number of products; at least 1.
    pub batch: usize,
    /// Factor on the product.
    pub alpha: f32,
    /// The left matrix, of the type of `b`, or both are codes.
    pub a: Matrix,
    /// The right matrix, as `a`.
    pub b: Matrix,
    /// The product is added to this: another matrix, or `out` itself. Has the type of `out`.
    pub init: Option<Matrix>,
    /// Added to every row of every product: `n` contiguous elements of the type of `out`. The address is a multiple of
    /// [`BIAS_ALIGNMENT_BYTES`].
    pub bias: Option<*const u8>,
    /// Row-major output; f32, or the type of `a`; of codes f32 or bf16.
    pub out: Matrix,
    /// For codes of FP8 alone: where the scales of `a` and `b` lie, an f32 each at a multiple of [`SCALE_ALIGNMENT_BYTES`]. The product
    /// reads them when it runs. The rows of `a` and the columns of `b` are contiguous and have a multiple of 16 elements, not both
    /// are e5m2, and every address and distance is a multiple of 16 bytes.
    pub scales: Option<[*const u8; 2]>,
    /// For codes of FP8 alone: whether sums may be kept in fewer bits than f32 has.
    pub fast_accumulation: bool,
}

/// The most elements that a matrix of one product reaches over, from its first to its last: cuBLASLt's algorithms count
/// them in 32 bits.
pub const PRODUCT_ELEMENTS_MAX: usize = 1 << 31;

/// Rows of a piece of a product are a multiple of this, so that each begins at as aligned an address as the whole.
const PIECE_ROWS: usize = 128;

impl Gemm {
    /// Splits a product so that no matrix spans more than `elements_max` elements. Run in order, the pieces give the same
    /// result. Rows of the output are computed apart. Where sums are too long, as of a weight's gradient over tokens, their
    /// parts are added in order. The columns are not cut: those of one row of any matrix have to fit.
    pub(super) fn pieces(self, elements_max: usize) -> impl Iterator<Item = Gemm> {
        let [m, k, n] = self.sizes;
        let rows = |count: usize, strides: [usize; 2]| {
            let fit = elements_max / strides[0].max(strides[1]).max(1);
            match count <= fit {
                true => count.max(1),
                false => (fit - fit % PIECE_ROWS).max(1),
            }
        };
        let added = self.init.map_or(0, |init| init.row_stride);
        let rows_of_out = rows(m, [self.a.row_stride, self.out.row_stride.max(added)]);
        let terms = rows(k, [self.a.column_stride, self.b.row_stride]);
        let firsts = |count: usize, step| (0..count.max(1)).step_by(step);
        let places = firsts(m, rows_of_out)
            .flat_map(move |row| firsts(k, terms).map(move |term| [row, term]));
        places.map(move |[row, term]| {
            let out = self.out.from(row, 0);
            let is_first = term == 0;
            Gemm {
                sizes: [rows_of_out.min(m - row), terms.min(k - term), n],
                a: self.a.from(row, term),
                b: self.b.from(term, 0),
                init: match is_first {
                    true => self.init.map(|init| init.from(row, 0)),
                    false => Some(out),
                },
                bias: self.bias.filter(|_| is_first),
                out,
                ..self
            }
        })
    }
}

/// The address of a [`Gemm::bias`] is a multiple of this.
pub const BIAS_ALIGNMENT_BYTES: usize = 16;

/// The address of a scale of [`Gemm::scales`] is a multiple of this: cuBLASLt 13.1 on an H100 took no product with
/// a scale at another multiple of 4.
pub const SCALE_ALIGNMENT_BYTES: usize = 16;

/// Device memory that the matrix library may use for a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workspace {
    /// Its first byte.
    pub pointer: *const u8,
    /// Its size.
    pub bytes: usize,
}
