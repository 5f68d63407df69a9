//! The file of optimizer states that live on a disk.

use crate::error::SessionError;
use memory::{Home, Memory};
use optim::Optimizer;
use scratch::ScratchFolder;

/// Makes the file in the folder that is the states' home, before anything is computed. None on shapes.
pub(crate) fn states_file(
    home: &Home,
    memory: &Memory,
    optimizer: &mut Optimizer,
) -> Result<Option<ScratchFolder>, SessionError> {
    let (Home::Disk(path), Some(bytes), false) = (home, optimizer.disk_bytes(), memory.is_shapes())
    else {
        return Ok(None);
    };
    let folder = ScratchFolder::open(path)?;
    optimizer.use_file(folder.create("optimizer-states", bytes)?);
    Ok(Some(folder))
}
