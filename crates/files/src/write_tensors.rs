//! Streams tensors into safetensors files.

use crate::header::byte_size;
use crate::write::{Hashed, WrittenFile, write_file};
use crate::{FileSystem, FilesError};
use safetensors::Dtype;
use serde_json::json;
use std::cmp::Reverse;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Small writes of a source are buffered up to this many bytes.
const BUFFER_BYTES: usize = 1 << 16;

/// The header's `format`, for readers that check it: the same as in files of PyTorch.
const METADATA: (&str, &str) = ("format", "pt");

/// A tensor without its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// Tensors that are written one at a time, so that no second copy of all of them is needed.
pub trait TensorSource {
    /// All tensors, no name twice.
    fn tensors(&self) -> &[TensorSpec];

    /// Writes the little-endian elements of `self.tensors()[index]`, in any number of writes. It is called once for
    /// each tensor, not always in order.
    ///
    /// # Errors
    /// The error of `out`, or the source's own error, wrapped by [`io::Error::other`].
    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()>;
}

/// Writes `STEM.safetensors` if the tensors have at most `max_shard_bytes`. Else writes shards of at most so many bytes
/// (or of one tensor), called `STEM-00001-of-0000N.safetensors`, and `STEM.safetensors.index.json`. The same tensors
/// give the same bytes. Within a file larger element types come first, so that all tensors are aligned. Each file is
/// durable on return, and its name after [`FileSystem::sync_folder`].
///
/// # Errors
/// [`FilesError::File`]; [`FilesError::Source`] if a tensor has another size than announced.
pub fn write_tensors(
    disk: &dyn FileSystem,
    folder: &Path,
    stem: &str,
    source: &dyn TensorSource,
    max_shard_bytes: u64,
) -> Result<Vec<WrittenFile>, FilesError> {
    let shards = shards(source.tensors(), max_shard_bytes);
    let mut written = Vec::new();
    for (number, tensors) in shards.iter().enumerate() {
        let name = shard_name(stem, number, shards.len());
        written.push(write_shard(disk, folder, &name, source, tensors)?);
    }
    if let Some(text) = index(source.tensors(), stem, &shards) {
        let name = format!("{stem}.safetensors.index.json");
        written.push(write_file(disk, folder, &name, text.as_bytes())?);
    }
    Ok(written)
}

/// Bytes of all files that [`write_tensors`] makes of these tensors.
pub fn tensor_file_bytes(tensors: &[TensorSpec], stem: &str, max_shard_bytes: u64) -> u64 {
    let shards = shards(tensors, max_shard_bytes);
    let headers = shards.iter().map(|shard| {
        let specs = shard.iter().map(|&index| &tensors[index]);
        header(specs).len() as u64
    });
    let index = index(tensors, stem, &shards).map_or(0, |text| text.len() as u64);
    tensors.iter().map(TensorSpec::bytes).sum::<u64>() + headers.sum::<u64>() + index
}

/// The order in which [`write_tensors`] writes these tensors.
pub fn writing_order(tensors: &[TensorSpec], max_shard_bytes: u64) -> Vec<usize> {
    shards(tensors, max_shard_bytes).concat()
}

/// The name of the file of a shard, counted from 0.
fn shard_name(stem: &str, number: usize, count: usize) -> String {
    match count {
        1 => format!("{stem}.safetensors"),
        _ => format!("{stem}-{:05}-of-{count:05}.safetensors", number + 1),
    }
}

/// The text of the index, which says which tensor is in which shard; none for a single file.
fn index(tensors: &[TensorSpec], stem: &str, shards: &[Vec<usize>]) -> Option<String> {
    if shards.len() == 1 {
        return None;
    }
    let total: u64 = tensors.iter().map(TensorSpec::bytes).sum();
    let places = shards.iter().enumerate().flat_map(|(number, shard)| {
        let file = shard_name(stem, number, shards.len());
        let names = shard.iter().map(|&index| &tensors[index].name);
        names.map(move |name| (name.clone(), json!(file)))
    });
    let map: serde_json::Map<_, _> = places.collect();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    Some(format!("{index:#}\n"))
}

impl TensorSpec {
    /// Bytes of its elements.
    ///
    /// # Panics
    /// If they are no whole number or overflow, which no tensor in memory does.
    pub fn bytes(&self) -> u64 {
        byte_size(self.dtype, &self.shape).expect("a tensor in memory has a size") as u64
    }
}

/// Divides tensors into shards, in order; at least one shard.
fn shards(tensors: &[TensorSpec], max_bytes: u64) -> Vec<Vec<usize>> {
    let (mut shards, mut held) = (vec![Vec::new()], 0u64);
    for (index, tensor) in tensors.iter().enumerate() {
        let bytes = tensor.bytes();
        if held.saturating_add(bytes) > max_bytes
            && shards.last().is_some_and(|last| !last.is_empty())
        {
            shards.push(Vec::new());
            held = 0;
        }
        held += bytes;
        shards
            .last_mut()
            .expect("there is a shard from the start")
            .push(index);
    }
    for shard in &mut shards {
        shard.sort_by_key(|&index| Reverse(tensors[index].dtype.bitsize()));
    }
    shards
}

fn write_shard(
    disk: &dyn FileSystem,
    folder: &Path,
    name: &str,
    source: &dyn TensorSource,
    tensors: &[usize],
) -> Result<WrittenFile, FilesError> {
    let path = folder.join(name);
    let failed = || FilesError::at("write", &path);
    let file = Hashed::create(disk, &path).map_err(failed())?;
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, file);
    let specs = tensors.iter().map(|&index| &source.tensors()[index]);
    out.write_all(&header(specs)).map_err(failed())?;
    for &index in tensors {
        let spec = &source.tensors()[index];
        let mut counted = Counted {
            out: &mut out,
            bytes: 0,
        };
        source.write_to(index, &mut counted).map_err(failed())?;
        if counted.bytes != spec.bytes() {
            return Err(FilesError::Source {
                name: spec.name.clone(),
                expected: spec.bytes(),
                written: counted.bytes,
            });
        }
    }
    out.flush().map_err(failed())?;
    let file = out.into_parts().0;
    file.finish(name).map_err(failed())
}

/// The header's length and text, padded so that the data is aligned to 8 bytes.
fn header<'a>(tensors: impl Iterator<Item = &'a TensorSpec>) -> Vec<u8> {
    let (key, value) = METADATA;
    let mut map = serde_json::Map::new();
    map.insert("__metadata__".into(), json!({key: value}));
    let mut end = 0;
    for TensorSpec { name, dtype, shape } in tensors {
        let start = end;
        end += byte_size(*dtype, shape).expect("a tensor in memory has a size");
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        map.insert(name.clone(), entry);
    }
    let mut text = serde_json::Value::Object(map).to_string();
    text.extend(std::iter::repeat_n(
        ' ',
        text.len().next_multiple_of(8) - text.len(),
    ));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Counts what a source writes.
struct Counted<'a> {
    out: &'a mut dyn Write,
    bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
