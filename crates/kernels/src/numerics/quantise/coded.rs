//! Whole matrices as codes, on the host.

use super::{
    QuantisedAbsmax, SIGNED, mxfp4_exponent, mxfp4_values, nf4_values, quantise_absmax,
    quantise_mxfp4, quantise_nf4,
};
use memory::Codes;
use rayon::prelude::*;

/// Quantises values from the beginning of a block on: their codes, and the `absmax` of each block, or its power of two.
pub fn quantise_blocks(codes: Codes, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (elements, bytes) = codes.block();
    let mut out = vec![0; (values.len() * bytes).div_ceil(elements)];
    let blocks = values.par_chunks(elements).zip(out.par_chunks_mut(bytes));
    let absmax = blocks.with_min_len(256).map(|(values, out)| match codes {
        Codes::EightBit => SIGNED.quantise(values, out),
        Codes::Nf4 => quantise_nf4(values, out),
        Codes::Mxfp4 => quantise_mxfp4(values, out),
    });
    let absmax = absmax.collect();
    (out, absmax)
}

/// The factor that turns the codes of a block into values.
#[derive(Clone, Copy, Debug)]
pub enum BlockScale {
    /// Of 8-bit codes: the block's own `absmax`.
    Absmax(f32),
    /// Of NF4: the code of the block's `absmax`, and the `absmax` and offset of that.
    Coded {
        /// The code.
        code: u8,
        /// The `absmax` of the code's block.
        absmax: f32,
        /// The number added to the value of `code` times that; the sum is the block's own `absmax`.
        offset: f32,
    },
    /// Of MXFP4: the exponent of the block's power of two.
    Exponent(u8),
}

/// The values of the codes of one block, or of its beginning.
pub fn dequantise_block(bytes: &[u8], scale: BlockScale, values: &mut [f32]) {
    let (of, shifts) = match scale {
        BlockScale::Absmax(absmax) => return SIGNED.dequantise(bytes, absmax, values),
        BlockScale::Coded {
            code,
            absmax,
            offset,
        } => (nf4_values(code, absmax, offset), [4, 0]),
        BlockScale::Exponent(exponent) => (mxfp4_values(exponent), [0, 4]),
    };
    for (pair, byte) in values.chunks_mut(2).zip(bytes) {
        for (value, shift) in pair.iter_mut().zip(shifts) {
            *value = of[usize::from(byte >> shift & 15)];
        }
    }
}

/// Replaces the elements of a matrix by what their codes stand for.
pub fn round_to_codes(codes: Codes, values: &mut [f32]) {
    let (elements, bytes) = codes.block();
    let (out, scales) = quantise_blocks(codes, values);
    let absmax = match codes {
        Codes::Nf4 => quantise_absmax(&scales),
        Codes::EightBit | Codes::Mxfp4 => QuantisedAbsmax::default(),
    };
    let scale = |block: usize| match codes {
        Codes::EightBit => BlockScale::Absmax(scales[block]),
        Codes::Nf4 => BlockScale::Coded {
            code: absmax.codes[block],
            absmax: absmax.absmax[block / Codes::BLOCK],
            offset: absmax.offset,
        },
        Codes::Mxfp4 => BlockScale::Exponent(mxfp4_exponent(scales[block])),
    };
    let blocks = values.par_chunks_mut(elements).zip(out.par_chunks(bytes));
    blocks
        .enumerate()
        .for_each(|(number, (values, bytes))| dequantise_block(bytes, scale(number), values));
}
