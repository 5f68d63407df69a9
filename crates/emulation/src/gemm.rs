//! Matrix products that refuse what cuBLASLt does not take.

use half::bf16;
use kernels::KernelError;
use kernels::cuda::{BIAS_ALIGNMENT_BYTES, Gemm, Matrix, SCALE_ALIGNMENT_BYTES};
use kernels::fp8::Fp8;
use memory::DType;

/// Rows of the output that share a pass over `b`.
const ROWS: usize = 4;

/// Computes products of matrices that the processor can read and write, in f32, and rounds once.
///
/// # Safety
/// As for [`kernels::cuda::Driver::gemm`].
///
/// # Errors
/// [`KernelError`] if cuBLASLt does not take such products.
pub unsafe fn gemm(gemm: &Gemm) -> Result<(), KernelError> {
    check(gemm)?;
    let [m, k, n] = gemm.sizes;
    for index in 0..gemm.batch {
        let bias = gemm.bias.map(|pointer| Matrix {
            pointer,
            row_stride: 0,
            batch_stride: 0,
            ..gemm.out
        });
        // SAFETY: the caller's promise: the matrices lie in live tensors.
        let (a, b, init, bias) = unsafe {
            (
                scaled(&gemm.a, gemm.scales.map(|[a, _]| a), index, [m, k]),
                scaled(&gemm.b, gemm.scales.map(|[_, b]| b), index, [k, n]),
                gemm.init.map(|init| widened(&init, index, [m, n])),
                bias.map(|bias| widened(&bias, index, [1, n])),
            )
        };
        let mut out = product(&a, &b, [m, k, n]);
        out.iter_mut().for_each(|out| *out *= gemm.alpha);
        if let Some(init) = init {
            out.iter_mut()
                .zip(init)
                .for_each(|(out, init)| *out += init);
        }
        if let Some(bias) = bias {
            out.iter_mut()
                .zip(bias.iter().cycle())
                .for_each(|(out, bias)| *out += bias);
        }
        // SAFETY: the caller's promise: nothing else touches the output.
        unsafe { write(&gemm.out, index, n, &out) };
    }
    Ok(())
}

fn check(gemm: &Gemm) -> Result<(), KernelError> {
    let refuse = |message: String| Err(KernelError::misfit("gemm", message));
    let [m, k, n] = gemm.sizes;
    if m * n * gemm.batch == 0 {
        return refuse(format!("{} products of {m} x {k} x {n}", gemm.batch));
    }
    let types = [gemm.out.dtype, gemm.a.dtype, gemm.b.dtype];
    let are_codes = gemm.a.dtype.is_fp8() && gemm.b.dtype.is_fp8();
    let known = match types {
        [DType::F32 | DType::BF16, a, b] if are_codes => [a, b] != [DType::F8E5M2; 2],
        [DType::F32, DType::F32, DType::F32] => true,
        [DType::F32 | DType::BF16, DType::BF16, DType::BF16] => true,
        _ => false,
    };
    if are_codes && !takes_codes(gemm) {
        return refuse(format!("no product of codes is laid out so: {gemm:?}"));
    }
    if !known
        || are_codes != gemm.scales.is_some()
        || gemm.init.is_some_and(|init| init.dtype != gemm.out.dtype)
    {
        return refuse(format!("the library takes no products of {types:?}"));
    }
    if gemm
        .bias
        .is_some_and(|bias| bias.align_offset(BIAS_ALIGNMENT_BYTES) != 0)
    {
        return refuse(format!("the bias is not aligned: {:?}", gemm.bias));
    }
    for (name, matrix, [rows, columns]) in [
        ("a", &gemm.a, [m, k]),
        ("b", &gemm.b, [k, n]),
        ("out", &gemm.out, [m, n]),
    ] {
        let by_rows = matrix.column_stride == 1 || columns == 1;
        let by_columns = matrix.row_stride == 1 || rows == 1;
        if !(by_rows || by_columns && name != "out") {
            return refuse(format!("`{name}` has no neighbouring elements: {matrix:?}"));
        }
        if matrix.pointer.align_offset(matrix.dtype.size_in_bytes()) != 0 {
            return refuse(format!("`{name}` is not aligned: {matrix:?}"));
        }
    }
    Ok(())
}

/// Whether rows of `a` and columns of `b` are contiguous, and all that is 16 bytes at a time.
fn takes_codes(gemm: &Gemm) -> bool {
    let Gemm { a, b, out, .. } = gemm;
    let init = gemm.init.unwrap_or(*out);
    let lines = [
        (a, a.row_stride),
        (b, b.column_stride),
        (out, out.row_stride),
        (&init, init.row_stride),
    ];
    let is_aligned = |(matrix, line): &(&Matrix, usize)| {
        let bytes = line * matrix.dtype.size_in_bytes();
        matrix.pointer.align_offset(16) == 0 && bytes.is_multiple_of(16)
    };
    let [_, k, n] = gemm.sizes;
    let has_other_bias = gemm.bias.is_some() && out.dtype != DType::BF16;
    let mut scales = gemm.scales.iter().flatten();
    a.column_stride == 1
        && b.row_stride == 1
        && lines.iter().all(is_aligned)
        && [k, n].iter().all(|size| size.is_multiple_of(16))
        && scales.all(|scale| scale.align_offset(SCALE_ALIGNMENT_BYTES) == 0)
        && !has_other_bias
}

/// As [`widened`], times the matrix's scale.
///
/// # Safety
/// As for [`widened`].
unsafe fn scaled(
    matrix: &Matrix,
    scale: Option<*const u8>,
    index: usize,
    sizes: [usize; 2],
) -> Vec<f32> {
    // SAFETY: the caller's promise.
    let mut values = unsafe { widened(matrix, index, sizes) };
    if let Some(scale) = scale {
        // SAFETY: the caller's promise.
        let scale = unsafe { *scale.cast::<f32>() };
        values.iter_mut().for_each(|value| *value *= scale);
    }
    values
}

/// One matrix of a batch as rows of f32.
///
/// # Safety
/// The matrix lies in a live tensor.
unsafe fn widened(matrix: &Matrix, index: usize, [rows, columns]: [usize; 2]) -> Vec<f32> {
    let first = index * matrix.batch_stride;
    let at = |row, column| first + row * matrix.row_stride + column * matrix.column_stride;
    let element = |offset: usize| match matrix.dtype {
        // SAFETY: the caller's promise.
        DType::F32 => unsafe { *matrix.pointer.cast::<f32>().add(offset) },
        DType::F8E4M3 | DType::F8E5M2 => {
            let format = Fp8::of(matrix.dtype).expect("these are codes");
            // SAFETY: the caller's promise.
            format.value(unsafe { *matrix.pointer.add(offset) })
        }
        // SAFETY: the caller's promise.
        _ => unsafe { *matrix.pointer.cast::<bf16>().add(offset) }.to_f32(),
    };
    let indices = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    indices
        .map(|(row, column)| element(at(row, column)))
        .collect()
}

/// Rows of `a b`.
fn product(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let mut out = vec![0.0; m * n];
    if k == 0 {
        return out;
    }
    for (out, a) in out.chunks_mut(ROWS * n).zip(a.chunks(ROWS * k)) {
        for (depth, b) in b.chunks_exact(n).enumerate() {
            for (out, a) in out.chunks_exact_mut(n).zip(a.chunks_exact(k)) {
                let factor = a[depth];
                out.iter_mut()
                    .zip(b)
                    .for_each(|(out, b)| *out += factor * b);
            }
        }
    }
    out
}

/// Rounds rows of f32 into one matrix of a batch.
///
/// # Safety
/// The matrix lies in a live tensor that nothing else touches.
unsafe fn write(matrix: &Matrix, index: usize, columns: usize, rows: &[f32]) {
    let first = index * matrix.batch_stride;
    for (row, values) in rows.chunks_exact(columns).enumerate() {
        for (column, value) in values.iter().enumerate() {
            let offset = first + row * matrix.row_stride + column;
            match matrix.dtype {
                // SAFETY: the caller's promise.
                DType::F32 => unsafe {
                    *matrix.pointer.cast_mut().cast::<f32>().add(offset) = *value;
                },
                // SAFETY: the caller's promise.
                _ => unsafe {
                    *matrix.pointer.cast_mut().cast::<bf16>().add(offset) = bf16::from_f32(*value);
                },
            }
        }
    }
}
