//! Files for data that does not fit into memory: optimizer states that live on a disk while a run trains. A
//! [`ScratchFolder`] belongs to one run at a time. Its files reserve their space when they are made, so that a disk
//! that is too small is refused before the first step. They are read and written past the page cache, so that their
//! bytes do not take memory as well. They are removed when the run ends; nothing needs them after that, since
//! checkpoints are written elsewhere.
//!
//! ```
//! use kernels::BlockFile;
//! use scratch::ScratchFolder;
//!
//! let parent = tempfile::tempdir()?;
//! let folder = ScratchFolder::open(parent.path().join("states"))?;
//! let file = folder.create("moments", 1 << 20)?;
//! file.write_at(4096, &[7; 4096])?;
//! let mut bytes = [0; 4096];
//! file.read_at(4096, &mut bytes)?;
//! assert_eq!(bytes, [7; 4096]);
//!
//! let refused = ScratchFolder::open(parent.path().join("states")).unwrap_err();
//! assert!(refused.to_string().contains("another run"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! *Invariant: knows no tensor and no step; every error names a file, and none leaves a copy under way.*

mod alignment;
mod engine;
mod error;
mod file;
mod folder;
mod lock;
mod pool;
mod ring;
mod space;
mod transfer;

pub use engine::Engine;
pub use error::ScratchError;
pub use file::{Access, ScratchFile};
pub use folder::ScratchFolder;
pub use space::{disk_of, free_bytes};
