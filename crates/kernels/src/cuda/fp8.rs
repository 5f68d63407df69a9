//! Tensors as codes of FP8, and their products by the library.

use super::extent::{Extent, PACK};
use super::matmul::{add_left_out, gemm, is_aligned};
use super::{Argument, Cuda, Driver, Gemm, Kernel, arguments, kernel};
use crate::fp8::Fp8;
use crate::operation::{
    AbsMax, OutputForm, Quantise, QuantiseTransposed, ScaledMatmul, TransposeCodes,
};
use crate::{KernelError, Kernels, Queue, Result};
use memory::{DType, In, Out};

/// Threads of a block that makes a part of a tensor.
const PART_THREADS: usize = 256;

/// Threads of the block that brings the parts' largest magnitudes together.
const ALL_PARTS_THREADS: usize = 1024;

/// Fewest elements of a part, and most parts: their largest magnitudes go to the workspace of products.
const PART_ELEMENTS_MIN: usize = PART_THREADS * PACK * 4;
const PARTS_MAX: usize = 1024;

/// Rows and columns of what a block transposes, and its threads: as in `fp8.cu`.
const SIDE: usize = 128;
const TRANSPOSING_THREADS: usize = 256;

pub(super) fn abs_max<D: Driver>(cuda: &Cuda<D>, AbsMax { out, x }: AbsMax) -> Result {
    let n = x.elements();
    let part = n.div_ceil(PARTS_MAX).max(PART_ELEMENTS_MIN);
    let part = part.next_multiple_of(PACK);
    let parts = n.div_ceil(part);
    let place = cuda.workspace.view().rows(0..parts);
    let arguments = arguments![&place, &x, n, part];
    let kernel = kernel!("fp8", "abs_max_of_part", x.dtype());
    cuda.launch(kernel, in_parts(parts), &arguments)?;
    largest_of_parts(cuda, &out, place)
}

/// The largest of those of parts, by one block.
fn largest_of_parts<D: Driver>(cuda: &Cuda<D>, out: &Out, parts: In) -> Result {
    let arguments = arguments![out, &parts, parts.elements()];
    let extent = Extent::new([1, 1, 1], [ALL_PARTS_THREADS, 1, 1]);
    cuda.launch(kernel!("fp8", "abs_max_of_parts"), extent, &arguments)
}

/// Launches the first of two kernels; or, where a largest magnitude is wanted, the second, each of whose blocks finds that of what it
/// makes.
pub(super) fn launch_finding_largest<D: Driver>(
    cuda: &Cuda<D>,
    [plain, finding]: [Kernel; 2],
    (extent, arguments): (Extent, &[Argument]),
    largest: Option<Out>,
) -> Result {
    let Some(out) = largest else {
        return cuda.launch(plain, extent, arguments);
    };
    let (blocks, room) = (extent.blocks(), cuda.workspace.view().elements());
    if blocks > room {
        let message =
            format!("{blocks} blocks find a largest magnitude each, and there is room for {room}");
        return Err(KernelError::too_large(finding.name, message));
    }
    let parts = cuda.workspace.view().rows(0..blocks);
    cuda.launch(finding, extent, &[arguments, &arguments![&parts]].concat())?;
    largest_of_parts(cuda, &out, parts)
}

/// Launches the kernel of a form: for values, for values and their largest magnitude, or for codes.
pub(super) fn launch_in_form<D: Driver>(
    cuda: &Cuda<D>,
    [values, finding, codes]: [Kernel; 3],
    (extent, arguments): (Extent, &[Argument]),
    form: OutputForm,
) -> Result {
    let find = match form {
        OutputForm::Values => None,
        OutputForm::ValuesAndLargest(out) => Some(out),
        OutputForm::Codes(largest) => {
            let more = arguments![&largest, cuda.converts_fp8.get()];
            return cuda.launch(codes, extent, &[arguments, &more].concat());
        }
    };
    launch_finding_largest(cuda, [values, finding], (extent, arguments), find)
}

impl<D: Driver> Kernels<Cuda<D>> {
    /// Makes codes of FP8 of all values of bf16, in both formats. Returns whether they are those of [`Fp8::code`]. If not, integers make
    /// them from now on, not the device's own instruction. They are made in the workspace of products, and this waits for them.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn check_conversion_to_fp8(&self) -> Result<bool> {
        let cuda = &self.backend;
        cuda.queue.set(Queue::Compute);
        let kernels = [
            (Fp8::E4m3, kernel!("fp8", "quantise_e4m3_bf16")),
            (Fp8::E5m2, kernel!("fp8", "quantise_e5m2_bf16")),
        ];
        let mut are_same = true;
        for (format, kernel) in kernels {
            let codes = cuda.codes_of_all(format, kernel)?;
            let expected = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
            are_same &= expected.map(|value| format.code(value)).eq(codes);
        }
        cuda.converts_fp8.set(are_same);
        Ok(are_same)
    }
}

impl<D: Driver> Cuda<D> {
    /// The code of every bf16, by a kernel and the device's own instruction, in the order of their bits.
    fn codes_of_all(&self, format: Fp8, kernel: Kernel) -> Result<Vec<u8>> {
        // The factor of the largest value is 1.
        let largest = (0..0x7f)
            .map(|code| format.value(code))
            .filter(|value| value.is_finite());
        let mut bytes = largest.fold(0.0, f32::max).to_le_bytes().to_vec();
        bytes.resize(256, 0);
        bytes.extend((0..=u16::MAX).flat_map(u16::to_le_bytes));
        let (n, start) = (1 << 16, self.workspace().pointer.cast_mut());
        let mut codes = vec![0; n];
        let at = |byte: usize| Argument::Pointer(start.wrapping_add(byte));
        let arguments = arguments! {
            at(bytes.len()), at(16), at(256), at(0), n, true,
        };
        // SAFETY: the workspace covers what is written, and no product runs.
        unsafe { self.driver.copy_to_device(start, &bytes)? };
        self.launch(kernel, flat_codes(n), &arguments)?;
        // SAFETY: as above.
        unsafe {
            self.driver
                .copy_to_host(&mut codes, start.wrapping_add(bytes.len()))?
        };
        Ok(codes)
    }
}

/// Blocks that make codes of so many elements: 16 a thread.
fn flat_codes(elements: usize) -> Extent {
    Extent::flat(elements.div_ceil(2))
}

pub(super) fn quantise<D: Driver>(cuda: &Cuda<D>, op: Quantise) -> Result {
    let (n, is_e4m3) = (op.x.elements(), op.codes.dtype() == DType::F8E4M3);
    let Some(underflows) = op.underflows else {
        let kernel = match is_e4m3 {
            true => kernel!("fp8", "quantise_e4m3", op.x.dtype()),
            false => kernel!("fp8", "quantise_e5m2", op.x.dtype()),
        };
        let arguments = arguments! {
            &op.codes, &op.scale, &op.x, &op.largest, n, cuda.converts_fp8.get(),
        };
        // The scale is written even of nothing.
        return cuda.launch(kernel, flat_codes(n.max(1)), &arguments);
    };
    let kernel = match is_e4m3 {
        true => kernel!("fp8", "quantise_counting_e4m3", op.x.dtype()),
        false => kernel!("fp8", "quantise_counting_e5m2", op.x.dtype()),
    };
    let parts = underflows.dims()[0];
    let arguments = arguments! {
        &op.codes, &op.scale, &underflows, &op.x, &op.largest, n, Quantise::part(n, parts),
        underflows.strides()[0], cuda.converts_fp8.get(),
    };
    cuda.launch(kernel, in_parts(parts), &arguments)
}

/// Blocks that make a part each.
fn in_parts(parts: usize) -> Extent {
    Extent::new([parts, 1, 1], [PART_THREADS, 1, 1])
}

pub(super) fn transpose_codes<D: Driver>(cuda: &Cuda<D>, op: TransposeCodes) -> Result {
    let [rows, columns, width] = [op.x.dims()[0], op.x.dims()[1], op.out.dims()[1]];
    let arguments = arguments![&op.out, &op.x, rows, columns, width];
    let extent = of_transpose(columns, width);
    cuda.launch(kernel!("fp8", "transpose_codes"), extent, &arguments)
}

/// Blocks that write a transpose `[columns, width]`.
fn of_transpose(columns: usize, width: usize) -> Extent {
    let grid = [width.div_ceil(SIDE), columns.div_ceil(SIDE), 1];
    Extent::new(grid, [TRANSPOSING_THREADS, 1, 1])
}

pub(super) fn quantise_transposed<D: Driver>(cuda: &Cuda<D>, op: QuantiseTransposed) -> Result {
    let [rows, columns, width] = [op.x.dims()[0], op.x.dims()[1], op.codes.dims()[1]];
    let arguments = arguments! {
        &op.codes, &op.scale, &op.x, &op.largest, rows, columns, width, cuda.converts_fp8.get(),
    };
    let kernel = kernel!("fp8", "quantise_transposed_e4m3", op.x.dtype());
    cuda.launch(kernel, of_transpose(columns, width), &arguments)
}

/// cuBLASLt adds only bf16 biases to FP8 products; other biases are added afterwards.
pub(super) fn scaled_matmul<D: Driver>(cuda: &Cuda<D>, op: ScaledMatmul) -> Result {
    if op.out.elements() == 0 {
        return Ok(());
    }
    let fits = |bias: &In| is_aligned(bias) && bias.dtype() == DType::BF16;
    let in_product = op.bias.filter(fits);
    cuda.gemm(&Gemm {
        scales: Some(op.scales.map(|scale| scale.pointer())),
        fast_accumulation: op.fast_accumulation,
        ..gemm(&op.out, &op.init, [op.a, op.b.t()], in_product)
    })?;
    add_left_out(cuda, op.out, op.bias, in_product)
}
