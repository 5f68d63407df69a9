//! llm.c's token files: 256 little-endian i32 of header (magic, version, token count), then the
//! tokens. The layout is that of llm.c's `dev/data/data_common.py`.

use crate::{
    DataError,
    file::DataFile,
    tokens::{TokenFile, Width},
};

const HEADER_BYTES: usize = 256 * 4;

/// Reads the header, and checks it against the length of the file.
pub(crate) fn open(file: DataFile) -> Result<TokenFile, DataError> {
    let truncated = || DataError::HeaderTruncated {
        file: file.name.clone(),
        bytes: file.len(),
        needed: HEADER_BYTES,
    };
    // The magic first: a short file of another kind should hear of its magic, not of its length.
    let magic = header_field(&file, 0).ok_or_else(truncated)?;
    let (expected, width) = match magic {
        20240520 => (1, Width::U16),
        20240801 => (7, Width::U32),
        found => {
            let file = file.name;
            return Err(DataError::WrongMagic { file, found });
        }
    };
    let bytes = file.len().checked_sub(HEADER_BYTES).ok_or_else(truncated)?;
    let version = header_field(&file, 1).ok_or_else(truncated)?;
    let header = header_field(&file, 2).ok_or_else(truncated)?;
    if version != expected {
        return Err(DataError::WrongVersion {
            file: file.name,
            magic,
            found: version,
            expected,
        });
    }
    let held = bytes / width as usize;
    if usize::try_from(header) != Ok(held) || !bytes.is_multiple_of(width as usize) {
        return Err(DataError::TokenCount {
            file: file.name,
            header,
            held,
            width: width as usize,
            bytes,
        });
    }
    Ok(TokenFile::new(file, HEADER_BYTES, width))
}

fn header_field(bytes: &[u8], index: usize) -> Option<i32> {
    bytes
        .as_chunks()
        .0
        .get(index)
        .map(|field| i32::from_le_bytes(*field))
}
