//! The type in which each element of a layout is stored.

use crate::{Cover, DType};
use std::ops::Range;
use std::rc::Rc;

/// How a layout's elements are stored. Some tensors have their own type, or are codes; all others share one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Types {
    /// Ranges of tensors that are not of the shared type, in order.
    own: Rc<[(Range<usize>, StoredAs)]>,
    common: DType,
}

/// How the elements of a range are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoredAs {
    /// As numbers of a type.
    Numbers(DType),
    /// As a matrix of codes that takes so many bytes.
    Codes(usize),
}

/// Consecutive elements that are stored in one way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredRange {
    pub(crate) elements: Range<usize>,
    pub(crate) stored: StoredAs,
    /// All elements of the matrix, if they are codes.
    matrix: Range<usize>,
}

/// Pieces of a matrix of codes have a multiple of this many bytes, so that what lies behind a piece stays aligned.
const CUT_BYTES: usize = 256;

impl StoredRange {
    /// The type of its numbers; none if they are codes.
    pub(crate) fn dtype(&self) -> Option<DType> {
        match self.stored {
            StoredAs::Numbers(dtype) => Some(dtype),
            StoredAs::Codes(_) => None,
        }
    }

    /// Bytes between its first element and another.
    pub(crate) fn byte(&self, element: usize) -> usize {
        match self.stored {
            StoredAs::Numbers(dtype) => (element - self.elements.start) * dtype.size_in_bytes(),
            StoredAs::Codes(_) => self.cut_at(element) - self.cut_at(self.elements.start),
        }
    }

    /// Where a cut before an element falls among the matrix's bytes: in proportion, rounded down to [`CUT_BYTES`]. Codes and
    /// scales do not line up with elements, so all that matters is that every rank cuts alike.
    fn cut_at(&self, element: usize) -> usize {
        let StoredAs::Codes(bytes) = self.stored else {
            panic!("{:?} must be of one matrix of codes", self.elements);
        };
        // The experts of a layer have so many elements that the product does not fit 64 bits.
        let share = (element - self.matrix.start) as u128 * bytes as u128;
        (share / self.matrix.len() as u128) as usize / CUT_BYTES * CUT_BYTES
    }

    pub(crate) fn bytes(&self) -> usize {
        self.byte(self.elements.end)
    }
}

impl From<DType> for Types {
    /// One type for all.
    fn from(common: DType) -> Types {
        Types::new(Rc::new([]), common)
    }
}

impl Types {
    pub(crate) fn new(own: Rc<[(Range<usize>, StoredAs)]>, common: DType) -> Types {
        Types { own, common }
    }

    /// The same, but for some elements, which are numbers of another type.
    ///
    /// # Panics
    /// If some of these have a type of their own.
    pub fn with(&self, cover: &Cover, dtype: DType) -> Types {
        let others = cover.ranges().iter().cloned();
        let mut own = self.own.to_vec();
        own.extend(others.map(|range| (range, StoredAs::Numbers(dtype))));
        own.sort_by_key(|(range, _)| range.start);
        let mut pairs = own.windows(2);
        assert!(
            pairs.all(|pair| pair[0].0.end <= pair[1].0.start),
            "some of these elements have a type of their own already"
        );
        Types::new(own.into(), self.common)
    }

    /// The type of all tensors without their own.
    pub fn common(&self) -> DType {
        self.common
    }

    /// The type of an element; of codes, that in which their values are read and set.
    pub fn of(&self, element: usize) -> DType {
        let before = self.own.partition_point(|(range, _)| range.end <= element);
        let own = self.own.get(before);
        match own.filter(|(range, _)| range.start <= element) {
            Some((_, StoredAs::Numbers(dtype))) => *dtype,
            Some((_, StoredAs::Codes(_))) | None => self.common,
        }
    }

    /// The elements of a cover, in order, split where their type changes.
    pub fn runs(&self, cover: &Cover) -> Vec<(Range<usize>, DType)> {
        let runs = self.stored(cover).into_iter();
        runs.map(|run| (run.elements.clone(), run.dtype().unwrap_or(self.common)))
            .collect()
    }

    /// As [`Types::runs`], with each matrix of codes as a run of its own.
    pub(crate) fn stored(&self, cover: &Cover) -> Vec<StoredRange> {
        let runs = cover.ranges().iter().flat_map(|range| self.cut(range));
        runs.collect()
    }

    fn cut(&self, range: &Range<usize>) -> Vec<StoredRange> {
        let first = self.own.partition_point(|(own, _)| own.end <= range.start);
        let within = self.own[first..].iter();
        let within = within.take_while(|(own, _)| own.start < range.end);
        let run = |elements: Range<usize>, stored, matrix| StoredRange {
            elements,
            stored,
            matrix,
        };
        let common = |elements: Range<usize>| {
            let matrix = elements.clone();
            run(elements, StoredAs::Numbers(self.common), matrix)
        };
        let (mut runs, mut next) = (Vec::new(), range.start);
        for (tensor, stored) in within {
            let own = tensor.start.max(range.start)..tensor.end.min(range.end);
            runs.push(common(next..own.start));
            next = own.end;
            runs.push(run(own, *stored, tensor.clone()));
        }
        runs.push(common(next..range.end));
        runs.retain(|run| !run.elements.is_empty());
        runs
    }

    /// Bytes of the elements of a cover.
    pub fn bytes(&self, cover: &Cover) -> usize {
        let runs = self.stored(cover).into_iter();
        runs.map(|run| run.bytes()).sum()
    }

    /// Which bytes of a matrix of codes lie at some of its elements, padding included.
    ///
    /// # Panics
    /// If the elements are not all of one matrix of codes.
    pub fn byte_range_of_codes(&self, range: &Range<usize>) -> Range<usize> {
        match &self.cut(range)[..] {
            [run] => run.cut_at(range.start)..run.cut_at(range.end),
            _ => panic!("{range:?} must be of one matrix of codes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cover_is_cut_where_types_change() {
        let own = [(256..512, DType::F32), (512..768, DType::U8)];
        let own = own.map(|(range, dtype)| (range, StoredAs::Numbers(dtype)));
        let types = Types::new(own.into(), DType::BF16);
        let element = |element| types.of(element);
        assert_eq!(
            [0, 255, 256, 511, 512, 767, 768].map(element),
            [
                DType::BF16,
                DType::BF16,
                DType::F32,
                DType::F32,
                DType::U8,
                DType::U8,
                DType::BF16
            ]
        );
        let cover = Cover::new([0..300, 600..1000]);
        let runs = [
            (0..256, DType::BF16),
            (256..300, DType::F32),
            (600..768, DType::U8),
            (768..1000, DType::BF16),
        ];
        assert_eq!(types.runs(&cover), runs);
        assert_eq!(types.bytes(&cover), 512 + 176 + 168 + 464);
        assert_eq!(Types::from(DType::F32).bytes(&cover), 4 * 700);
        let more = types.with(&Cover::new([0..256, 768..800]), DType::F8E4M3);
        let found = [0, 255, 256, 768, 799, 800].map(|element| more.of(element));
        let [code, f32] = [DType::F8E4M3, DType::F32];
        assert_eq!(found, [code, code, f32, code, code, DType::BF16]);
        assert_eq!(more.bytes(&cover), 256 + 176 + 168 + 32 + 2 * 200);
    }

    #[test]
    fn pieces_of_codes_have_all_their_bytes_once() {
        let own = [
            (256..8448, StoredAs::Codes(4608)),
            (8448..12_544, StoredAs::Codes(2304)),
        ];
        let types = Types::new(own.into(), DType::BF16);
        let bytes = |range: Range<usize>| types.bytes(&Cover::new([range]));
        assert_eq!(bytes(0..12_800), 512 + 4608 + 2304 + 512);
        for cut in (256..12_544).step_by(256) {
            let [before, after] = [bytes(0..cut), bytes(cut..12_800)];
            assert_eq!(before + after, bytes(0..12_800));
            assert_eq!((before % CUT_BYTES, after % CUT_BYTES), (0, 0));
        }
        assert_eq!(types.byte_range_of_codes(&(4352..8448)), 2304..4608);
        assert_eq!(types.byte_range_of_codes(&(8448..9000)), 0..256);
        assert_eq!(types.of(300), DType::BF16);
    }

    /// Elements times bytes do not fit 64 bits: gate and up of a layer of DeepSeek-V3's experts.
    #[test]
    fn a_matrix_of_billions_is_cut() {
        let (elements, bytes) = (256 * 4096 * 7168, 3_876_000_000);
        let types = Types::new([(0..elements, StoredAs::Codes(bytes))].into(), DType::BF16);
        let half = types.byte_range_of_codes(&(elements / 2..elements));
        assert_eq!(half, bytes / 2 / CUT_BYTES * CUT_BYTES..bytes);
    }
}
