//! PyTorch's memory snapshots: of all its versions, and broken.

mod hostile;
mod versions;
