//! Whole matrices as codes, on the host.

use super::{SIGNED, nf4_values, quantise_absmax, quantise_nf4};
use memory::Codes;
use rayon::prelude::*;

/// Quantises values from the beginning of a block on: their codes, and the `absmax` of each block.
pub fn quantise_blocks(codes: Codes, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (elements, bytes) = codes.block();
    let mut out = vec![0; (values.len() * bytes).div_ceil(elements)];
    let blocks = values.par_chunks(elements).zip(out.par_chunks_mut(bytes));
    let absmax = blocks.with_min_len(256).map(|(values, out)| match codes {
        Codes::EightBit => SIGNED.quantise(values, out),
        Codes::Nf4 => quantise_nf4(values, out),
    });
    let absmax = absmax.collect();
    (out, absmax)
}

/// The values of the codes of one block, or of its beginning. Of 8-bit codes, `absmax_code` is none, and `absmax` the
/// block's own; otherwise it belongs to the block's code, above `offset`.
pub fn dequantise_block(
    (bytes, absmax_code): (&[u8], Option<u8>),
    (absmax, offset): (f32, f32),
    values: &mut [f32],
) {
    let Some(absmax_code) = absmax_code else {
        return SIGNED.dequantise(bytes, absmax, values);
    };
    let of = nf4_values(absmax_code, absmax, offset);
    for (pair, byte) in values.chunks_mut(2).zip(bytes) {
        pair[0] = of[usize::from(byte >> 4)];
        if let Some(second) = pair.get_mut(1) {
            *second = of[usize::from(byte & 15)];
        }
    }
}

/// Replaces the elements of a matrix by what their codes stand for.
pub fn round_to_codes(codes: Codes, values: &mut [f32]) {
    let (elements, bytes) = codes.block();
    let (out, absmax) = quantise_blocks(codes, values);
    let blocks = values.par_chunks_mut(elements).zip(out.par_chunks(bytes));
    match codes {
        Codes::EightBit => blocks.zip(&absmax).for_each(|((values, out), absmax)| {
            dequantise_block((out, None), (*absmax, 0.0), values);
        }),
        Codes::Nf4 => {
            let scales = quantise_absmax(&absmax);
            let numbered = blocks.zip(&scales.codes).enumerate();
            numbered.for_each(|(number, ((values, out), code))| {
                let absmax = scales.absmax[number / Codes::BLOCK];
                dequantise_block((out, Some(*code)), (absmax, scales.offset), values);
            });
        }
    }
}
