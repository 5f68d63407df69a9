//! Matrix products: by the library, except for mixes of types that it refuses.

use super::elementwise::add_bias;
use super::extent::Extent;
use super::{
    Argument, BIAS_ALIGNMENT_BYTES, Cuda, Driver, Gemm, Matrix, arguments, kernel, no_kernel,
};
use crate::operation::{AddBias, Gram, Matmul};
use crate::{Init, Result};
use memory::{DType, In, Out};

/// Rows and columns of the output that a block computes: as in `matmul.cu`.
const TILE: usize = 16;

pub(super) fn matmul<D: Driver>(cuda: &Cuda<D>, op: Matmul) -> Result {
    let types = [op.out.dtype(), op.a.dtype(), op.b.dtype()];
    if op.out.elements() == 0 {
        return Ok(());
    }
    let is_mixed = types[1] != types[2] || types == [DType::BF16, DType::F32, DType::F32];
    let in_product = op.bias.filter(|bias| !is_mixed && is_aligned(bias));
    match is_mixed {
        true => mixed(cuda, &op)?,
        false => {
            let whole = gemm(&op.out, &op.init, [op.a, op.b], in_product);
            let mut pieces = whole.pieces(cuda.product_elements_max);
            pieces.try_for_each(|piece| cuda.gemm(&piece))?;
        }
    }
    add_left_out(cuda, op.out, op.bias, in_product)
}

/// Whether the library can add a bias, by its address.
pub(super) fn is_aligned(bias: &In) -> bool {
    (bias.pointer() as usize).is_multiple_of(BIAS_ALIGNMENT_BYTES)
}

/// Adds a bias that was not added in the product.
pub(super) fn add_left_out<D: Driver>(
    cuda: &Cuda<D>,
    out: Out,
    bias: Option<In>,
    in_product: Option<In>,
) -> Result {
    match bias {
        Some(bias) if in_product.is_none() => {
            let bias = bias.into();
            add_bias(cuda, AddBias { out, bias })
        }
        _ => Ok(()),
    }
}

/// Computes both halves of a symmetric product: the library cannot leave one out.
pub(super) fn gram<D: Driver>(cuda: &Cuda<D>, Gram { out, x }: Gram) -> Result {
    let product = Matmul {
        out,
        a: x,
        b: x.t(),
        bias: None,
        init: Init::Overwrite,
    };
    matmul(cuda, product)
}

/// One matrix.
fn matrix(pointer: *const u8, dtype: DType, [row_stride, column_stride]: [usize; 2]) -> Matrix {
    Matrix {
        pointer,
        dtype,
        row_stride,
        column_stride,
        batch_stride: 0,
    }
}

/// What a product is added to, and the elements from one of its rows to the next.
fn added(out: &Out, init: &Init) -> Option<(*const u8, usize)> {
    match init {
        Init::Overwrite => None,
        Init::Accumulate => Some((out.pointer().cast_const(), out.strides()[0])),
        Init::Add(residual) => Some((residual.pointer(), residual.strides()[0])),
    }
}

/// A product by the library.
pub(super) fn gemm(out: &Out, init: &Init, [a, b]: [In; 2], bias: Option<In>) -> Gemm {
    let of_view = |x: In| matrix(x.pointer(), x.dtype(), [x.strides()[0], x.strides()[1]]);
    Gemm {
        sizes: [a.dims()[0], a.dims()[1], b.dims()[1]],
        batch: 1,
        alpha: 1.0,
        a: of_view(a),
        b: of_view(b),
        init: added(out, init).map(|(init, stride)| matrix(init, out.dtype(), [stride, 1])),
        bias: bias.map(|bias| bias.pointer()),
        out: matrix(out.pointer(), out.dtype(), [out.strides()[0], 1]),
        scales: None,
        fast_accumulation: false,
    }
}

/// A product by our own, slow kernel: cuBLASLt multiplies only operands of one type.
fn mixed<D: Driver>(cuda: &Cuda<D>, op: &Matmul) -> Result {
    let (out, a, b) = (&op.out, &op.a, &op.b);
    let name = match [out.dtype(), a.dtype(), b.dtype()] {
        [DType::F32, DType::F32, DType::BF16] => "matmul_f32_f32_bf16",
        [DType::F32, DType::BF16, DType::F32] => "matmul_f32_bf16_f32",
        [DType::BF16, DType::F32, DType::BF16] => "matmul_bf16_f32_bf16",
        [DType::BF16, DType::BF16, DType::F32] => "matmul_bf16_bf16_f32",
        [DType::BF16, DType::F32, DType::F32] => "matmul_bf16_f32_f32",
        other => no_kernel("matmul", &other),
    };
    let [m, k, n] = [a.dims()[0], a.dims()[1], b.dims()[1]];
    let extent = Extent::new([m.div_ceil(TILE), n.div_ceil(TILE), 1], [TILE, TILE, 1]);
    let (init, init_stride) = added(out, &op.init).unwrap_or((std::ptr::null(), 0));
    let arguments = arguments! {
        out, out.strides()[0], Argument::Pointer(init), init_stride, a, b, m, k, n, a.strides()[0],
        a.strides()[1], b.strides()[0], b.strides()[1],
    };
    cuda.launch(kernel!("matmul", name), extent, &arguments)
}
