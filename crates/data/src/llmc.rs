//! llm.c's token files: 256 little-endian i32 of header (magic, version, token count), then the
//! tokens. The layout is that of llm.c's `dev/data/data_common.py`.

use crate::Result;
use crate::{
    DataError,
    file::DataFile,
    tokens::{TokenFile, Width},
};

pub(crate) const HEADER_BYTES: usize = 256 * 4;

/// Magic, version, and the tokens that follow.
const LAYOUTS: [(i32, i32, Width); 2] = [(20240520, 1, Width::U16), (20240801, 7, Width::U32)];

/// The narrowest layout for tokens below `vocab`.
pub(crate) fn width(vocab: usize) -> Width {
    match vocab {
        0..=0x1_0000 => Width::U16,
        _ => Width::U32,
    }
}

/// The header of a file with `tokens` tokens.
pub(crate) fn header(width: Width, tokens: i32) -> Vec<u8> {
    let layout = LAYOUTS.iter().find(|layout| layout.2 == width);
    let (magic, version, _) = *layout.expect("both widths of llm.c have a layout");
    let mut header = [0; HEADER_BYTES / 4];
    header[..3].copy_from_slice(&[magic, version, tokens]);
    header.into_iter().flat_map(i32::to_le_bytes).collect()
}

/// Reads the header, and checks it against the length of the file.
pub(crate) fn open(file: DataFile) -> Result<TokenFile> {
    let refused = |what: String| DataError::Unusable(format!("data file {} {what}", file.name));
    let truncated = || {
        refused(format!(
            "holds {} bytes, less than the {HEADER_BYTES} of an llm.c header; write it again, or set data.format=\"u16\" if it holds \
             bare u16 tokens",
            file.len()
        ))
    };
    // The magic is checked first: the error for a short file of another kind should be about that, not its length.
    let magic = header_field(&file, 0).ok_or_else(truncated)?;
    let Some(&(_, expected, width)) = LAYOUTS.iter().find(|layout| layout.0 == magic) else {
        return Err(refused(format!(
            "begins with magic {magic}, which is not llm.c's (20240520, or 20240801 for u32 tokens); if it holds bare u16 tokens, \
             set data.format=\"u16\""
        )));
    };
    let bytes = file.len().checked_sub(HEADER_BYTES).ok_or_else(truncated)?;
    let version = header_field(&file, 1).ok_or_else(truncated)?;
    let header = header_field(&file, 2).ok_or_else(truncated)?;
    if version != expected {
        return Err(refused(format!(
            "has magic {magic} and version {version}, but that magic is read in version {expected} only; write it again in version \
             {expected}"
        )));
    }
    let token_bytes = width as usize;
    let held = bytes / token_bytes;
    if usize::try_from(header) != Ok(held) || !bytes.is_multiple_of(token_bytes) {
        return Err(DataError::Unusable(format!(
            "data file {}: its header says {header} tokens of {token_bytes} bytes, but the file holds {held} ({bytes} bytes after \
             the header); it was cut short or changed, so copy or write it again",
            file.name
        )));
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
