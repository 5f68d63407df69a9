//! Frozen matrices that are stored as codes ([`Codes`]): how they are set, read, and widened just before their use. Their
//! bytes lie in arenas, and are copied and sent, like those of other matrices.

use bytemuck::{Pod, cast_slice, pod_read_unaligned};
use half::bf16;
use kernels::quantise::{
    BlockScale, dequantise_block, mxfp4_exponent, quantise_absmax, quantise_blocks,
};
use kernels::{DequantiseBytes, DequantiseMxfp4, DequantiseNf4, Kernels, Result};
use memory::{Arena, Codes, DType, Entry, In, Out};
use std::ops::Range;

fn codes_of(entry: &Entry) -> Codes {
    entry.codes.expect("it is stored as codes")
}

/// Writes the values of a matrix, of which these are all bytes, in the type of `out`.
pub(crate) fn widen(kernels: &Kernels, entry: &Entry, bytes: In, out: Out) -> Result {
    let places = codes_of(entry).places(entry.elements());
    let codes = bytes.rows(places.codes);
    let absmax_codes = bytes.rows(places.absmax_codes);
    let [absmax, offset] =
        [places.absmax, places.offset].map(|part| bytes.rows(part).cast(DType::F32));
    match codes_of(entry) {
        Codes::EightBit => kernels.run(DequantiseBytes { out, codes, absmax }),
        Codes::Nf4 => kernels.run(DequantiseNf4 {
            out,
            codes,
            absmax_codes,
            absmax,
            offset,
        }),
        Codes::Mxfp4 => kernels.run(DequantiseMxfp4 {
            out,
            codes,
            exponents: absmax_codes,
        }),
    }
}

/// A matrix that is being set, from its beginning on: only the last of its blocks tells the offset of their `absmax`.
#[derive(Default)]
pub(crate) struct Filling {
    /// Elements whose codes are stored.
    stored: usize,
    /// Those behind them, less than a block.
    rest: Vec<f32>,
    /// The `absmax` of each block, or its power of two.
    absmax: Vec<f32>,
}

impl Filling {
    /// Sets the next elements, from f32 or bf16. `write` gets some bytes of the matrix at a time. Returns
    /// whether the matrix is whole.
    ///
    /// # Panics
    /// If others come next in the order of the matrix. Its first elements may come at any time, and begin it anew.
    pub(crate) fn add(
        &mut self,
        entry: &Entry,
        range: Range<usize>,
        (dtype, bytes): (DType, &[u8]),
        mut write: impl FnMut(CodeBytes) -> Result,
    ) -> Result<bool> {
        let codes = codes_of(entry);
        let places = codes.places(entry.elements());
        if range.start == entry.offset {
            *self = Filling::default();
        }
        let next = entry.offset + self.stored + self.rest.len();
        assert_eq!(range.start, next, "a matrix of codes is set in order");
        let is_whole = range.end == entry.range().end;
        self.rest.extend(widened(dtype, bytes));
        let blocks = match is_whole {
            true => self.rest.len(),
            false => self.rest.len() / Codes::BLOCK * Codes::BLOCK,
        };
        let rest = self.rest.split_off(blocks);
        let (bytes, absmax) = quantise_blocks(codes, &self.rest);
        let (block, block_bytes) = codes.block();
        let first = places.codes.start + self.stored / block * block_bytes;
        write(CodeBytes {
            first,
            bytes: &bytes,
        })?;
        self.stored += blocks;
        self.rest = rest;
        self.absmax.extend(absmax);
        if !is_whole {
            return Ok(false);
        }
        let mut write = |first, bytes: &[u8]| write(CodeBytes { first, bytes });
        match codes {
            Codes::EightBit => write(places.absmax.start, cast_slice(&self.absmax))?,
            Codes::Nf4 => {
                let scales = quantise_absmax(&self.absmax);
                write(places.absmax_codes.start, &scales.codes)?;
                write(places.offset.start, cast_slice(&[scales.offset]))?;
                write(places.absmax.start, cast_slice(&scales.absmax))?;
            }
            Codes::Mxfp4 => {
                let powers = self.absmax.iter().copied();
                let exponents: Vec<u8> = powers.map(mxfp4_exponent).collect();
                write(places.absmax_codes.start, &exponents)?;
            }
        }
        Ok(true)
    }
}

/// Some bytes of a matrix that is stored as codes.
pub struct CodeBytes<'a> {
    /// The place of the first among all bytes of the matrix ([`Codes::places`]).
    pub first: usize,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// Gives `write` the places of some bytes of a matrix in an arena, as far as it holds them, with the bytes of each. The
/// matrix is given by its elements, padding included.
pub(crate) fn set_code_bytes(
    arena: &mut Arena,
    matrix: &Range<usize>,
    set: &CodeBytes,
    mut write: impl FnMut(Out, &[u8]) -> Result,
) -> Result {
    for held in arena.held().within(matrix).ranges() {
        let own = arena.types().byte_range_of_codes(held);
        let start = own.start.max(set.first);
        let end = own.end.min(set.first + set.bytes.len());
        if start < end {
            let out = arena.raw_mut(held).rows(start - own.start..end - own.start);
            write(out, &set.bytes[start - set.first..end - set.first])?;
        }
    }
    Ok(())
}

/// Gives the values of some elements of a matrix as f32 or bf16. `bytes_of` has the bytes of the matrix.
pub(crate) fn read(
    entry: &Entry,
    range: Range<usize>,
    (dtype, out): (DType, &mut [u8]),
    bytes_of: impl Fn(Range<usize>) -> Result<Vec<u8>>,
) -> Result {
    let codes = codes_of(entry);
    let places = codes.places(entry.elements());
    let (block, bytes) = codes.block();
    let wanted = range.start - entry.offset..range.end - entry.offset;
    let blocks = wanted.start / block..wanted.end.div_ceil(block);
    let first = places.codes.start;
    let end = (first + blocks.end * bytes).min(places.codes.end);
    let found = bytes_of(first + blocks.start * bytes..end)?;
    let absmax: Vec<f32> = values_of(&bytes_of(places.absmax)?);
    let absmax_codes = bytes_of(places.absmax_codes)?;
    let offset: Vec<f32> = values_of(&bytes_of(places.offset)?);
    let scale = |block: usize| match codes {
        Codes::EightBit => BlockScale::Absmax(absmax[block]),
        Codes::Nf4 => BlockScale::Coded {
            code: absmax_codes[block],
            absmax: absmax[block / Codes::BLOCK],
            offset: offset[0],
        },
        Codes::Mxfp4 => BlockScale::Exponent(absmax_codes[block]),
    };
    let mut values = vec![0.0; entry.elements().min(blocks.end * block) - blocks.start * block];
    let numbered = blocks.clone().zip(values.chunks_mut(block));
    for ((number, values), bytes) in numbered.zip(found.chunks(bytes)) {
        dequantise_block(bytes, scale(number), values);
    }
    let first = wanted.start - blocks.start * block;
    narrow(dtype, &values[first..first + wanted.len()], out);
    Ok(())
}

/// Numbers in bytes that may lie anywhere.
fn values_of<T: Pod>(bytes: &[u8]) -> Vec<T> {
    let each = bytes.chunks_exact(size_of::<T>());
    each.map(pod_read_unaligned).collect()
}

/// f32 or bf16, widened to f32.
fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::BF16 => {
            let halves: Vec<bf16> = values_of(bytes);
            halves.into_iter().map(bf16::to_f32).collect()
        }
        _ => values_of(bytes),
    }
}

/// Writes the values as f32, or rounded to bf16.
fn narrow(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    match dtype {
        DType::BF16 => {
            let halves: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
            bytes.copy_from_slice(cast_slice(&halves));
        }
        _ => bytes.copy_from_slice(cast_slice(values)),
    }
}

#[cfg(test)]
mod tests {
    use crate::Weights;
    use kernels::Kernels;
    use kernels::cpu::Cpu;
    use kernels::quantise::round_to_codes;
    use memory::{Codes, DType, Home, Homes, Layer, LayoutBuilder, Memory, Out, Role};
    use std::rc::Rc;

    /// Whole blocks, and a rest with an odd number of elements.
    const SHAPE: [usize; 2] = [67, 301];
    const ELEMENTS: usize = SHAPE[0] * SHAPE[1];

    /// Two matrices of one unit, zero, on the device or in pinned host memory.
    fn weights(memory: &Memory, codes: Codes, home: Home) -> Weights {
        let mut builder = LayoutBuilder::default();
        for name in ["one", "other"] {
            builder.add_as((Role::Frozen, None), Layer::Block(0), name, &SHAPE);
            builder.as_codes(codes);
        }
        let homes = Homes {
            weights: home,
            ..Homes::default()
        };
        let layout = Rc::new(builder.build());
        Weights::lease(memory, &layout, DType::F32, &homes, None).unwrap()
    }

    /// Parts of files end anywhere.
    #[test]
    fn a_matrix_is_set_and_read_in_parts() {
        let memory = Memory::host();
        let values = |seed: usize| -> Vec<f32> {
            let value = |at| ((at * 7919 + seed) % 1013) as f32 / 1013.0 - 0.4;
            (0..ELEMENTS).map(value).collect()
        };
        for (codes, home) in [
            (Codes::EightBit, Home::Device),
            (Codes::Nf4, Home::Device),
            (Codes::Mxfp4, Home::Device),
            (Codes::EightBit, Home::Pinned),
            (Codes::Nf4, Home::Pinned),
            (Codes::Mxfp4, Home::Pinned),
        ] {
            let kernels: Box<Kernels> = Box::new(Cpu::new(&memory, DType::F32).unwrap());
            let mut weights = weights(&memory, codes, home.clone());
            let layout = weights.layout().clone();
            let bytes = 2 * codes.places(ELEMENTS).bytes as u64;
            match home {
                Home::Device => assert_eq!(weights.bytes(), bytes),
                _ => assert_eq!(weights.host_arena().unwrap().1, bytes),
            }
            // Matrices are set side by side, and again.
            for seed in [0, 5] {
                for start in (0..ELEMENTS).step_by(1000) {
                    for (index, entry) in layout.entries().iter().enumerate() {
                        let part = start..ELEMENTS.min(start + 1000);
                        let values = &values(seed + index)[part.clone()];
                        let range = entry.offset + part.start..entry.offset + part.end;
                        let bytes = bytemuck::cast_slice(values);
                        weights.store(&kernels, range, bytes).unwrap();
                    }
                }
            }
            for (index, entry) in layout.entries().iter().enumerate() {
                let mut expected = values(5 + index);
                round_to_codes(codes, &mut expected);
                assert_ne!(expected, values(5 + index));
                let part = 123..ELEMENTS - 77;
                let range = entry.offset + part.start..entry.offset + part.end;
                let mut read = vec![0f32; part.len()];
                let bytes = bytemuck::cast_slice_mut(&mut read);
                weights.read(&kernels, range, bytes).unwrap();
                assert_eq!(read, expected[part]);
                weights.begin_pass(&[0].into());
                weights.use_unit(&kernels, 0).unwrap();
                let mut out = vec![0.0; ELEMENTS];
                let view = Out::of_slice(&mut out, SHAPE);
                weights.widen(&kernels, index, view).unwrap();
                assert_eq!(out, expected);
                weights.end_pass(&kernels).unwrap();
            }
            let came = kernels.step_traffic().weights.h2d_bytes;
            assert_eq!(came, if home == Home::Device { 0 } else { 2 * bytes });
        }
    }
}
