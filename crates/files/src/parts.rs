//! Bytes in one part or in several, in files or in memory.

use crate::{CHUNK_BYTES, FilesError, host_room};
use safetensors::Dtype;
use std::borrow::Cow;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A tensor as it lies in files.
#[derive(Debug, Clone)]
pub struct TensorParts<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: &'a [usize],
    /// Little-endian elements, exactly as many as the shape says. Not aligned.
    pub bytes: Parts<'a>,
}

/// A sequence of bytes whose parts may lie in different places. Parts in files are read only when they are needed.
#[derive(Debug, Clone, Default)]
pub struct Parts<'a> {
    /// Each part with the place where it ends in the whole sequence.
    parts: Vec<(usize, Part<'a>)>,
}

/// Some bytes of a file.
#[derive(Debug, Clone)]
pub(crate) struct FileRange<'a> {
    pub(crate) file: &'a File,
    pub(crate) path: &'a Path,
    /// Where they are.
    pub(crate) bytes: Range<usize>,
}

impl FileRange<'_> {
    /// Reads bytes of the range from place `start` on.
    pub(crate) fn read(&self, start: usize, out: &mut [u8]) -> Result<(), FilesError> {
        let place = (self.bytes.start + start) as u64;
        let read = self.file.read_exact_at(out, place);
        read.map_err(FilesError::at("read", self.path))
    }
}

/// Bytes that lie together.
#[derive(Debug, Clone)]
enum Part<'a> {
    Memory(&'a [u8]),
    File(FileRange<'a>),
}

impl<'a> Part<'a> {
    fn len(&self) -> usize {
        match self {
            Part::Memory(bytes) => bytes.len(),
            Part::File(range) => range.bytes.len(),
        }
    }

    /// Copies some of its bytes.
    fn copy(&self, range: Range<usize>, out: &mut [u8]) -> Result<(), FilesError> {
        match self {
            Part::Memory(bytes) => out.copy_from_slice(&bytes[range]),
            Part::File(file) => file.read(range.start, out)?,
        }
        Ok(())
    }
}

impl<'a> Parts<'a> {
    /// Parts in memory, in their order.
    pub fn new(parts: impl IntoIterator<Item = &'a [u8]>) -> Parts<'a> {
        Parts::of(parts.into_iter().map(Part::Memory))
    }

    /// Parts in files, in their order.
    pub(crate) fn in_files(parts: impl IntoIterator<Item = FileRange<'a>>) -> Parts<'a> {
        Parts::of(parts.into_iter().map(Part::File))
    }

    fn of(parts: impl Iterator<Item = Part<'a>>) -> Parts<'a> {
        let mut end = 0;
        let ended = parts.map(|part| {
            end += part.len();
            (end, part)
        });
        Parts {
            parts: ended.collect(),
        }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.parts.last().map_or(0, |(end, _)| *end)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of the bytes: borrowed if one part in memory has them all, else copied. Ask for a chunk at a time, since a
    /// copy takes memory. Parts outside the range are not read.
    ///
    /// # Errors
    /// [`FilesError::File`] if a file cannot be read, [`FilesError::Memory`] if there is no memory for a copy.
    ///
    /// # Panics
    /// If the range goes beyond the last byte.
    pub fn get(&self, range: Range<usize>) -> Result<Cow<'a, [u8]>, FilesError> {
        let len = self.len();
        assert!(range.end <= len, "{range:?} is within {len} bytes");
        let first = self.parts.partition_point(|(end, _)| *end <= range.start);
        let mut parts = self.parts[first..].iter().map(|(end, part)| {
            let start = end - part.len();
            (
                start.max(range.start) - start..range.end.min(*end) - start,
                part,
            )
        });
        let Some((within, part)) = parts.next().filter(|_| !range.is_empty()) else {
            return Ok(Cow::Borrowed(&[]));
        };
        if let (Part::Memory(bytes), true) = (part, within.len() == range.len()) {
            return Ok(Cow::Borrowed(&bytes[within]));
        }
        let mut gathered = host_room(range.len())?;
        let mut rest = &mut gathered[..];
        for (within, part) in std::iter::once((within, part)).chain(parts) {
            let (own, behind) = rest.split_at_mut(within.len());
            part.copy(within, own)?;
            rest = behind;
            if rest.is_empty() {
                break;
            }
        }
        Ok(Cow::Owned(gathered))
    }

    /// Whether `others` has the same bytes.
    ///
    /// # Errors
    /// As [`Parts::get`].
    pub fn equal(&self, others: &Parts) -> Result<bool, FilesError> {
        if self.len() != others.len() {
            return Ok(false);
        }
        for start in (0..self.len()).step_by(CHUNK_BYTES) {
            let chunk = start..self.len().min(start + CHUNK_BYTES);
            if self.get(chunk.clone())? != others.get(chunk)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Any range of bytes that were cut anywhere reads the same; only ranges that cross a cut are copied.
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
            prop_assert!(parts.equal(&Parts::new([&bytes[..]])).unwrap());
            for range in ranges(&wanted) {
                let got = parts.get(range.clone()).unwrap();
                prop_assert_eq!(&*got, &bytes[range.clone()]);
                let in_one = |part: &Range<usize>| part.start <= range.start && range.end <= part.end;
                let is_copied = matches!(got, Cow::Owned(_));
                prop_assert_eq!(is_copied, !range.is_empty() && !written.iter().any(in_one));
            }
        }
    }

    #[test]
    fn other_bytes_are_told_apart() {
        let bytes = vec![1u8; CHUNK_BYTES + 3];
        let mut others = bytes.clone();
        let equal = |others: &[u8]| {
            Parts::new([&bytes[..]])
                .equal(&Parts::new([others]))
                .unwrap()
        };
        assert!(equal(&others));
        assert!(!equal(&others[1..]));
        others[CHUNK_BYTES + 1] = 2;
        assert!(!equal(&others));
    }
}
