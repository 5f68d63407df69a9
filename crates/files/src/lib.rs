//! Files that survive a power cut, and safetensors that are checked before they are used. A save makes all its
//! operations on a disk through [`FileSystem`], so that a test can stop it at any operation, or let the disk fill up at
//! any byte. [`write_tensors`] streams tensors from a [`TensorSource`] into one safetensors file or into shards with an
//! index, in Hugging Face's form; [`TensorFiles`] reads such files, whichever program wrote them. Neither has more of a
//! tensor in memory than a chunk ([`in_chunks`]). If several processes each write a part of every tensor,
//! [`write_pieces`] and [`PieceFiles`] do the same, and [`Tensors`] reads either.
//!
//! ```
//! use files::{Disk, Dtype, TensorFiles, TensorSource, TensorSpec, write_tensors};
//! use std::io::{self, Write};
//!
//! struct Ones(Vec<TensorSpec>);
//! impl TensorSource for Ones {
//!     fn tensors(&self) -> &[TensorSpec] {
//!         &self.0
//!     }
//!     fn write_to(&self, _index: usize, out: &mut dyn Write) -> io::Result<()> {
//!         (0..6).try_for_each(|_| out.write_all(&1f32.to_le_bytes()))
//!     }
//! }
//!
//! let folder = tempfile::tempdir()?;
//! let source = Ones(vec![TensorSpec { name: "w".into(), dtype: Dtype::F32, shape: vec![2, 3] }]);
//! write_tensors(&Disk, folder.path(), "model", &source, u64::MAX)?;
//! let files = TensorFiles::open_folder(folder.path(), "model")?;
//! assert_eq!(files.get("w").unwrap().bytes.get(4..8)?, &1f32.to_le_bytes()[..]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! This crate knows no model and no device.

mod chunks;
mod error;
mod file_system;
mod header;
mod locked_file;
mod parts;
mod pieces;
mod tensor_file;
mod tensor_files;
mod tensors;
mod unique;
mod whole;
mod widths;
mod write;
mod write_tensors;

pub use chunks::{CHUNK_BYTES, CHUNK_ELEMENTS, host_room, in_chunks};
pub use error::FilesError;
pub use file_system::{Disk, FileSystem, FolderEntry, OutFile, is_full, remove_tree};
pub use header::{Header, MAX_HEADER_BYTES, TensorEntry, read_header};
pub use locked_file::{LockedFile, NotLocked};
pub use parts::{Parts, TensorParts};
pub use pieces::{
    PIECE_INDEX, PieceFiles, PieceIndex, PieceSource, PieceSpec, WrittenPieces, piece_file_bytes,
    write_pieces,
};
pub use safetensors::Dtype;
pub use tensor_files::{TensorFiles, is_plain_name};
pub use tensors::Tensors;
pub use unique::unique_json;
pub use whole::{read_at_most, read_regular, read_small, read_small_text};
pub use widths::{narrow, widen};
pub use write::{WrittenFile, write_file};
pub use write_tensors::{
    TensorSource, TensorSpec, tensor_file_bytes, write_tensors, writing_order,
};
