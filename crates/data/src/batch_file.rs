//! Ready-made batches: safetensors with `input_ids` and `targets`, integers `[N, seq]`.

use files::{Dtype, Header, read_header};

use crate::{DataError, MASKED, MicroBatch, Result, batch::token_id, file::DataFile};

/// A checked batch file: two integer matrices of one shape.
#[derive(Debug)]
pub(crate) struct BatchFile {
    pub(crate) file: DataFile,
    pub(crate) rows: usize,
    pub(crate) seq: usize,
    input_ids: Matrix,
    targets: Matrix,
}

/// The place of a `[rows, seq]` tensor in the file.
#[derive(Debug)]
struct Matrix {
    start: usize,
    entry_bytes: usize, // 4 (i32) or 8 (i64)
}

impl BatchFile {
    /// Reads the header. Entries are only checked when they are read.
    pub(crate) fn open(file: DataFile) -> Result<Self> {
        let header = match read_header(&file) {
            Ok(header) => header,
            Err(reason) => {
                return Err(DataError::Unusable(format!(
                    "data file {} is not a whole safetensors file: {reason}; copy or write it again, or check data.format",
                    file.name
                )));
            }
        };
        let (input_ids, shape) = matrix(&file, &header, "input_ids")?;
        let (targets, targets_shape) = matrix(&file, &header, "targets")?;
        if shape != targets_shape {
            return Err(DataError::Unusable(format!(
                "data file {}: `input_ids` has shape {shape:?} but `targets` has {targets_shape:?}; write them with one target for \
                 each input",
                file.name
            )));
        }
        let [rows, seq] = shape;
        Ok(Self {
            file,
            rows,
            seq,
            input_ids,
            targets,
        })
    }

    /// Number of columns of a row up to its last target.
    pub(crate) fn length(&self, row: usize) -> usize {
        let columns = row * self.seq..(row + 1) * self.seq;
        let asks =
            |&position: &usize| self.targets.entry(&self.file, position) != i64::from(MASKED);
        let last = columns.rev().find(asks);
        last.map_or(0, |position| position - row * self.seq + 1)
    }

    /// Appends the first columns of row `row` (below [`Self::rows`]), as many as the micro-batch has.
    pub(crate) fn read_row(&self, row: usize, vocab: usize, into: &mut MicroBatch) -> Result {
        for column in 0..into.seq {
            let position = row * self.seq + column;
            let outside = |tensor, token| DataError::EntryOutOfRange {
                file: self.file.name.clone(),
                tensor,
                token,
                row,
                column,
                position,
                vocab,
            };
            let input = self.input_ids.entry(&self.file, position);
            let target = self.targets.entry(&self.file, position);
            into.input_ids
                .push(token_id(input, vocab).ok_or_else(|| outside("input_ids", input))?);
            into.targets.push(if target == i64::from(MASKED) {
                MASKED
            } else {
                token_id(target, vocab).ok_or_else(|| outside("targets", target))?
            });
        }
        Ok(())
    }
}

impl Matrix {
    fn entry(&self, bytes: &[u8], position: usize) -> i64 {
        let at = self.start + position * self.entry_bytes;
        let mut value = [0; 8];
        value[..self.entry_bytes].copy_from_slice(&bytes[at..at + self.entry_bytes]);
        match self.entry_bytes {
            4 => i64::from(i64::from_le_bytes(value) as i32), // sign-extends the low half
            _ => i64::from_le_bytes(value),
        }
    }
}

/// Finds the tensor `name`, and checks that it is a non-empty matrix of integers.
fn matrix(file: &DataFile, header: &Header, name: &'static str) -> Result<(Matrix, [usize; 2])> {
    let names = || header.tensors.iter().map(|tensor| tensor.name.as_str());
    let info = header
        .tensors
        .iter()
        .find(|tensor| tensor.name == name)
        .ok_or_else(|| {
            let found = match names().collect::<Vec<_>>() {
                names if names.is_empty() => "nothing".to_owned(),
                names => names.join(", "),
            };
            DataError::Unusable(format!(
                "data file {} has no tensor `{name}` (it holds: {found}); a batch file needs `input_ids` and `targets`",
                file.name
            ))
        })?;
    let refused = |what: String| {
        DataError::Unusable(format!("data file {}: tensor `{name}` {what}", file.name))
    };
    let entry_bytes = match info.dtype {
        Dtype::I32 => 4,
        Dtype::I64 => 8,
        found => {
            return Err(refused(format!(
                "is {found:?}; a batch file needs I32 or I64, so convert it"
            )));
        }
    };
    let shape = <[usize; 2]>::try_from(info.shape.as_slice())
        .ok()
        .filter(|shape| !shape.contains(&0))
        .ok_or_else(|| {
            refused(format!(
                "has shape {:?}; a batch file needs [rows, seq], both 1 or more",
                info.shape
            ))
        })?;
    let matrix = Matrix {
        start: info.data.start,
        entry_bytes,
    };
    Ok((matrix, shape))
}
