//! Frozen matrices that are stored as codes ([`Codes`]). They stay on the device, and are widened just before their use.

use half::bf16;
use kernels::quantise::{dequantise_block, quantise_absmax, quantise_blocks};
use kernels::{DequantiseBytes, DequantiseNf4, KernelError, Kernels};
use memory::{
    Buffer, Category, CodePlaces, Codes, DType, Entry, In, Layout, Memory, Out, OutOfMemory,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// All matrices of a layout that are stored as codes.
pub(crate) struct CodedWeights {
    /// Leased as bytes (u8).
    buffer: Buffer,
    layout: Rc<Layout>,
    /// The first byte of each, by its index in the layout.
    first: BTreeMap<usize, usize>,
    /// Those of which a part was set.
    filling: BTreeMap<usize, Filling>,
}

/// A matrix that is being set, from its beginning on: only the last of its blocks tells the offset of their `absmax`.
#[derive(Default)]
struct Filling {
    /// Elements whose codes are stored.
    stored: usize,
    /// Those behind them, less than a block.
    rest: Vec<f32>,
    absmax: Vec<f32>,
}

/// The parts of a matrix.
struct Parts<'a> {
    codes: In<'a>,
    absmax_codes: In<'a>,
    absmax: In<'a>,
    offset: In<'a>,
}

impl CodedWeights {
    /// Leases them, zeroed; none if the layout has none.
    pub(crate) fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
    ) -> Result<Option<CodedWeights>, OutOfMemory> {
        let mut bytes = 0;
        let mut first = BTreeMap::new();
        for (index, entry) in layout.entries().iter().enumerate() {
            if let Some(codes) = entry.codes {
                first.insert(index, bytes);
                bytes += codes.places(entry.elements()).bytes;
            }
        }
        if first.is_empty() {
            return Ok(None);
        }
        let name = "coded_parameters";
        Ok(Some(CodedWeights {
            buffer: memory.lease_persistent(Category::Parameter, name, [bytes], DType::U8)?,
            layout: layout.clone(),
            first,
            filling: BTreeMap::new(),
        }))
    }

    /// Leased bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.buffer.bytes()
    }

    /// The matrix that has all elements of a range; none if it is not stored as codes.
    pub(crate) fn find(&self, range: &Range<usize>) -> Option<usize> {
        let unit = &self.layout.units()[self.layout.locate(range)?];
        let mut own = unit.entries.iter().copied();
        own.find(|entry| {
            self.first.contains_key(entry)
                && self.layout.entries()[*entry].range().contains(&range.start)
        })
    }

    fn entry(&self, index: usize) -> (&Entry, Codes, CodePlaces) {
        let entry = &self.layout.entries()[index];
        let codes = entry.codes.expect("it is stored as codes");
        (entry, codes, codes.places(entry.elements()))
    }

    fn parts(&self, index: usize) -> Parts<'_> {
        let (_, _, places) = self.entry(index);
        let part = |part: Range<usize>| {
            let first = self.first[&index];
            self.buffer
                .view()
                .rows(first + part.start..first + part.end)
        };
        Parts {
            codes: part(places.codes),
            absmax_codes: part(places.absmax_codes),
            absmax: part(places.absmax).cast(DType::F32),
            offset: part(places.offset).cast(DType::F32),
        }
    }

    /// Writes the values of a matrix in the type of `out`.
    pub(crate) fn widen(
        &self,
        kernels: &Kernels,
        index: usize,
        out: Out,
    ) -> Result<(), KernelError> {
        let Parts {
            codes,
            absmax_codes,
            absmax,
            offset,
        } = self.parts(index);
        match self.entry(index).1 {
            Codes::EightBit => kernels.run(DequantiseBytes { out, codes, absmax }),
            Codes::Nf4 => kernels.run(DequantiseNf4 {
                out,
                codes,
                absmax_codes,
                absmax,
                offset,
            }),
        }
    }

    /// Sets elements of a matrix from f32 or bf16. They come in the order of the matrix, from its first to its last.
    pub(crate) fn store(
        &mut self,
        kernels: &Kernels,
        (index, range): (usize, Range<usize>),
        (dtype, bytes): (DType, &[u8]),
    ) -> Result<(), KernelError> {
        let (entry, codes, places) = self.entry(index);
        let (elements, first) = (entry.elements(), range.start - entry.offset);
        let end = range.end - entry.offset;
        let mut filling = self.filling.remove(&index).unwrap_or_default();
        if first == 0 {
            filling = Filling::default();
        }
        let next = filling.stored + filling.rest.len();
        assert_eq!(first, next, "a matrix that becomes codes is set in order");
        filling.rest.extend(widened(dtype, bytes));
        let whole = match end == elements {
            true => filling.rest.len(),
            false => filling.rest.len() / Codes::BLOCK * Codes::BLOCK,
        };
        let rest = filling.rest.split_off(whole);
        let (bytes, absmax) = quantise_blocks(codes, &filling.rest);
        let (block, block_bytes) = codes.block();
        let start = places.codes.start + filling.stored / block * block_bytes;
        filling.stored += whole;
        filling.rest = rest;
        filling.absmax.extend(absmax);
        self.upload(kernels, index, (start, &bytes))?;
        if end < elements {
            self.filling.insert(index, filling);
            return Ok(());
        }
        let f32s = |values: &[f32]| values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let absmax: Vec<u8> = match codes {
            Codes::EightBit => f32s(&filling.absmax),
            Codes::Nf4 => {
                let scales = quantise_absmax(&filling.absmax);
                self.upload(kernels, index, (places.absmax_codes.start, &scales.codes))?;
                let offset: Vec<u8> = f32s(&[scales.offset]);
                self.upload(kernels, index, (places.offset.start, &offset))?;
                f32s(&scales.absmax)
            }
        };
        self.upload(kernels, index, (places.absmax.start, &absmax))
    }

    /// Sets bytes of a matrix that is codes already, from one of its bytes on ([`Codes::places`]).
    pub(crate) fn store_bytes(
        &mut self,
        kernels: &Kernels,
        index: usize,
        (start, bytes): (usize, &[u8]),
    ) -> Result<(), KernelError> {
        self.filling.remove(&index);
        self.upload(kernels, index, (start, bytes))
    }

    /// Writes bytes of a matrix, from one of its bytes on.
    fn upload(
        &mut self,
        kernels: &Kernels,
        index: usize,
        (start, bytes): (usize, &[u8]),
    ) -> Result<(), KernelError> {
        let start = self.first[&index] + start;
        let out = self.buffer.view_mut();
        kernels.upload(out.rows(start..start + bytes.len()), bytes)
    }

    /// Gives the values of some elements of a matrix as f32 or bf16.
    pub(crate) fn read(
        &self,
        kernels: &Kernels,
        (index, range): (usize, Range<usize>),
        (dtype, out): (DType, &mut [u8]),
    ) -> Result<(), KernelError> {
        let (entry, codes, _) = self.entry(index);
        let parts = self.parts(index);
        let (block, bytes) = codes.block();
        let wanted = range.start - entry.offset..range.end - entry.offset;
        let blocks = wanted.start / block..wanted.end.div_ceil(block);
        let end = (blocks.end * bytes).min(parts.codes.elements());
        let found = downloaded(kernels, parts.codes.rows(blocks.start * bytes..end))?;
        let absmax = downloaded(kernels, parts.absmax)?;
        let absmax: Vec<f32> = f32s(&absmax);
        let (absmax_codes, offset) = match codes {
            Codes::EightBit => (Vec::new(), 0.0),
            Codes::Nf4 => (
                downloaded(kernels, parts.absmax_codes)?,
                f32s(&downloaded(kernels, parts.offset)?)[0],
            ),
        };
        let mut values = vec![0.0; entry.elements().min(blocks.end * block) - blocks.start * block];
        let numbered = blocks.clone().zip(values.chunks_mut(block));
        for ((number, values), bytes) in numbered.zip(found.chunks(bytes)) {
            let code = absmax_codes.get(number).copied();
            let absmax = match code {
                None => absmax[number],
                Some(_) => absmax[number / Codes::BLOCK],
            };
            dequantise_block((bytes, code), (absmax, offset), values);
        }
        narrow(dtype, &values[wanted.start - blocks.start * block..], out);
        Ok(())
    }
}

fn downloaded(kernels: &Kernels, view: In) -> Result<Vec<u8>, KernelError> {
    let mut bytes = vec![0; view.bytes()];
    kernels.download(&mut bytes, view)?;
    Ok(bytes)
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    let all = bytes.as_chunks().0.iter().copied();
    all.map(f32::from_ne_bytes).collect()
}

/// f32 or bf16, widened to f32.
fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::BF16 => {
            let halves = bytes.as_chunks().0.iter().copied();
            let halves = halves.map(|half| u32::from(u16::from_ne_bytes(half)));
            halves.map(|half| f32::from_bits(half << 16)).collect()
        }
        _ => f32s(bytes),
    }
}

/// Writes the values as f32, or rounded to bf16.
fn narrow(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    match dtype {
        DType::BF16 => {
            for (half, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *half = bf16::from_f32(*value).to_ne_bytes();
            }
        }
        _ => {
            for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *bytes = value.to_ne_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::cpu::Cpu;
    use kernels::quantise::round_to_codes;
    use memory::{Layer, LayoutBuilder, Role};

    /// Whole blocks, and a rest with an odd number of elements.
    const SHAPE: [usize; 2] = [67, 301];
    const ELEMENTS: usize = SHAPE[0] * SHAPE[1];

    /// Parts of files end anywhere.
    #[test]
    fn a_matrix_is_set_and_read_in_parts() {
        let memory = Memory::host();
        let kernels: Box<Kernels> = Box::new(Cpu::new(&memory, DType::F32).unwrap());
        let values = |seed: usize| -> Vec<f32> {
            let value = |at| ((at * 7919 + seed) % 1013) as f32 / 1013.0 - 0.4;
            (0..ELEMENTS).map(value).collect()
        };
        for codes in [Codes::EightBit, Codes::Nf4] {
            let mut builder = LayoutBuilder::default();
            for name in ["one", "other"] {
                builder.add_as((Role::Frozen, None), Layer::Block(0), name, &SHAPE);
                builder.as_codes(codes);
            }
            let layout = Rc::new(builder.build());
            let mut coded = CodedWeights::lease(&memory, &layout).unwrap().unwrap();
            let bytes = 2 * codes.places(ELEMENTS).bytes as u64;
            assert_eq!(coded.bytes(), memory::round_up(bytes));
            // Matrices are set side by side, and again.
            for seed in [0, 5] {
                for start in (0..ELEMENTS).step_by(1000) {
                    for (index, entry) in layout.entries().iter().enumerate() {
                        let part = start..ELEMENTS.min(start + 1000);
                        let values = &values(seed + index)[part.clone()];
                        let range = entry.offset + part.start..entry.offset + part.end;
                        assert_eq!(coded.find(&range), Some(index));
                        let bytes = (DType::F32, bytemuck::cast_slice(values));
                        coded.store(&kernels, (index, range), bytes).unwrap();
                    }
                }
            }
            for (index, entry) in layout.entries().iter().enumerate() {
                let mut expected = values(5 + index);
                round_to_codes(codes, &mut expected);
                assert_ne!(expected, values(5 + index));
                let mut out = vec![0.0; ELEMENTS];
                let view = Out::of_slice(&mut out, SHAPE);
                coded.widen(&kernels, index, view).unwrap();
                assert_eq!(out, expected);
                let part = 123..ELEMENTS - 77;
                let range = entry.offset + part.start..entry.offset + part.end;
                let mut read = vec![0f32; part.len()];
                let bytes = (DType::F32, bytemuck::cast_slice_mut(&mut read));
                coded.read(&kernels, (index, range), bytes).unwrap();
                assert_eq!(read, expected[part]);
            }
        }
    }
}
