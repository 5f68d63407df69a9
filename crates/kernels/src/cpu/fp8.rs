//! Tensors as codes of FP8, and their products: codes become bf16, which has their values times a scale exactly.

use super::dispatch::by_dtype;
use super::products::{Added, CodeValues, multiply_codes};
use super::simd::{CHUNK, Real, vectorized};
use super::{Cpu, Shared, part, shared};
use crate::fp8::Fp8;
use crate::operation::{
    AbsMax, OutputForm, Quantise, QuantiseTransposed, ScaledMatmul, TransposeCodes,
};
use half::bf16;
use memory::{DType, In, Out};
use rayon::prelude::*;

/// Rows and columns of what one task transposes.
const PATCH: usize = 64;

pub(super) fn abs_max(op: AbsMax) {
    by_dtype!(op.x.dtype(), abs_max_of(op));
}

/// Finds the largest magnitude of what an operation has made, if it is wanted.
pub(super) fn find_largest<'a>(form: impl Into<OutputForm<'a>>, x: In) {
    if let OutputForm::ValuesAndLargest(out) = form.into() {
        abs_max(AbsMax { out, x });
    }
}

/// A contiguous output that tasks make in pieces: of values, or of codes where the largest magnitude is known.
#[derive(Clone, Copy)]
pub(super) enum ValuesOrCodes<T> {
    Values(Shared<T>),
    Codes { codes: Shared<u8>, factor: f32 },
}

impl<T: Real> ValuesOrCodes<T> {
    pub(super) fn of(out: Out, form: &OutputForm) -> ValuesOrCodes<T> {
        match form {
            OutputForm::Values | OutputForm::ValuesAndLargest(_) => {
                ValuesOrCodes::Values(shared(out))
            }
            OutputForm::Codes(largest) => ValuesOrCodes::Codes {
                codes: shared(out.cast(DType::U8)),
                factor: Fp8::E4m3.factor_and_scale(largest.slice::<f32>()[0])[0],
            },
        }
    }

    /// Makes so many elements from `first` on; `make` writes their values.
    ///
    /// # Safety
    /// They lie in the output, and no other task makes them.
    pub(super) unsafe fn make(self, first: usize, elements: usize, make: impl FnOnce(&mut [T])) {
        match self {
            // SAFETY: the caller's promise.
            ValuesOrCodes::Values(values) => make(unsafe { part(values, first, elements) }),
            ValuesOrCodes::Codes { codes, factor } => {
                let mut values = vec![T::narrow(0.0); elements];
                make(&mut values);
                // SAFETY: as above.
                to_e4m3(unsafe { part(codes, first, elements) }, &values, factor);
            }
        }
    }
}

fn abs_max_of<T: Real>(AbsMax { out, x }: AbsMax) {
    let parts = x.slice::<T>().par_chunks(CHUNK);
    let largest = parts.map(largest_bits).max().unwrap_or(0);
    out.slice_mut::<f32>()[0] = f32::from_bits(largest);
}

vectorized! {
    /// The largest magnitude as bits of f32, among which NaN is above all others.
    fn largest_bits<T: Real>(x: &[T]) -> u32 {
        let mut largest = 0;
        for value in x {
            largest = largest.max(value.widen().to_bits() & 0x7fff_ffff);
        }
        largest
    }
}

pub(super) fn quantise(op: Quantise) {
    by_dtype!(op.x.dtype(), quantise_of(op));
}

fn quantise_of<T: Real>(op: Quantise) {
    let format = format_of(op.codes.as_in());
    let [factor, inverse] = format.factor_and_scale(op.largest.slice::<f32>()[0]);
    op.scale.slice_mut::<f32>()[0] = inverse;
    let x = op.x.slice::<T>();
    let codes = op.codes.cast(DType::U8).slice_mut::<u8>();
    let chunks = codes.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK));
    chunks.for_each(|(codes, x)| match format {
        Fp8::E4m3 => to_e4m3(codes, x, factor),
        Fp8::E5m2 => to_e5m2(codes, x, factor),
    });
    let Some(underflows) = op.underflows else {
        return;
    };
    let (stride, part) = (
        underflows.strides()[0],
        Quantise::part(x.len(), underflows.dims()[0]),
    );
    let underflows = Shared(underflows.pointer().cast::<f32>());
    let parts = codes.par_chunks(part).zip(x.par_chunks(part));
    parts.enumerate().for_each(|(part, (codes, x))| {
        let count = count_underflows(codes, x);
        // SAFETY: the row lies within the view, which is exclusive, and is this task's alone.
        unsafe { *underflows.at(part * stride) += count as f32 };
    });
}

vectorized! {
    fn to_e4m3<T: Real>(codes: &mut [u8], x: &[T], factor: f32) {
        for (code, x) in codes.iter_mut().zip(x) {
            *code = Fp8::E4m3.code(x.widen() * factor);
        }
    }

    /// How many elements are not zero and have codes that are.
    fn count_underflows<T: Real>(codes: &[u8], x: &[T]) -> u32 {
        let mut count = 0;
        for (code, x) in codes.iter().zip(x) {
            count += u32::from(code & 0x7f == 0 && x.widen() != 0.0);
        }
        count
    }

    fn to_e5m2<T: Real>(codes: &mut [u8], x: &[T], factor: f32) {
        for (code, x) in codes.iter_mut().zip(x) {
            *code = Fp8::E5m2.code(x.widen() * factor);
        }
    }
}

fn format_of(codes: In) -> Fp8 {
    Fp8::of(codes.dtype()).expect("the check before admits only codes")
}

pub(super) fn transpose_codes(TransposeCodes { out, x }: TransposeCodes) {
    transpose(out, x, x.cast(DType::U8).slice::<u8>(), |code| code);
}

pub(super) fn quantise_transposed(op: QuantiseTransposed) {
    by_dtype!(op.x.dtype(), quantise_transposed_of(op));
}

fn quantise_transposed_of<T: Real>(op: QuantiseTransposed) {
    let [factor, inverse] = Fp8::E4m3.factor_and_scale(op.largest.slice::<f32>()[0]);
    op.scale.slice_mut::<f32>()[0] = inverse;
    let code = |value: T| Fp8::E4m3.code(value.widen() * factor);
    transpose(op.codes, op.x, op.x.slice::<T>(), code);
}

/// The transpose of the codes of `x`'s elements, padded with zeros.
fn transpose<T: Copy + Sync>(out: Out, of: In, x: &[T], code: impl Fn(T) -> u8 + Sync) {
    let [rows, columns] = [of.dims()[0], of.dims()[1]];
    let width = out.dims()[1];
    let out = out.cast(DType::U8).slice_mut::<u8>();
    let bands = out.par_chunks_mut(PATCH * width.max(1));
    bands.enumerate().for_each(|(band, out)| {
        let first = band * PATCH;
        for start in (0..width).step_by(PATCH) {
            for row in start..width.min(start + PATCH) {
                for (index, out) in out.chunks_exact_mut(width).enumerate() {
                    out[row] = match row < rows {
                        true => code(x[row * columns + first + index]),
                        false => 0,
                    };
                }
            }
        }
    });
}

/// The value of every code of a tensor with this scale.
fn values(codes: In, scale: In) -> CodeValues {
    let (format, scale) = (format_of(codes), scale.slice::<f32>()[0]);
    std::array::from_fn(|code| bf16::from_f32(format.value(code as u8) * scale))
}

pub(super) fn scaled_matmul(cpu: &Cpu, op: ScaledMatmul) {
    let (of_a, of_b) = (values(op.a, op.scales[0]), values(op.b, op.scales[1]));
    let operands = [(op.a, &of_a), (op.b, &of_b)];
    let room = cpu.packing(&[op.a.dtype()]);
    let mut room = room.expect("the check before asks for a workspace");
    let added = Added {
        bias: op.bias,
        init: op.init,
    };
    multiply_codes(op.out, operands, added, &mut room, cpu.instructions);
}
