//! Tensors a chunk at a time, so that loading and saving need no more host memory for larger tensors.

use crate::FilesError;
use std::ops::Range;

/// Elements that are read, converted and written at a time.
pub const CHUNK_ELEMENTS: usize = 256 * 1024;

/// Bytes of a chunk, in the widest type that elements have.
pub const CHUNK_BYTES: usize = 4 * CHUNK_ELEMENTS;

/// The chunks of a range of elements, in order: all but the last have [`CHUNK_ELEMENTS`].
pub fn in_chunks(elements: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = elements.end;
    let starts = elements.step_by(CHUNK_ELEMENTS);
    starts.map(move |start| start..end.min(start + CHUNK_ELEMENTS))
}

/// Zeroed host memory. If the system has none left, it returns an error; an ordinary allocation would end the process.
///
/// # Errors
/// [`FilesError::Memory`].
pub fn host_room(bytes: usize) -> Result<Vec<u8>, FilesError> {
    let mut room = Vec::new();
    room.try_reserve_exact(bytes)
        .map_err(|_| FilesError::Memory { bytes })?;
    room.resize(bytes, 0);
    Ok(room)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_range_in_order() {
        let start = 7;
        for elements in [0, 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS] {
            let mut end = start;
            for chunk in in_chunks(start..start + elements) {
                assert_eq!(chunk.start, end);
                assert!((1..=CHUNK_ELEMENTS).contains(&chunk.len()));
                end = chunk.end;
            }
            assert_eq!(end, start + elements);
        }
    }

    #[test]
    fn memory_that_no_system_has_is_refused() {
        let refused = host_room(usize::MAX / 4).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        let passed_on = std::io::Error::from(refused);
        assert_eq!(passed_on.kind(), std::io::ErrorKind::OutOfMemory);
    }
}
