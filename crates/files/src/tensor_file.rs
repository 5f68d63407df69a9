//! One safetensors file, mapped.

use crate::FilesError;
use crate::header::{Header, TensorEntry, read_header};
use memmap2::Mmap;
use safetensors::Dtype;
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;

/// A safetensors file whose header has been checked, mapped rather than read.
#[derive(Debug)]
pub(crate) struct TensorFile {
    map: Mmap,
    header: Header,
    by_name: HashMap<String, usize>,
}

/// A tensor as it lies in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: &'a [usize],
    /// Little-endian elements, exactly as many as the shape says. Not aligned.
    pub bytes: &'a [u8],
}

impl TensorFile {
    /// Maps a file and checks its header. Its data is not touched.
    ///
    /// # Errors
    /// [`FilesError::File`] or [`FilesError::NotSafetensors`].
    pub(crate) fn open(path: &Path) -> Result<Self, FilesError> {
        let file = open_plain(path)?;
        // SAFETY: the map is read-only, and read as plain bytes, for which any value is valid. It is undefined for another
        // process to change the file meanwhile; as in every program that maps its input, not doing so is left to the user.
        let map = unsafe { Mmap::map(&file) }.map_err(FilesError::at("map", path))?;
        let header = read_header(&map).map_err(|reason| FilesError::NotSafetensors {
            path: path.into(),
            reason,
        })?;
        let names = header.tensors.iter().enumerate();
        let by_name = names
            .map(|(index, entry)| (entry.name.clone(), index))
            .collect();
        Ok(Self {
            map,
            header,
            by_name,
        })
    }

    /// A tensor by name.
    pub(crate) fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.by_name
            .get(name)
            .map(|&index| self.tensor(&self.header.tensors[index]))
    }

    /// All names and tensors in the order of their data.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, Tensor<'_>)> {
        let entries = self.header.tensors.iter();
        entries.map(|entry| (entry.name.as_str(), self.tensor(entry)))
    }

    fn tensor<'a>(&'a self, entry: &'a TensorEntry) -> Tensor<'a> {
        Tensor {
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.map[entry.data.clone()],
        }
    }
}

/// Opens a file that is one: opening a pipe would wait for its writer.
fn open_plain(path: &Path) -> Result<File, FilesError> {
    let found = fs::metadata(path).map_err(FilesError::at("read", path))?;
    if !found.is_file() {
        return Err(FilesError::NotSafetensors {
            path: path.into(),
            reason: "it is not a file".into(),
        });
    }
    File::open(path).map_err(FilesError::at("read", path))
}
