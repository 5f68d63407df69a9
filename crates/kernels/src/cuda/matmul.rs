//! Matrix products: by the library, except for mixes of types that it refuses.

use super::elementwise::add_bias;
use super::extent::Extent;
use super::{
    Argument, BIAS_ALIGNMENT_BYTES, Cuda, Driver, Gemm, Kernel, Matrix, kernel, no_kernel,
};
use crate::operation::{AddBias, Gram, Matmul};
use crate::{Init, KernelError};
use memory::{DType, In, Out};

/// Rows and columns of the output that a block computes: as in `matmul.cu`.
const TILE: usize = 16;

pub(super) fn matmul<D: Driver>(
    cuda: &Cuda<D>,
    Matmul {
        mut out,
        a,
        b,
        bias,
        init,
    }: Matmul,
) -> Result<(), KernelError> {
    let types = [out.dtype(), a.dtype(), b.dtype()];
    if out.elements() == 0 {
        return Ok(());
    }
    let is_mixed = types[1] != types[2] || types == [DType::BF16, DType::F32, DType::F32];
    let is_aligned = |bias: &In| (bias.pointer() as usize).is_multiple_of(BIAS_ALIGNMENT_BYTES);
    let in_product = bias.filter(|bias| !is_mixed && is_aligned(bias));
    match is_mixed {
        true => mixed(cuda, &mut out, &init, a, b)?,
        false => product(cuda, &mut out, &init, [a, b], in_product)?,
    }
    match bias {
        Some(bias) if in_product.is_none() => add_bias(cuda, AddBias { out, bias }),
        _ => Ok(()),
    }
}

/// Computes both halves of a symmetric product: the library cannot leave one out.
pub(super) fn gram<D: Driver>(cuda: &Cuda<D>, Gram { out, x }: Gram) -> Result<(), KernelError> {
    matmul(
        cuda,
        Matmul {
            out,
            a: x,
            b: x.t(),
            bias: None,
            init: Init::Overwrite,
        },
    )
}

/// One matrix.
pub(super) fn matrix(
    pointer: *const u8,
    dtype: DType,
    [row_stride, column_stride]: [usize; 2],
) -> Matrix {
    Matrix {
        pointer,
        dtype,
        row_stride,
        column_stride,
        batch_stride: 0,
    }
}

/// What a product is added to, and the elements from one of its rows to the next.
pub(super) fn added(out: &Out, init: &Init) -> Option<(*const u8, usize)> {
    match init {
        Init::Overwrite => None,
        Init::Accumulate => Some((out.pointer().cast_const(), out.strides()[0])),
        Init::Add(residual) => Some((residual.pointer(), residual.strides()[0])),
    }
}

/// A product by the library, in pieces if one would be too large for it.
fn product<D: Driver>(
    cuda: &Cuda<D>,
    out: &mut Out,
    init: &Init,
    [a, b]: [In; 2],
    bias: Option<In>,
) -> Result<(), KernelError> {
    let of_view = |x: In| matrix(x.pointer(), x.dtype(), [x.strides()[0], x.strides()[1]]);
    let whole = Gemm {
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
    };
    let mut pieces = whole.pieces(cuda.product_elements_max);
    pieces.try_for_each(|piece| cuda.gemm(&piece))
}

/// A product by our own, slow kernel: cuBLASLt multiplies only operands of one type.
fn mixed<D: Driver>(
    cuda: &Cuda<D>,
    out: &mut Out,
    init: &Init,
    a: In,
    b: In,
) -> Result<(), KernelError> {
    let name = match [out.dtype(), a.dtype(), b.dtype()] {
        [DType::F32, DType::F32, DType::BF16] => "matmul_f32_f32_bf16",
        [DType::F32, DType::BF16, DType::F32] => "matmul_f32_bf16_f32",
        [DType::BF16, DType::F32, DType::BF16] => "matmul_bf16_f32_bf16",
        [DType::BF16, DType::BF16, DType::F32] => "matmul_bf16_bf16_f32",
        [DType::BF16, DType::F32, DType::F32] => "matmul_bf16_f32_f32",
        other => no_kernel("matmul", &other),
    };
    let [m, k, n] = [a.dims()[0], a.dims()[1], b.dims()[1]];
    let extent = Extent {
        grid: [m.div_ceil(TILE), n.div_ceil(TILE), 1],
        block: [TILE, TILE, 1],
        shared_bytes: 0,
    };
    let row_stride = out.strides()[0];
    let (init, init_stride) = added(out, init).unwrap_or((std::ptr::null(), 0));
    let arguments = [
        (&*out).into(),
        row_stride.into(),
        Argument::Pointer(init),
        init_stride.into(),
        (&a).into(),
        (&b).into(),
        m.into(),
        k.into(),
        n.into(),
        a.strides()[0].into(),
        a.strides()[1].into(),
        b.strides()[0].into(),
        b.strides()[1].into(),
    ];
    cuda.launch(kernel!("matmul", name), extent, &arguments)
}
