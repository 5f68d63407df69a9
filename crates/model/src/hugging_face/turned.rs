//! Transposes matrices, or reorders their rows, on their way from and to files, in parts of bounded size.

use crate::stored::{Transposition, TurnedAxis};
use std::borrow::Cow;
use std::ops::Range;

/// Bytes of a transpose that are made at a time. Each such part takes another pass over the whole matrix, in chunks.
const TURNED_BYTES: usize = 16 << 20;

/// Matrices that are read row by row, one after another, and whose transposes are wanted.
#[derive(Clone, Copy)]
pub(super) struct Turned {
    of: Transposition,
    rows: usize,
    columns: usize,
    /// Bytes of an element.
    size: usize,
}

/// The place of `(x, y, z)` of an axis `[x, y, z]` among those of `[y, x, z]`.
fn swapped(index: usize, [of_x, of_y, of_z]: TurnedAxis) -> usize {
    let (x, y, z) = (index / (of_y * of_z), index / of_z % of_y, index % of_z);
    (y * of_x + x) * of_z + z
}

impl Turned {
    /// Matrices whose elements have so many bytes.
    pub(super) fn new(of: Transposition, size: usize) -> Turned {
        Turned {
            of,
            rows: of.rows.iter().product(),
            columns: of.columns.iter().product(),
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

    /// Hands the transposes to `each` in parts, in the order of their places: the range of its elements, and their bytes. `room` has
    /// [`Turned::room`] bytes, the most that a part has. `read` gives elements of the matrices themselves; for every part it
    /// is asked for all of one matrix, in order. Parts that are not `wanted` are left out.
    pub(super) fn each<'a, E>(
        self,
        room: &mut [u8],
        wanted: impl Fn(&Range<usize>) -> bool,
        mut read: impl FnMut(Range<usize>) -> Result<Cow<'a, [u8]>, E>,
        mut each: impl FnMut(Range<usize>, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let starts = (0..self.columns).step_by(self.at_once());
        let of_matrix = |matrix| starts.clone().map(move |start| (matrix, start));
        for (matrix, start) in (0..self.of.matrices).flat_map(of_matrix) {
            let first = matrix * self.rows * self.columns;
            let columns = start..self.columns.min(start + self.at_once());
            let elements = first + columns.start * self.rows..first + columns.end * self.rows;
            if !wanted(&elements) {
                continue;
            }
            let room = &mut room[..elements.len() * self.size];
            let first = self.of.place_in_memory(matrix) * self.rows * self.columns;
            for row in (0..self.rows).step_by(self.read_at_once()) {
                let rows = row..self.rows.min(row + self.read_at_once());
                let read_elements =
                    first + rows.start * self.columns..first + rows.end * self.columns;
                let bytes = read(read_elements)?;
                match self.size {
                    2 => self.turn_bytes::<2>(&bytes, rows, columns.clone(), room),
                    4 => self.turn_bytes::<4>(&bytes, rows, columns.clone(), room),
                    other => unreachable!("elements of {other} bytes are not turned"),
                }
            }
            each(elements, room)?;
        }
        Ok(())
    }

    fn turn_bytes<const SIZE: usize>(
        self,
        bytes: &[u8],
        rows: Range<usize>,
        columns: Range<usize>,
        room: &mut [u8],
    ) {
        let room = room.as_chunks_mut::<SIZE>().0;
        self.turn(bytes.as_chunks::<SIZE>().0, rows, columns, room);
    }

    /// Copies some rows to their places in some rows of the transpose.
    fn turn<T: Copy>(
        self,
        elements: &[T],
        rows: Range<usize>,
        columns: Range<usize>,
        room: &mut [T],
    ) {
        let turned = room.chunks_exact_mut(self.rows);
        let places: Vec<usize> = rows.map(|row| swapped(row, self.of.rows)).collect();
        let column_order = self.of.reversed().rows;
        for (column, turned) in columns.zip(turned) {
            let column = swapped(column, column_order);
            let of_column = elements[column..].iter().step_by(self.columns);
            for (place, element) in places.iter().zip(of_column) {
                turned[*place] = *element;
            }
        }
    }

    /// The transposes of matrices in memory.
    pub(super) fn of_values(of: Transposition, values: &[f32]) -> Vec<f32> {
        let turned = Turned::new(of, size_of::<f32>());
        let mut room = vec![0.0; values.len()];
        let of_each = turned.rows * turned.columns;
        for (place, room) in room.chunks_exact_mut(of_each).enumerate() {
            let first = of.place_in_memory(place) * of_each;
            let matrix = &values[first..first + of_each];
            turned.turn(matrix, 0..turned.rows, 0..turned.columns, room);
        }
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HeadParts, Stored};

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

    /// Matrices of one part, and of three parts whose sizes do not divide a matrix evenly.
    #[test]
    fn a_turned_matrix_has_rows_for_columns() {
        let plain = |size| [1, size, 1];
        for (matrices, rows, columns, size, pieces) in [
            (1, plain(7), plain(5), 2, 1),
            (1, plain(3001), plain(3000), 4, 3),
            (3, [2, 3, 1], plain(5), 2, 3),
            (3, plain(5), [3, 2, 1], 4, 3),
            (1, plain(3), [2, 5, 3], 4, 1),
            (2, [2, 1501, 1], plain(3000), 4, 6),
            (1, plain(3001), [1500, 2, 1], 4, 3),
        ] {
            let of = Transposition {
                rows,
                columns,
                ..Transposition::of(matrices, 1, 1)
            };
            let matrix = Turned::new(of, size);
            let all = (matrices * matrix.rows * matrix.columns) as u32;
            let bytes_of = |value: u32| value.to_le_bytes()[..size].to_vec();
            let source: Vec<u8> = (0..all).flat_map(bytes_of).collect();
            let (found, found_pieces) = turned(matrix, &source);
            assert_eq!(found_pieces, pieces);
            let of_each = matrix.rows * matrix.columns;
            for (at, value) in places(of).step_by(all as usize / 1000 + 1) {
                assert_eq!(found[at * size..(at + 1) * size], bytes_of(value as u32));
            }
            let back = Turned::new(of.reversed(), size);
            assert_eq!(back.rows * back.columns, of_each);
            assert!(turned(back, &found).0 == source);
            if size == 4 {
                let values: Vec<f32> = bytemuck::cast_slice(&source).to_vec();
                let found: Vec<f32> = bytemuck::cast_slice(&found).to_vec();
                assert!(Turned::of_values(of, &values) == found);
            }
        }
    }

    /// The place in files and in memory of every element, in the order of memory.
    fn places(of: Transposition) -> impl Iterator<Item = (usize, usize)> {
        let [[r0, r1, r2], [c0, c1, c2]] = [of.rows, of.columns];
        let all = of.matrices * r0 * r1 * r2 * c0 * c1 * c2;
        (0..all).map(move |index| {
            let mut rest = index;
            let mut last = |size: usize| {
                let digit = rest % size;
                rest /= size;
                digit
            };
            let [z, y, x] = [c2, c1, c0].map(&mut last);
            let [w, v, u] = [r2, r1, r0].map(&mut last);
            let matrix = last(of.matrices);
            let column = (y * c0 + x) * c2 + z;
            let row = (v * r0 + u) * r2 + w;
            let place = (matrix * c0 * c1 * c2 + column) * r0 * r1 * r2 + row;
            (place, index)
        })
    }

    /// Two experts of one input, with two outputs of gate and two of up.
    #[test]
    fn gate_and_up_alternate_in_files() {
        let of = Transposition {
            rows: [2, 2, 1],
            ..Transposition::of(2, 1, 1)
        };
        let memory = [1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0];
        let files = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0];
        assert_eq!(Turned::of_values(of, &memory), files);
        assert_eq!(Turned::of_values(of.reversed(), &files), memory);
    }

    /// Two key heads, each with a row of queries, one of keys and two of values, of two inputs.
    #[test]
    fn files_have_the_rows_of_each_head_together() {
        let parts = HeadParts {
            heads: 2,
            widths: [1, 1, 2, 0],
        };
        let of = Stored::ByHead(parts).turned(&[8, 2]).unwrap();
        let rows = |order: [usize; 8]| -> Vec<f32> {
            let elements = order.iter().flat_map(|row| [2 * row, 2 * row + 1]);
            elements.map(|element| element as f32).collect()
        };
        let (memory, files) = (
            rows([0, 1, 2, 3, 4, 5, 6, 7]),
            rows([0, 2, 4, 5, 1, 3, 6, 7]),
        );
        assert_eq!(Turned::of_values(of, &memory), files);
        assert_eq!(Turned::of_values(of.reversed(), &files), memory);
        let source: &[u8] = bytemuck::cast_slice(&memory);
        let (found, pieces) = turned(Turned::new(of, size_of::<f32>()), source);
        assert_eq!((bytemuck::cast_slice(&found), pieces), (&files[..], 8));
    }
}
