//! The type in which each element of a layout is stored.

use crate::{Cover, DType};
use std::ops::Range;
use std::rc::Rc;

/// The types of a layout's elements. Some tensors have their own type; all others share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Types {
    /// Ranges of tensors that have their own type, in order.
    own: Rc<[(Range<usize>, DType)]>,
    common: DType,
}

impl From<DType> for Types {
    /// One type for all.
    fn from(common: DType) -> Types {
        Types::new(Rc::new([]), common)
    }
}

impl Types {
    pub(crate) fn new(own: Rc<[(Range<usize>, DType)]>, common: DType) -> Types {
        Types { own, common }
    }

    /// The type of all tensors without their own.
    pub fn common(&self) -> DType {
        self.common
    }

    /// The type of an element.
    pub fn of(&self, element: usize) -> DType {
        let before = self.own.partition_point(|(range, _)| range.end <= element);
        let own = self.own.get(before);
        let own = own.filter(|(range, _)| range.start <= element);
        own.map_or(self.common, |(_, dtype)| *dtype)
    }

    /// The elements of a cover, in order, split where their type changes.
    pub fn runs(&self, cover: &Cover) -> Vec<(Range<usize>, DType)> {
        let runs = cover.ranges().iter().flat_map(|range| self.cut(range));
        runs.collect()
    }

    fn cut(&self, range: &Range<usize>) -> Vec<(Range<usize>, DType)> {
        let first = self.own.partition_point(|(own, _)| own.end <= range.start);
        let within = self.own[first..].iter();
        let within = within.take_while(|(own, _)| own.start < range.end);
        let (mut runs, mut next) = (Vec::new(), range.start);
        for (own, dtype) in within {
            let own = own.start.max(range.start)..own.end.min(range.end);
            runs.push((next..own.start, self.common));
            next = own.end;
            runs.push((own, *dtype));
        }
        runs.push((next..range.end, self.common));
        runs.retain(|(run, _)| !run.is_empty());
        runs
    }

    /// Bytes of the elements of a cover.
    pub fn bytes(&self, cover: &Cover) -> usize {
        let runs = self.runs(cover).into_iter();
        runs.map(|(run, dtype)| run.len() * dtype.size_in_bytes())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cover_is_cut_where_types_change() {
        let own = [(256..512, DType::F32), (512..768, DType::U8)];
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
    }
}
