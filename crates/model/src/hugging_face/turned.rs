//! Transposes matrices on their way from and to files, in parts of bounded size.

use std::borrow::Cow;
use std::ops::Range;

/// Bytes of the transpose that are made at a time. Each such part takes another pass over the whole matrix, in chunks.
const TURNED_BYTES: usize = 16 << 20;

/// A matrix that is read row by row, and whose transpose is wanted.
#[derive(Clone, Copy)]
pub(super) struct Turned {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Bytes of an element.
    pub(super) size: usize,
}

impl Turned {
    /// A matrix of elements of the widest type.
    pub(super) fn f32(rows: usize, columns: usize) -> Turned {
        let size = 4;
        Turned {
            rows,
            columns,
            size,
        }
    }

    /// Rows of the transpose that are made at a time.
    fn at_once(self) -> usize {
        (TURNED_BYTES / (self.rows * self.size).max(1)).clamp(1, self.columns.max(1))
    }

    /// Bytes of these rows.
    pub(super) fn room(self) -> usize {
        self.at_once() * self.rows * self.size
    }

    /// Rows of the matrix that are read at a time.
    fn read_at_once(self) -> usize {
        (files::CHUNK_ELEMENTS / self.columns.max(1)).max(1)
    }

    /// Hands the transpose to `each` in parts, in order: the range of its elements, and their bytes. `room` has
    /// [`Turned::room`] bytes, the most that a part has. `read` gives elements of the matrix itself; for every part it
    /// is asked for all of them, in order. Parts that are not `wanted` are left out.
    pub(super) fn each<'a, E>(
        self,
        room: &mut [u8],
        wanted: impl Fn(&Range<usize>) -> bool,
        mut read: impl FnMut(Range<usize>) -> Result<Cow<'a, [u8]>, E>,
        mut each: impl FnMut(Range<usize>, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for first in (0..self.columns).step_by(self.at_once()) {
            let columns = first..self.columns.min(first + self.at_once());
            let elements = columns.start * self.rows..columns.end * self.rows;
            if !wanted(&elements) {
                continue;
            }
            let room = &mut room[..elements.len() * self.size];
            for row in (0..self.rows).step_by(self.read_at_once()) {
                let rows = row..self.rows.min(row + self.read_at_once());
                let bytes = read(rows.start * self.columns..rows.end * self.columns)?;
                match self.size {
                    2 => self.turn::<2>(&bytes, rows, columns.clone(), room),
                    _ => self.turn::<4>(&bytes, rows, columns.clone(), room),
                }
            }
            each(elements, room)?;
        }
        Ok(())
    }

    /// Copies some columns of some rows to their place in the transpose, of which these columns are the rows.
    fn turn<const SIZE: usize>(
        self,
        bytes: &[u8],
        rows: Range<usize>,
        columns: Range<usize>,
        room: &mut [u8],
    ) {
        let elements = bytes.as_chunks::<SIZE>().0;
        let turned = room.as_chunks_mut::<SIZE>().0.chunks_exact_mut(self.rows);
        for (column, turned) in columns.zip(turned) {
            let of_column = elements[column..].iter().step_by(self.columns);
            for (turned, element) in turned[rows.clone()].iter_mut().zip(of_column) {
                *turned = *element;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turned(matrix: Turned, source: &[u8]) -> (Vec<u8>, usize) {
        let (mut all, mut pieces) = (Vec::new(), 0);
        let mut room = vec![0; matrix.room()];
        let read = |range: Range<usize>| {
            let bytes = range.start * matrix.size..range.end * matrix.size;
            Ok::<_, ()>(Cow::Borrowed(&source[bytes]))
        };
        let each = |elements: Range<usize>, bytes: &[u8]| {
            assert_eq!(elements.start * matrix.size, all.len());
            assert_eq!(elements.len() * matrix.size, bytes.len());
            all.extend_from_slice(bytes);
            pieces += 1;
            Ok(())
        };
        matrix.each(&mut room, |_| true, read, each).unwrap();
        (all, pieces)
    }

    /// A matrix of one part, and one of three parts whose sizes do not divide the matrix evenly.
    #[test]
    fn a_turned_matrix_has_rows_for_columns() {
        for (rows, columns, size, pieces) in [(7, 5, 2, 1), (3001, 3000, 4, 3)] {
            let matrix = Turned {
                rows,
                columns,
                size,
            };
            let value = |row: usize, column: usize| (row * columns + column) as u32;
            let bytes_of = |value: u32| value.to_le_bytes()[..size].to_vec();
            let source: Vec<u8> = (0..(rows * columns) as u32).flat_map(bytes_of).collect();
            let (found, found_pieces) = turned(matrix, &source);
            assert_eq!(found_pieces, pieces);
            for column in 0..columns {
                for row in [0, 1, rows / 2, rows - 1] {
                    let at = (column * rows + row) * size;
                    assert_eq!(found[at..at + size], bytes_of(value(row, column)));
                }
            }
        }
    }
}
