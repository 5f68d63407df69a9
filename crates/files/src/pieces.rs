//! Tensors in pieces: each of several writers has a file, and an index says which file has which elements of a tensor.

use crate::parts::{Parts, TensorParts};
use crate::tensor_file::TensorFile;
use crate::write::WrittenFile;
use crate::{
    FileSystem, FilesError, TensorSource, TensorSpec, is_plain_name, tensor_file_bytes,
    write_tensors,
};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

/// The index's name.
pub const PIECE_INDEX: &str = "pieces.index.json";

/// Some elements of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceSpec {
    /// The set that the tensor belongs to, `model` or `optimizer`: the name that a file of whole tensors has.
    pub stem: String,
    /// The tensor's name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The range of its elements; never empty.
    pub elements: Range<usize>,
}

impl PieceSpec {
    /// The piece as a tensor in a file.
    fn in_file(&self) -> TensorSpec {
        TensorSpec {
            name: name_in_file(&self.name, &self.elements),
            dtype: self.dtype,
            shape: vec![self.elements.len()],
        }
    }
}

/// The name of a piece in its file, which tells its elements without the index.
fn name_in_file(name: &str, elements: &Range<usize>) -> String {
    format!("{name}[{}:{}]", elements.start, elements.end)
}

/// Pieces that are written one at a time: see [`TensorSource`].
pub trait PieceSource {
    /// All pieces of this writer. No two tensors have the same name, not even under different stems.
    fn pieces(&self) -> &[PieceSpec];

    /// Writes the little-endian elements of `self.pieces()[index]`.
    ///
    /// # Errors
    /// As [`TensorSource::write_to`].
    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()>;
}

/// A file of pieces that was written and made durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenPieces {
    /// The file.
    pub file: WrittenFile,
    /// What it holds.
    pub pieces: Vec<PieceSpec>,
}

/// Bytes of the file that [`write_pieces`] makes of these pieces.
pub fn piece_file_bytes(pieces: &[PieceSpec]) -> u64 {
    let specs: Vec<TensorSpec> = pieces.iter().map(PieceSpec::in_file).collect();
    tensor_file_bytes(&specs, "", u64::MAX)
}

/// Writes the pieces of a writer to `STEM.safetensors`, otherwise as [`write_tensors`].
///
/// # Errors
/// As [`write_tensors`].
pub fn write_pieces(
    disk: &dyn FileSystem,
    folder: &Path,
    stem: &str,
    source: &dyn PieceSource,
) -> Result<WrittenPieces, FilesError> {
    struct AsTensors<'a>(&'a dyn PieceSource, Vec<TensorSpec>);
    impl TensorSource for AsTensors<'_> {
        fn tensors(&self) -> &[TensorSpec] {
            &self.1
        }
        fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
            self.0.write_to(index, out)
        }
    }
    let specs = source.pieces().iter().map(PieceSpec::in_file).collect();
    let one_file = u64::MAX;
    let written = write_tensors(disk, folder, stem, &AsTensors(source, specs), one_file)?;
    let mut written = written.into_iter();
    Ok(WrittenPieces {
        file: written.next().expect("tensors without shards are a file"),
        pieces: source.pieces().to_vec(),
    })
}

/// The tensors that files of pieces have together: by stem, then by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceIndex(BTreeMap<String, BTreeMap<String, InPieces>>);

/// A tensor and where its elements are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct InPieces {
    dtype: Dtype,
    shape: Vec<usize>,
    /// In the order of elements: a file, the first element, and the one behind the last.
    pieces: Vec<(String, usize, usize)>,
}

impl InPieces {
    /// The first place where the pieces leave elements out, or have them twice.
    fn gap(&self) -> Option<String> {
        let mut end = 0;
        for (file, first, behind) in &self.pieces {
            if *first != end || behind < first {
                return Some(format!(
                    "the piece {first} to {behind} in `{file}` should begin at {end}"
                ));
            }
            end = *behind;
        }
        let elements = self
            .shape
            .iter()
            .try_fold(1, |n: usize, size| n.checked_mul(*size));
        (elements != Some(end)).then(|| {
            format!(
                "its pieces end at element {end}, but its shape is {:?}",
                self.shape
            )
        })
    }
}

impl PieceIndex {
    /// The index of files in `folder`, which together hold every tensor as a whole.
    ///
    /// # Errors
    /// [`FilesError::Index`] with the name of a tensor whose elements are missing or there twice.
    pub fn of(folder: &Path, files: &[WrittenPieces]) -> Result<PieceIndex, FilesError> {
        let mut stems: BTreeMap<String, BTreeMap<String, InPieces>> = BTreeMap::new();
        for WrittenPieces { file, pieces } in files {
            for piece in pieces {
                let tensors = stems.entry(piece.stem.clone()).or_default();
                let tensor = tensors.entry(piece.name.clone());
                let tensor = tensor.or_insert_with(|| InPieces {
                    dtype: piece.dtype,
                    shape: piece.shape.clone(),
                    pieces: Vec::new(),
                });
                if (tensor.dtype, &tensor.shape) != (piece.dtype, &piece.shape) {
                    let reason = format!(
                        "`{}` has another type or shape in `{}`",
                        piece.name, file.name
                    );
                    return Err(misfit(folder, reason));
                }
                let Range { start, end } = piece.elements;
                tensor.pieces.push((file.name.clone(), start, end));
            }
        }
        for (name, tensor) in stems.values_mut().flatten() {
            tensor.pieces.sort_by_key(|(_, first, _)| *first);
            if let Some(gap) = tensor.gap() {
                return Err(misfit(folder, format!("`{name}`: {gap}")));
            }
        }
        Ok(PieceIndex(stems))
    }

    /// The index's text.
    pub fn text(&self) -> String {
        let text = serde_json::to_string(self).expect("names and numbers are JSON");
        format!("{text}\n")
    }
}

fn misfit(folder: &Path, reason: String) -> FilesError {
    FilesError::Index {
        path: folder.join(PIECE_INDEX),
        reason,
    }
}

/// Tensors by name, in files that hold pieces of them.
#[derive(Debug)]
pub struct PieceFiles {
    files: HashMap<String, TensorFile>,
    tensors: BTreeMap<String, InPieces>,
}

impl PieceFiles {
    /// Opens the files that a folder's index names for a stem; none if the folder has no index of pieces.
    ///
    /// # Errors
    /// [`FilesError`] if the index does not fit its files, or one of them is no safetensors file.
    pub fn open_folder(folder: &Path, stem: &str) -> Result<Option<Self>, FilesError> {
        let path = folder.join(PIECE_INDEX);
        let text = match crate::read_small(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(FilesError::at("read", &path))?,
        };
        let index: PieceIndex = serde_json::from_slice(&text)
            .map_err(|error| misfit(folder, format!("it cannot be read: {error}")))?;
        let tensors = index.0.into_iter().find(|(own, _)| own == stem);
        let (_, tensors) = tensors.ok_or_else(|| misfit(folder, format!("it has no `{stem}`")))?;
        let mut files = HashMap::new();
        for (name, tensor) in &tensors {
            let refuse = |reason| misfit(folder, format!("`{name}`: {reason}"));
            tensor.gap().map_or(Ok(()), |gap| Err(refuse(gap)))?;
            for (file, first, behind) in &tensor.pieces {
                if !is_plain_name(file) {
                    return Err(refuse(format!(
                        "`{file}` is not the name of a file beside it"
                    )));
                }
                if !files.contains_key(file) {
                    files.insert(file.clone(), TensorFile::open(&folder.join(file))?);
                }
                let found = files[file].entry(&name_in_file(name, &(*first..*behind)));
                let fits =
                    |dtype, shape: &[usize]| (dtype, shape) == (tensor.dtype, &[behind - first]);
                if !found.is_some_and(|piece| fits(piece.dtype, &piece.shape)) {
                    return Err(refuse(format!(
                        "`{file}` has no elements {first} to {behind} of it"
                    )));
                }
            }
        }
        Ok(Some(PieceFiles { files, tensors }))
    }

    /// A tensor by name.
    pub fn get(&self, name: &str) -> Option<TensorParts<'_>> {
        let tensor = self.tensors.get(name)?;
        let pieces = tensor.pieces.iter().map(|(file, first, behind)| {
            let file = &self.files[file];
            let piece = file.entry(&name_in_file(name, &(*first..*behind)));
            file.extent(piece.expect("pieces were found when the files were opened"))
        });
        Some(TensorParts {
            dtype: tensor.dtype,
            shape: &tensor.shape,
            bytes: Parts::in_files(pieces),
        })
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }
}
