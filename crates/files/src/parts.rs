//! Bytes that lie in one piece or in several.

use std::borrow::Cow;
use std::ops::Range;

/// Bytes whose pieces, one behind the other, may lie apart from each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts<'a> {
    /// Where each piece ends, counted over all, and the piece.
    pieces: Vec<(usize, &'a [u8])>,
}

impl<'a> Parts<'a> {
    /// Pieces in their order.
    pub fn new(pieces: impl IntoIterator<Item = &'a [u8]>) -> Parts<'a> {
        let mut end = 0;
        let ended = pieces.into_iter().map(|piece| {
            end += piece.len();
            (end, piece)
        });
        Parts {
            pieces: ended.collect(),
        }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.pieces.last().map_or(0, |(end, _)| *end)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of the bytes: as they lie where one piece has them, else copied together. No other piece is touched.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn get(&self, range: Range<usize>) -> Cow<'a, [u8]> {
        let (len, count) = (self.len(), range.len());
        assert!(range.end <= len, "{range:?} is within {len} bytes");
        let first = self.pieces.partition_point(|(end, _)| *end <= range.start);
        let pieces = self.pieces[first..].iter();
        let pieces = pieces.take_while(|(end, piece)| end - piece.len() < range.end);
        let mut within = pieces.map(|(end, piece)| {
            let start = end - piece.len();
            &piece[range.start.max(start) - start..range.end.min(*end) - start]
        });
        match within.next() {
            None => Cow::Borrowed(&[]),
            Some(piece) if piece.len() == count => Cow::Borrowed(piece),
            Some(piece) => {
                let mut gathered = Vec::with_capacity(count);
                gathered.extend_from_slice(piece);
                within.for_each(|piece| gathered.extend_from_slice(piece));
                Cow::Owned(gathered)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However bytes were cut, another cut finds the same ones; only what crosses a cut is copied.
        #[test]
        fn any_cut_is_read_through_any_other(
            len in 0usize..300,
            cuts in proptest::collection::vec(0usize..300, 0..8),
            wanted in proptest::collection::vec(0usize..300, 0..8),
        ) {
            let bytes: Vec<u8> = (0..len).map(|place| (place * 7) as u8).collect();
            let ranges = |cuts: &[usize]| {
                let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (len + 1)).collect();
                cuts.extend([0, len]);
                cuts.sort_unstable();
                let ranges = cuts.windows(2).map(|cut| cut[0]..cut[1]);
                ranges.collect::<Vec<_>>()
            };
            let written = ranges(&cuts);
            let parts = Parts::new(written.iter().map(|range| &bytes[range.clone()]));
            prop_assert_eq!(parts.len(), len);
            for range in ranges(&wanted) {
                let got = parts.get(range.clone());
                prop_assert_eq!(&*got, &bytes[range.clone()]);
                let in_one = |piece: &Range<usize>| piece.start <= range.start && range.end <= piece.end;
                let is_copied = matches!(got, Cow::Owned(_));
                prop_assert_eq!(is_copied, !range.is_empty() && !written.iter().any(in_one));
            }
        }
    }
}
