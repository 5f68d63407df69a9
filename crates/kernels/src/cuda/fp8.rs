//! Tensors as codes of FP8, and their products by the library.

use super::extent::{Extent, PACK};
use super::matmul::{added, matrix};
use super::{Argument, BIAS_ALIGNMENT_BYTES, Cuda, Driver, Gemm, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{
    AbsMax, AddBias, Quantise, QuantiseTransposed, ScaledMatmul, TransposeCodes,
};
use memory::{DType, In, Out};

/// Threads of a block that makes a part of a tensor.
const PART_THREADS: usize = 256;

/// Threads of the block that brings the parts' largest magnitudes together.
const ALL_PARTS_THREADS: usize = 1024;

/// Fewest elements of a part, and most parts: their largest magnitudes go to the workspace of products.
const PART_ELEMENTS_MIN: usize = PART_THREADS * PACK * 4;
const PARTS_MAX: usize = 1024;

/// Rows and columns of what a block transposes, and its threads: as in `fp8.cu`.
const SIDE: usize = 64;
const TRANSPOSING_THREADS: usize = 256;

pub(super) fn abs_max<D: Driver>(
    cuda: &Cuda<D>,
    AbsMax { out, x }: AbsMax,
) -> Result<(), KernelError> {
    let n = x.elements();
    let part = n
        .div_ceil(PARTS_MAX)
        .max(PART_ELEMENTS_MIN)
        .next_multiple_of(PACK);
    let parts = n.div_ceil(part);
    let place = cuda.workspace.view().rows(0..parts);
    let arguments = [(&place).into(), (&x).into(), n.into(), part.into()];
    let kernel = kernel!("fp8", "abs_max_of_part", x.dtype());
    cuda.launch(kernel, in_parts(parts), &arguments)?;
    largest_of_parts(cuda, &out, place)
}

/// The largest of those of parts, by one block.
fn largest_of_parts<D: Driver>(cuda: &Cuda<D>, out: &Out, parts: In) -> Result<(), KernelError> {
    let arguments = [out.into(), (&parts).into(), parts.elements().into()];
    let extent = Extent {
        grid: [1, 1, 1],
        block: [ALL_PARTS_THREADS, 1, 1],
        shared_bytes: 0,
    };
    cuda.launch(kernel!("fp8", "abs_max_of_parts"), extent, &arguments)
}

/// Launches the first of two kernels; or, where a largest magnitude is wanted, the second, each of whose blocks finds that of what it
/// makes.
pub(super) fn launch_finding_largest<D: Driver>(
    cuda: &Cuda<D>,
    [plain, finding]: [Kernel; 2],
    (extent, mut arguments): (Extent, Vec<Argument>),
    largest: Option<Out>,
) -> Result<(), KernelError> {
    let Some(out) = largest else {
        return cuda.launch(plain, extent, &arguments);
    };
    let (blocks, room) = (extent.blocks(), cuda.workspace.view().elements());
    if blocks > room {
        return Err(KernelError::too_large(
            finding.name,
            format!("{blocks} blocks find a largest magnitude each, and there is room for {room}"),
        ));
    }
    let parts = cuda.workspace.view().rows(0..blocks);
    arguments.push((&parts).into());
    cuda.launch(finding, extent, &arguments)?;
    largest_of_parts(cuda, &out, parts)
}

pub(super) fn quantise<D: Driver>(cuda: &Cuda<D>, operation: Quantise) -> Result<(), KernelError> {
    let Quantise {
        codes,
        scale,
        underflows,
        x,
        largest,
    } = operation;
    let (n, is_e4m3) = (x.elements(), codes.dtype() == DType::F8E4M3);
    let Some(underflows) = underflows else {
        let kernel = match is_e4m3 {
            true => kernel!("fp8", "quantise_e4m3", x.dtype()),
            false => kernel!("fp8", "quantise_e5m2", x.dtype()),
        };
        let arguments = [
            (&codes).into(),
            (&scale).into(),
            (&x).into(),
            (&largest).into(),
            n.into(),
        ];
        // The scale is written even of nothing.
        return cuda.launch(kernel, Extent::flat(n.max(1)), &arguments);
    };
    let kernel = match is_e4m3 {
        true => kernel!("fp8", "quantise_counting_e4m3", x.dtype()),
        false => kernel!("fp8", "quantise_counting_e5m2", x.dtype()),
    };
    let parts = underflows.dims()[0];
    let arguments = [
        (&codes).into(),
        (&scale).into(),
        (&underflows).into(),
        (&x).into(),
        (&largest).into(),
        n.into(),
        Quantise::part(n, parts).into(),
        underflows.strides()[0].into(),
    ];
    cuda.launch(kernel, in_parts(parts), &arguments)
}

/// Blocks that make a part each.
fn in_parts(parts: usize) -> Extent {
    Extent {
        grid: [parts, 1, 1],
        block: [PART_THREADS, 1, 1],
        shared_bytes: 0,
    }
}

pub(super) fn transpose_codes<D: Driver>(
    cuda: &Cuda<D>,
    TransposeCodes { out, x }: TransposeCodes,
) -> Result<(), KernelError> {
    let [rows, columns, width] = [x.dims()[0], x.dims()[1], out.dims()[1]];
    let arguments = [
        (&out).into(),
        (&x).into(),
        rows.into(),
        columns.into(),
        width.into(),
    ];
    let extent = of_transpose(columns, width);
    cuda.launch(kernel!("fp8", "transpose_codes"), extent, &arguments)
}

/// Blocks that write a transpose `[columns, width]`.
fn of_transpose(columns: usize, width: usize) -> Extent {
    Extent {
        grid: [width.div_ceil(SIDE), columns.div_ceil(SIDE), 1],
        block: [TRANSPOSING_THREADS, 1, 1],
        shared_bytes: 0,
    }
}

pub(super) fn quantise_transposed<D: Driver>(
    cuda: &Cuda<D>,
    operation: QuantiseTransposed,
) -> Result<(), KernelError> {
    let QuantiseTransposed {
        codes,
        scale,
        x,
        largest,
    } = operation;
    let [rows, columns, width] = [x.dims()[0], x.dims()[1], codes.dims()[1]];
    let arguments = [
        (&codes).into(),
        (&scale).into(),
        (&x).into(),
        (&largest).into(),
        rows.into(),
        columns.into(),
        width.into(),
    ];
    let kernel = kernel!("fp8", "quantise_transposed_e4m3", x.dtype());
    cuda.launch(kernel, of_transpose(columns, width), &arguments)
}

/// cuBLASLt adds only bf16 biases to FP8 products; other biases are added afterwards.
pub(super) fn scaled_matmul<D: Driver>(
    cuda: &Cuda<D>,
    operation: ScaledMatmul,
) -> Result<(), KernelError> {
    let ScaledMatmul {
        out,
        a,
        b,
        scales,
        bias,
        init,
        fast_accumulation,
    } = operation;
    if out.elements() == 0 {
        return Ok(());
    }
    let fits = |bias: &In| {
        let is_aligned = (bias.pointer() as usize).is_multiple_of(BIAS_ALIGNMENT_BYTES);
        is_aligned && bias.dtype() == DType::BF16
    };
    let in_product = bias.filter(fits);
    let of_view = |x: In| matrix(x.pointer(), x.dtype(), [x.strides()[0], 1]);
    cuda.gemm(&Gemm {
        sizes: [a.dims()[0], a.dims()[1], b.dims()[0]],
        batch: 1,
        alpha: 1.0,
        a: of_view(a),
        b: of_view(b).t(),
        init: added(&out, &init).map(|(init, stride)| matrix(init, out.dtype(), [stride, 1])),
        bias: in_product.map(|bias| bias.pointer()),
        out: matrix(out.pointer(), out.dtype(), [out.strides()[0], 1]),
        scales: Some(scales.map(|scale| scale.pointer())),
        fast_accumulation,
    })?;
    match bias {
        Some(bias) if in_product.is_none() => {
            super::elementwise::add_bias(cuda, AddBias { out, bias })
        }
        _ => Ok(()),
    }
}
