//! Matrix products: the library's, but for mixes of types that it does not take.

use super::extent::Extent;
use super::{Argument, Cuda, Driver, Gemm, Kernel, Matrix, kernel, no_kernel};
use crate::operation::Matmul;
use crate::{Init, KernelError};
use memory::{DType, In, Out};

/// Rows and columns of the output that a block computes: as in `matmul.cu`.
const TILE: usize = 16;

pub(super) fn matmul<D: Driver>(
    cuda: &Cuda<D>,
    Matmul { out, a, b, init }: Matmul,
) -> Result<(), KernelError> {
    let init = match init {
        Init::Overwrite => None,
        Init::Accumulate => Some(out.pointer().cast_const()),
        Init::Add(residual) => Some(residual.pointer()),
    };
    let types = [out.dtype(), a.dtype(), b.dtype()];
    let [m, k, n] = [a.dims()[0], a.dims()[1], b.dims()[1]];
    if m * n == 0 {
        return Ok(());
    }
    if types[1] != types[2] || types == [DType::BF16, DType::F32, DType::F32] {
        return mixed(cuda, out, init, a, b);
    }
    let matrix = |pointer, dtype, [row_stride, column_stride]: [usize; 2]| Matrix {
        pointer,
        dtype,
        row_stride,
        column_stride,
        batch_stride: 0,
    };
    let of_view = |x: In| matrix(x.pointer(), x.dtype(), [x.strides()[0], x.strides()[1]]);
    cuda.gemm(&Gemm {
        sizes: [m, k, n],
        batch: 1,
        alpha: 1.0,
        a: of_view(a),
        b: of_view(b),
        init: init.map(|init| matrix(init, out.dtype(), [n, 1])),
        out: matrix(out.pointer(), out.dtype(), [n, 1]),
    })
}

/// A product by a kernel of our own, slowly: cuBLASLt multiplies operands of one type alone.
fn mixed<D: Driver>(
    cuda: &Cuda<D>,
    out: Out,
    init: Option<*const u8>,
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
    let arguments = [
        (&out).into(),
        Argument::Pointer(init.unwrap_or(std::ptr::null())),
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
