//! Which elements of a layout a buffer holds, if it does not hold all.

use crate::Rank;
use std::iter;
use std::ops::Range;

/// Ranges of a layout that lie one after the other in a buffer. Every bound is a multiple of the padding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cover {
    /// The ranges in ascending order. None is empty, and no two touch.
    ranges: Vec<Range<usize>>,
}

impl Cover {
    /// Makes a cover of ranges in any order. They may touch but not overlap.
    pub fn new(ranges: impl IntoIterator<Item = Range<usize>>) -> Cover {
        let mut sorted: Vec<Range<usize>> = ranges.into_iter().collect();
        sorted.retain(|range| !range.is_empty());
        sorted.sort_by_key(|range| range.start);
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for range in sorted {
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        Cover { ranges }
    }

    /// Joins covers that have no element in common.
    pub fn joined(covers: impl IntoIterator<Item = Cover>) -> Cover {
        Cover::new(covers.into_iter().flat_map(|cover| cover.ranges))
    }

    /// The ranges, in order.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Number of elements in all ranges.
    pub fn elements(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// The elements that lie within `range`.
    pub fn within(&self, range: &Range<usize>) -> Cover {
        let first = self.ranges.partition_point(|own| own.end <= range.start);
        let others = self.ranges[first..].iter();
        let held = others.take_while(|own| own.start < range.end);
        let clipped = |own: &Range<usize>| own.start.max(range.start)..own.end.min(range.end);
        Cover::new(held.map(clipped))
    }

    /// The elements that lie within the other cover too.
    pub fn within_all(&self, other: &Cover) -> Cover {
        let ranges = other.ranges.iter();
        Cover::joined(ranges.map(|range| self.within(range)))
    }

    /// One of `rank.of` equal parts. Their number must divide the elements.
    pub(crate) fn part(&self, rank: Rank) -> Cover {
        let elements = self.elements() / rank.of;
        self.lying_at(&(rank.number * elements..(rank.number + 1) * elements))
    }

    /// The elements at the rows `rows` of the buffer.
    pub fn lying_at(&self, rows: &Range<usize>) -> Cover {
        let mut start = 0;
        let clipped = self.ranges.iter().map(|own| {
            let first = start;
            start += own.len();
            let rows = rows.start.clamp(first, start)..rows.end.clamp(first, start);
            own.start + rows.start - first..own.start + rows.end - first
        });
        Cover::new(clipped)
    }

    /// The elements that the other cover does not have.
    pub fn without(&self, other: &Cover) -> Cover {
        let ends = other.ranges.iter().map(|hole| hole.end);
        let starts = other.ranges.iter().map(|hole| hole.start);
        let gaps = iter::once(0).chain(ends).zip(starts.chain([usize::MAX]));
        Cover::joined(gaps.map(|(start, end)| self.within(&(start..end))))
    }

    /// Where a range of the layout lies in the buffer; none unless one of the buffer's ranges holds all of it.
    pub fn rows(&self, range: &Range<usize>) -> Option<Range<usize>> {
        let before = self.ranges.partition_point(|own| own.end <= range.start);
        let own = self.ranges.get(before)?;
        let holds = own.start <= range.start && range.end <= own.end;
        holds.then(|| {
            let start: usize = self.ranges[..before].iter().map(Range::len).sum();
            let first = start + range.start - own.start;
            first..first + range.len()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_lie_one_after_the_other() {
        let cover = Cover::new([768..1024, 0..256, 256..512, 2048..2048]);
        assert_eq!(cover.ranges(), [0..512, 768..1024]);
        assert_eq!(cover.elements(), 768);
        assert_eq!(cover.rows(&(100..300)), Some(100..300));
        assert_eq!(cover.rows(&(800..1024)), Some(544..768));
        for outside in [500..600, 512..768, 900..1100, 512..512] {
            assert_eq!(cover.rows(&outside), None, "{outside:?}");
        }
    }

    #[test]
    fn parts_of_a_cover_are_covers() {
        let cover = Cover::new([0..512, 768..1024]);
        assert_eq!(cover.within(&(256..900)).ranges(), [256..512, 768..900]);
        assert_eq!(cover.lying_at(&(256..600)).ranges(), [256..512, 768..856]);
        assert_eq!(cover.lying_at(&(512..768)), cover.within(&(768..1024)));
        let common = cover.within_all(&Cover::new([0..8, 500..800]));
        assert_eq!(common.ranges(), [0..8, 500..512, 768..800]);
        let holes = Cover::new([256..768, 1000..2000]);
        assert_eq!(cover.without(&holes).ranges(), [0..256, 768..1000]);
        assert_eq!(cover.without(&Cover::new([])), cover);
        assert_eq!(cover.without(&cover).elements(), 0);
    }
}
