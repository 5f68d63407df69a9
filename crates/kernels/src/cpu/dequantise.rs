//! Matrices that are stored as codes become matrices of plain numbers.

use super::dispatch::by_dtype;
use super::simd::Real;
use crate::operation::{DequantiseBytes, DequantiseMxfp4, DequantiseNf4};
use crate::quantise::{SIGNED, mxfp4_values, nf4_values};
use memory::Codes;
use rayon::prelude::*;

/// Blocks of 8-bit codes and of MXFP4 that one task takes.
const BLOCKS: usize = 64;

pub(super) fn dequantise_bytes(op: DequantiseBytes) {
    by_dtype!(op.out.dtype(), dequantise_bytes_of(op));
}

fn dequantise_bytes_of<T: Real>(DequantiseBytes { out, codes, absmax }: DequantiseBytes) {
    let at_a_time = BLOCKS * Codes::BLOCK;
    let out = out.slice_mut::<T>().par_chunks_mut(at_a_time);
    let codes = codes.slice::<u8>().par_chunks(at_a_time);
    let absmax = absmax.slice::<f32>().par_chunks(BLOCKS);
    out.zip(codes)
        .zip(absmax)
        .for_each(|((out, codes), absmax)| {
            let blocks = out.chunks_mut(Codes::BLOCK).zip(codes.chunks(Codes::BLOCK));
            for ((out, codes), absmax) in blocks.zip(absmax) {
                for (out, code) in out.iter_mut().zip(codes) {
                    *out = T::narrow(SIGNED.values[usize::from(*code)] * absmax);
                }
            }
        });
}

pub(super) fn dequantise_nf4(op: DequantiseNf4) {
    by_dtype!(op.out.dtype(), dequantise_nf4_of(op));
}

fn dequantise_nf4_of<T: Real>(op: DequantiseNf4) {
    let offset = op.offset.slice::<f32>()[0];
    // A task takes the blocks that share an `absmax`.
    let at_a_time = Codes::BLOCK * Codes::NF4_BLOCK;
    let out = op.out.slice_mut::<T>().par_chunks_mut(at_a_time);
    let codes = op.codes.slice::<u8>().par_chunks(at_a_time / 2);
    let absmax_codes = op.absmax_codes.slice::<u8>().par_chunks(Codes::BLOCK);
    let all = out
        .zip(codes)
        .zip(absmax_codes)
        .zip(op.absmax.slice::<f32>());
    all.for_each(|(((out, codes), absmax_codes), absmax)| {
        let blocks = out
            .chunks_mut(Codes::NF4_BLOCK)
            .zip(codes.chunks(Codes::NF4_BLOCK / 2));
        for ((out, codes), absmax_code) in blocks.zip(absmax_codes) {
            let values = nf4_values(*absmax_code, *absmax, offset).map(T::narrow);
            for (out, byte) in out.chunks_mut(2).zip(codes) {
                out[0] = values[usize::from(byte >> 4)];
                if let Some(second) = out.get_mut(1) {
                    *second = values[usize::from(byte & 15)];
                }
            }
        }
    });
}

pub(super) fn dequantise_mxfp4(op: DequantiseMxfp4) {
    by_dtype!(op.out.dtype(), dequantise_mxfp4_of(op));
}

fn dequantise_mxfp4_of<T: Real>(op: DequantiseMxfp4) {
    let at_a_time = BLOCKS * Codes::MXFP4_BLOCK;
    let out = op.out.slice_mut::<T>().par_chunks_mut(at_a_time);
    let codes = op.codes.slice::<u8>().par_chunks(at_a_time / 2);
    let exponents = op.exponents.slice::<u8>().par_chunks(BLOCKS);
    out.zip(codes)
        .zip(exponents)
        .for_each(|((out, codes), exponents)| {
            let blocks = out
                .chunks_mut(Codes::MXFP4_BLOCK)
                .zip(codes.chunks(Codes::MXFP4_BLOCK / 2));
            for ((out, codes), exponent) in blocks.zip(exponents) {
                let values = mxfp4_values(*exponent).map(T::narrow);
                for (out, byte) in out.chunks_mut(2).zip(codes) {
                    out[0] = values[usize::from(byte & 15)];
                    if let Some(second) = out.get_mut(1) {
                        *second = values[usize::from(byte >> 4)];
                    }
                }
            }
        });
}
