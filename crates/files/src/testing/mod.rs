//! Disks that fail, for tests of what saves to them.

mod full_disk;
mod power_cut;

pub use full_disk::FullDisk;
pub use power_cut::{Kept, PowerCut};
