//! The homes of weights, gradients and optimizer states in a configuration.

use super::choices::{HostPlace, OptimizerPlace, Release};
use super::error::refused;
use super::schema::Config;
use crate::Result;
use memory::{Home, Homes, Rank, Window};

impl From<HostPlace> for Home {
    fn from(place: HostPlace) -> Home {
        match place {
            HostPlace::None => Home::Device,
            HostPlace::Pinned => Home::Pinned,
        }
    }
}

impl Config {
    /// The homes of weights, gradients and optimizer states, and how what is not on the device is updated. With ranks,
    /// updates are made at the end of a step, because other ranks wait for them.
    ///
    /// # Errors
    /// If the settings for optimizer states contradict each other.
    pub fn homes(&self) -> Result<Homes> {
        let offload = &self.offload;
        Ok(Homes {
            weights: offload.parameters.into(),
            unit_slots: offload.parameter_slots,
            gradients: match self.optim.release {
                Release::Backward => Home::Released,
                Release::Step => offload.gradients.into(),
            },
            states: match (home_of_states(self)?, self.rank) {
                // Each of several ranks has its own folder, because they may share the disk.
                (Home::Disk(folder), Some(Rank { number, of: 2.. })) => {
                    Home::Disk(folder.join(format!("rank-{number}")))
                }
                (home, _) => home,
            },
            fraction: offload.fraction,
            window: match self.rank_in_group() {
                Some(_) => Window::End,
                None => offload.window,
            },
            chunk_bytes: offload.slab_mib << 20,
            chunk_slots: offload.buffer_count,
        })
    }
}

/// The home of optimizer states according to `offload.optimizer` and `offload.path`.
fn home_of_states(config: &Config) -> Result<Home> {
    let (place, path) = (&config.offload.optimizer, &config.offload.path);
    if path
        .as_ref()
        .is_some_and(|path| path.as_os_str().is_empty())
    {
        return refused("`offload.path` is empty; name a folder on a disk, or leave it out");
    }
    match (place, path) {
        (OptimizerPlace::None, None) => Ok(Home::Device),
        (OptimizerPlace::Pinned, None) => Ok(Home::Pinned),
        (OptimizerPlace::None | OptimizerPlace::Disk, Some(folder)) => {
            Ok(Home::Disk(folder.clone()))
        }
        (OptimizerPlace::Folder(named), path) if path.as_ref().is_none_or(|path| path == named) => {
            Ok(Home::Disk(named.clone()))
        }
        (OptimizerPlace::Disk, None) => refused(
            "`offload.optimizer` is disk, and no folder is named; write --offload-optimizer DIR, or add offload.path",
        ),
        (OptimizerPlace::Pinned, Some(folder)) => refused(format!(
            "`offload.optimizer` is pinned, but `offload.path` names the folder {} on a disk; keep one of the two",
            folder.display()
        )),
        (OptimizerPlace::Folder(named), path) => refused(format!(
            "`offload.optimizer` names the folder {} and `offload.path` another one, {}; keep one of the two",
            named.display(),
            path.as_deref().unwrap_or(named).display()
        )),
    }
}
