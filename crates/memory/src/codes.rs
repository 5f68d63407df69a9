//! Matrices that are stored as codes of a few bits.

use std::ops::Range;

/// How the elements of a frozen matrix are stored as codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// 8 bits: entries of a dynamic map, by blocks of 256 with the largest magnitude (`absmax`) of each in f32.
    EightBit,
    /// 4 bits: NormalFloat, by blocks of 64. The `absmax` of the blocks, less their mean (`offset`), are 8-bit codes
    /// themselves (Dettmers et al. 2023, "QLoRA").
    Nf4,
    /// 4 bits: numbers of one bit of mantissa, by blocks of 32 that share a power of two, of 8 bits (OCP Microscaling Formats 1.0,
    /// "MXFP4").
    Mxfp4,
}

/// Where the parts of a matrix lie among its bytes. Each part starts at a multiple of 16 bytes, and
/// the whole is padded to a multiple of 256.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodePlaces {
    /// The codes. Of two 4-bit ones in a byte, the first is the upper half, of [`Codes::Mxfp4`] the lower.
    pub codes: Range<usize>,
    /// The codes of the `absmax`, or the exponents of the blocks' powers of two; empty where there are f32 `absmax` alone.
    pub absmax_codes: Range<usize>,
    /// f32 `absmax`: of the blocks of codes, or of the blocks of their `absmax`; empty where there are powers of two.
    pub absmax: Range<usize>,
    /// The f32 that is added to each `absmax` of a block; empty where there is none.
    pub offset: Range<usize>,
    /// Bytes of all parts, with the padding behind each.
    pub bytes: usize,
}

impl Codes {
    /// Values that share an f32 `absmax`, of 8-bit codes.
    pub const BLOCK: usize = 256;
    /// Elements that share an `absmax` under [`Codes::Nf4`].
    pub const NF4_BLOCK: usize = 64;
    /// Elements that share a power of two under [`Codes::Mxfp4`].
    pub const MXFP4_BLOCK: usize = 32;

    /// Elements and bytes of a block of codes.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Codes::EightBit => (Codes::BLOCK, Codes::BLOCK),
            Codes::Nf4 => (Codes::NF4_BLOCK, Codes::NF4_BLOCK / 2),
            Codes::Mxfp4 => (Codes::MXFP4_BLOCK, Codes::MXFP4_BLOCK / 2),
        }
    }

    /// Its name in settings and plans.
    pub const fn as_str(self) -> &'static str {
        match self {
            Codes::EightBit => "8bit",
            Codes::Nf4 => "nf4",
            Codes::Mxfp4 => "mxfp4",
        }
    }

    /// Where the parts of a matrix of so many elements lie.
    pub fn places(self, elements: usize) -> CodePlaces {
        let mut bytes: usize = 0;
        let mut place = |part: usize| {
            let start = bytes;
            bytes = (start + part).next_multiple_of(16);
            start..start + part
        };
        let f32s = |count: usize| count * size_of::<f32>();
        let nf4_blocks = elements.div_ceil(Codes::NF4_BLOCK);
        let [codes, absmax_codes, absmax, offset] = match self {
            Codes::EightBit => [elements, 0, f32s(elements.div_ceil(Codes::BLOCK)), 0],
            Codes::Nf4 => [
                elements.div_ceil(2),
                nf4_blocks,
                f32s(nf4_blocks.div_ceil(Codes::BLOCK)),
                f32s(1),
            ],
            Codes::Mxfp4 => [
                elements.div_ceil(2),
                elements.div_ceil(Codes::MXFP4_BLOCK),
                0,
                0,
            ],
        }
        .map(&mut place);
        CodePlaces {
            codes,
            absmax_codes,
            absmax,
            offset,
            bytes: bytes.next_multiple_of(256),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_behind_another() {
        let places = Codes::Nf4.places(64 * 256 + 3);
        assert_eq!((places.codes, places.absmax_codes), (0..8194, 8208..8465));
        assert_eq!((places.absmax, places.offset), (8480..8488, 8496..8500));
        assert_eq!(places.bytes, 8704);
        let places = Codes::EightBit.places(257);
        assert_eq!((places.codes, places.absmax), (0..257, 272..280));
        assert!(places.absmax_codes.is_empty() && places.offset.is_empty());
        let places = Codes::Mxfp4.places(32 * 33);
        assert_eq!((places.codes, places.absmax_codes), (0..528, 528..561));
        assert!(places.absmax.is_empty() && places.offset.is_empty());
        assert_eq!(places.bytes, 768);
    }

    #[test]
    fn a_large_matrix_takes_little_more_than_its_codes() {
        let elements = 4096 * 14_336;
        let bits = |codes: Codes| codes.places(elements).bytes as f64 * 8.0 / elements as f64;
        assert!((bits(Codes::Nf4) - (4.0 + 0.125 + 32.0 / 16_384.0)).abs() < 1e-4);
        assert!((bits(Codes::EightBit) - 8.125).abs() < 1e-4);
        assert!((bits(Codes::Mxfp4) - 4.25).abs() < 1e-4);
    }
}
