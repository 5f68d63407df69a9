//! The header of a safetensors file, checked.

use crate::unique::{Seen, Unique};
use safetensors::Dtype;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de::Error as _};
use std::fmt;
use std::ops::Range;

/// Longer headers are refused, as by the safetensors crate, so that unchecked bytes take bounded memory.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The header of a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The file's tensors in the order of their data, without gaps between them.
    pub tensors: Vec<TensorEntry>,
}

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape; it was checked that the file has as many bytes.
    pub shape: Vec<usize>,
    /// The range of its little-endian elements in the file. Not aligned.
    pub data: Range<usize>,
}

/// Reads and checks the header of a safetensors file, given the whole file. Unlike `SafeTensors::read_metadata`
/// (0.8.0), whose sum of lengths can overflow on hostile headers, it checks all arithmetic for overflow. It also
/// refuses a header with the same name twice.
///
/// # Errors
/// A text that says what is wrong with the file, to put after the file's name and a colon.
pub fn read_header(bytes: &[u8]) -> Result<Header, String> {
    let length = header_length(bytes, bytes.len())?;
    parse_header(&bytes[8..8 + length], bytes.len())
}

/// The length of the header of a file that has `file_bytes` bytes and begins with `first`.
pub(crate) fn header_length(first: &[u8], file_bytes: usize) -> Result<usize, String> {
    let length = first
        .first_chunk()
        .ok_or("it is shorter than the 8 bytes of a header length")?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!(
            "its header should be {length} bytes; none is longer than {MAX_HEADER_BYTES}"
        ));
    }
    let rest = file_bytes - 8;
    match length as usize <= rest {
        true => Ok(length as usize),
        false => Err(format!(
            "its header should be {length} bytes, but {rest} follow"
        )),
    }
}

/// Reads the header's text, and checks it against the size of the file.
pub(crate) fn parse_header(text: &[u8], file_bytes: usize) -> Result<Header, String> {
    let raw: RawHeader = serde_json::from_slice(text)
        .map_err(|error| format!("its header cannot be read: {error}"))?;
    let start = 8 + text.len();
    let mut tensors = Vec::with_capacity(raw.0.len());
    for (name, tensor) in raw.0 {
        let data = tensor
            .place(file_bytes - start)
            .map_err(|reason| format!("`{name}` {reason}"))?;
        tensors.push(TensorEntry {
            name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            data: start + data.start..start + data.end,
        });
    }
    tensors.sort_by_key(|tensor| (tensor.data.start, tensor.data.end));
    let mut end = start;
    for tensor in &tensors {
        if tensor.data.start != end {
            let (name, found) = (&tensor.name, tensor.data.start);
            return Err(format!(
                "`{name}` begins at byte {found}, but what is before it ends at {end}"
            ));
        }
        end = tensor.data.end;
    }
    if end != file_bytes {
        return Err(format!(
            "its tensors end at byte {end}, but it has {file_bytes}"
        ));
    }
    Ok(Header { tensors })
}

/// A header before its numbers are checked.
#[derive(Default)]
struct RawHeader(Vec<(String, RawTensor)>);

#[derive(Deserialize)]
struct RawTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl RawTensor {
    /// The range of its data among `held` bytes.
    fn place(&self, held: usize) -> Result<Range<usize>, String> {
        let (start, end) = self.data_offsets;
        let (dtype, shape) = (self.dtype, &self.shape);
        let wanted = byte_size(dtype, shape)
            .ok_or_else(|| format!("({dtype:?} {shape:?}) has no size in whole bytes"))?;
        if start > end || end > held {
            return Err(format!(
                "should be at bytes {start} to {end} of the {held} after the header"
            ));
        }
        if end - start != wanted {
            let found = end - start;
            return Err(format!(
                "({dtype:?} {shape:?}) needs {wanted} bytes, but has {found}"
            ));
        }
        Ok(start..end)
    }
}

/// Bytes of a tensor; none if they are no whole number or overflow.
pub(crate) fn byte_size(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size))?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let (mut header, mut seen) = (RawHeader::default(), Seen::default());
                while let Some(name) = map.next_key::<String>()? {
                    seen.first(&name)?;
                    if name == "__metadata__" {
                        map.next_value::<Unique<String>>()?; // not used, but it must be valid
                    } else {
                        let tensor = map
                            .next_value()
                            .map_err(|error| A::Error::custom(format_args!("`{name}`: {error}")))?;
                        header.0.push((name, tensor));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
