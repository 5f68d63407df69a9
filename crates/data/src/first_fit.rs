//! Places parts of documents side by side into rows.

use crate::document_parts::DocumentPart;

/// Number of open rows that are tried for each part. More would save little padding, and take longer.
const OPEN_ROWS: usize = 64;

/// Rows of parts, at 12 bytes for each part and 8 for each row.
#[derive(Debug)]
pub(crate) struct PackedRows {
    parts: Vec<DocumentPart>,
    ends: Vec<usize>, // one past the last part of each row
}

impl PackedRows {
    /// Puts each part into the first open row with room for it, or else into a new row. If too many rows are open, the
    /// fullest is closed.
    pub(crate) fn first_fit(parts: &[DocumentPart], seq: usize) -> Self {
        struct Open {
            row: usize,
            room: usize,
        }
        let mut open: Vec<Open> = Vec::with_capacity(OPEN_ROWS);
        let mut counts = Vec::new(); // parts in each row
        let row_of_part = parts.iter().map(|part| {
            let inputs = part.inputs as usize;
            let place = open
                .iter()
                .position(|row| row.room >= inputs)
                .unwrap_or_else(|| {
                    if open.len() == OPEN_ROWS {
                        let fullest = (0..OPEN_ROWS).min_by_key(|&place| open[place].room);
                        open.remove(fullest.expect("there are open rows"));
                    }
                    open.push(Open {
                        row: counts.len(),
                        room: seq,
                    });
                    counts.push(0_usize);
                    open.len() - 1
                });
            let row = open[place].row;
            counts[row] += 1;
            open[place].room -= inputs;
            if open[place].room == 0 {
                open.remove(place);
            }
            row
        });
        let row_of_part: Vec<usize> = row_of_part.collect();
        Self::sorted(parts, &row_of_part, &counts)
    }

    /// The parts in the order of their rows, and within a row in their original order.
    fn sorted(parts: &[DocumentPart], row_of_part: &[usize], counts: &[usize]) -> Self {
        let starts = counts.iter().scan(0, |next, count| {
            *next += count;
            Some(*next - count)
        });
        let mut ends: Vec<usize> = starts.collect();
        let mut sorted = parts.to_vec();
        for (part, &row) in parts.iter().zip(row_of_part) {
            sorted[ends[row]] = *part;
            ends[row] += 1;
        }
        Self {
            parts: sorted,
            ends,
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn row(&self, row: usize) -> &[DocumentPart] {
        let start = if row == 0 { 0 } else { self.ends[row - 1] };
        &self.parts[start..self.ends[row]]
    }

    /// The share of the rows that is not padding, from 0 to 1.
    pub(crate) fn filled(&self, seq: usize) -> f64 {
        let inputs: u64 = self.parts.iter().map(|part| u64::from(part.inputs)).sum();
        inputs as f64 / (self.rows() as f64 * seq as f64)
    }
}
