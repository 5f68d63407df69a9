//! The file of optimizer states that live on a disk.

use crate::Result;
use memory::{Home, Memory, Rank};
use optim::Optimizer;
use scratch::ScratchFolder;
use std::path::Path;

/// Makes the file in the folder that is the states' home, before anything is computed. None on shapes.
pub(crate) fn states_file(
    home: &Home,
    memory: &Memory,
    rank: Rank,
    optimizer: &mut Optimizer,
) -> Result<Option<ScratchFolder>> {
    let (Home::Disk(path), Some(bytes), false) = (home, optimizer.disk_bytes(), memory.is_shapes())
    else {
        return Ok(None);
    };
    sweep_other_ranks(path, rank);
    let folder = ScratchFolder::open(path)?;
    optimizer.use_file(folder.create("optimizer-states", bytes)?);
    Ok(Some(folder))
}

/// Removes folders of a killed run's ranks that are no rank's of this run, because that run had more of them.
fn sweep_other_ranks(path: &Path, rank: Rank) {
    let (folder, first) = match rank {
        Rank { of: 0 | 1, .. } => (Some(path), 0),
        Rank { number: 0, of } => (path.parent(), of),
        _ => return,
    };
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("rank-"));
        let number = number.and_then(|number| number.parse::<usize>().ok());
        if number.is_some_and(|number| number >= first) {
            ScratchFolder::sweep(&entry.path());
        }
    }
}
