//! Ready-made batches: safetensors with `input_ids` and `targets`, integers `[N, seq]`.

use std::ops::Range;

use safetensors::tensor::{Dtype, Metadata};

use crate::{DataError, MASKED, MicroBatch, batch::token_id, file::DataFile};

/// A checked batch file: two integer matrices of one shape.
#[derive(Debug)]
pub(crate) struct BatchFile {
    pub(crate) file: DataFile,
    pub(crate) rows: usize,
    pub(crate) seq: usize,
    input_ids: Matrix,
    targets: Matrix,
}

/// Where a `[rows, seq]` tensor lies in the file.
#[derive(Debug)]
struct Matrix {
    start: usize,
    entry_bytes: usize, // 4 (i32) or 8 (i64)
}

impl BatchFile {
    /// Reads the header; entries are checked when they are read.
    pub(crate) fn open(file: DataFile) -> Result<Self, DataError> {
        let (metadata, data) = match read_header(&file) {
            Ok(header) => header,
            Err(reason) => {
                let file = file.name;
                return Err(DataError::NotSafetensors { file, reason });
            }
        };
        let (input_ids, shape) = matrix(&file, &metadata, &data, "input_ids")?;
        let (targets, targets_shape) = matrix(&file, &metadata, &data, "targets")?;
        if shape != targets_shape {
            return Err(DataError::ShapesDiffer {
                file: file.name,
                input_ids: shape.to_vec(),
                targets: targets_shape.to_vec(),
            });
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

    /// Appends row `row` (below [`Self::rows`]) to a micro-batch of this file's `seq`.
    pub(crate) fn read_row(
        &self,
        row: usize,
        vocab: usize,
        into: &mut MicroBatch,
    ) -> Result<(), DataError> {
        for column in 0..self.seq {
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

/// The header, and where in the file its tensors' data lies.
///
/// `SafeTensors::read_metadata` does the same, but its sum of the lengths can overflow on a
/// hostile header (safetensors 0.8.0): a panic, or in release a range outside the file.
fn read_header(bytes: &[u8]) -> Result<(Metadata, Range<usize>), String> {
    let (length, rest) = bytes
        .split_first_chunk()
        .ok_or("it is shorter than the 8 bytes of a header length")?;
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length)
        .ok()
        .and_then(|length| rest.get(..length))
        .ok_or_else(|| {
            format!(
                "its header should be {length} bytes, but {} follow",
                rest.len()
            )
        })?;
    let metadata: Metadata = serde_json::from_slice(header)
        .map_err(|error| format!("its header cannot be read: {error}"))?;
    let held = rest.len() - header.len();
    if metadata.data_len() != held {
        let wanted = metadata.data_len();
        return Err(format!(
            "its header describes {wanted} bytes of tensors, but it holds {held}"
        ));
    }
    Ok((metadata, bytes.len() - held..bytes.len()))
}

/// Finds tensor `name`, and checks that it is a matrix of integers that is not empty.
fn matrix(
    file: &DataFile,
    metadata: &Metadata,
    data: &Range<usize>,
    name: &'static str,
) -> Result<(Matrix, [usize; 2]), DataError> {
    let info = metadata
        .info(name)
        .ok_or_else(|| DataError::MissingTensor {
            file: file.name.clone(),
            tensor: name,
            found: match metadata.offset_keys() {
                names if names.is_empty() => "nothing".to_owned(),
                names => names.join(", "),
            },
        })?;
    let entry_bytes = match info.dtype {
        Dtype::I32 => 4,
        Dtype::I64 => 8,
        found => {
            return Err(DataError::TensorDtype {
                file: file.name.clone(),
                tensor: name,
                found: format!("{found:?}"),
            });
        }
    };
    let shape = <[usize; 2]>::try_from(info.shape.as_slice())
        .ok()
        .filter(|shape| !shape.contains(&0))
        .ok_or_else(|| DataError::TensorShape {
            file: file.name.clone(),
            tensor: name,
            found: info.shape.clone(),
        })?;
    let matrix = Matrix {
        start: data.start + info.data_offsets.0,
        entry_bytes,
    };
    Ok((matrix, shape))
}
