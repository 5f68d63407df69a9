//! Peaks of memory from files that trainers wrote: snapshots of PyTorch's allocator and those of `--trace`,
//! `metrics.jsonl` and `plan.json`; and what grew between two of them.
//!
//! ```
//! # fn main() -> Result<(), snapshots::RecordError> {
//! # let folder = std::env::temp_dir().join(format!("snapshots-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).unwrap();
//! # let [base, new] = [100, 120].map(|bytes| {
//! #     let path = folder.join(format!("{bytes}.json"));
//! #     std::fs::write(&path, format!("{{\"peak_bytes\": {bytes}}}")).unwrap();
//! #     path
//! # });
//! let base = snapshots::peaks(&base)?;
//! let new = snapshots::peaks(&new)?;
//! let comparison = snapshots::Comparison::new(&base, &new, |base_bytes| base_bytes / 10);
//! assert!(comparison.grew);
//! # std::fs::remove_dir_all(folder).unwrap();
//! # Ok(())
//! # }
//! ```

mod comparison;
mod frames;
mod moments;
mod peak;
mod pickle;
mod records;
mod snapshot;
mod tree;

pub use comparison::{ComparedFile, Comparison, DeviceComparison, GroupChange};
pub use moments::{Layers, LiveMoment, MemoryCourse};
pub use peak::{LiveGroup, RecordedPeak, ReservedMemory};
pub use pickle::PickleError;
pub use records::{RecordError, peaks};
pub use snapshot::{MemorySnapshot, SnapshotError};
