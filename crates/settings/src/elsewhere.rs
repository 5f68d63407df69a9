//! What lives elsewhere than on the device: as a configuration says it, and as a step reads it.

use super::choices::{HostPlace, Release, Window};
use super::error::ConfigError;
use super::ranks::Member;
use super::schema::Config;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Where the optimizer's states are to live, as `offload.optimizer` says it: a name, or else a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum OptimizerPlace {
    /// On the device, unless `offload.path` names a folder.
    None,
    /// In pinned host memory.
    Pinned,
    /// In the folder that `offload.path` names.
    Disk,
    /// In this folder on a disk.
    Folder(PathBuf),
}

impl OptimizerPlace {
    /// The values that are no folders.
    pub const NAMES: &'static [&'static str] = &["none", "pinned", "disk"];
}

impl From<String> for OptimizerPlace {
    fn from(text: String) -> OptimizerPlace {
        match &text[..] {
            "none" => OptimizerPlace::None,
            "pinned" => OptimizerPlace::Pinned,
            "disk" => OptimizerPlace::Disk,
            _ => OptimizerPlace::Folder(text.into()),
        }
    }
}

impl From<OptimizerPlace> for String {
    fn from(place: OptimizerPlace) -> String {
        match place {
            OptimizerPlace::None => "none".into(),
            OptimizerPlace::Pinned => "pinned".into(),
            OptimizerPlace::Disk => "disk".into(),
            // It was read from a text, and nothing else makes one.
            OptimizerPlace::Folder(folder) => folder.to_string_lossy().into_owned(),
        }
    }
}

/// What lives elsewhere than on the device, and how it comes to be updated.
#[derive(Clone, Debug, PartialEq)]
pub struct Elsewhere {
    /// Where the optimizer's states live.
    pub states: StatesPlace,
    /// Some: weights live in pinned host memory, and so many units of them are on the device at a time.
    pub parameter_slots: Option<usize>,
    /// Where gradients live.
    pub gradients: GradientsPlace,
    /// Share of the blocks whose states are offloaded, from the last one on: the forward pass leaves those the most
    /// time. 1 takes the embedding too.
    pub fraction: f64,
    /// When what is not on the device is updated.
    pub window: Window,
    /// Most bytes of a chunk.
    pub chunk_bytes: usize,
    /// Chunks that are on the device at a time.
    pub slots: usize,
}

/// Where the optimizer's states live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatesPlace {
    /// On the device.
    Device,
    /// In pinned host memory.
    Pinned,
    /// In files in this folder.
    Disk(PathBuf),
}

/// Where gradients live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientsPlace {
    /// On the device.
    Device,
    /// In pinned host memory.
    Pinned,
    /// Nowhere: a unit is updated as soon as its gradient is there, and that is given back.
    Released,
}

impl StatesPlace {
    /// Of several ranks each has a folder of its own: they may share the disk.
    fn of_rank(self, member: Option<Member>) -> StatesPlace {
        match (self, member) {
            (StatesPlace::Disk(folder), Some(Member { rank, size: 2.. })) => {
                StatesPlace::Disk(folder.join(format!("rank-{rank}")))
            }
            (place, _) => place,
        }
    }
}

impl Elsewhere {
    /// Whether anything that an update needs is not on the device.
    pub fn streams_updates(&self) -> bool {
        self.states != StatesPlace::Device
            || self.parameter_slots.is_some()
            || self.gradients == GradientsPlace::Pinned
    }

    /// Whether updates wait for the next forward pass: an outcome of a step is complete only when that has been asked for.
    pub fn updates_in_forward(&self) -> bool {
        self.streams_updates()
            && self.window == Window::Forward
            && self.gradients != GradientsPlace::Released
    }

    /// What is elsewhere, for a sentence: nothing, or parts that each begin with a comma.
    pub fn words(&self) -> String {
        let mut words = String::new();
        match &self.states {
            StatesPlace::Device => {}
            StatesPlace::Pinned => words += ", optimizer states offloaded",
            StatesPlace::Disk(folder) => {
                words += &format!(", optimizer states in {}", folder.display());
            }
        }
        if self.parameter_slots.is_some() {
            words += ", weights offloaded";
        }
        match self.gradients {
            GradientsPlace::Device => {}
            GradientsPlace::Pinned => words += ", gradients offloaded",
            GradientsPlace::Released => words += ", gradients released in the backward pass",
        }
        words
    }

    /// What a configuration says.
    ///
    /// # Errors
    /// Places of the optimizer's states that contradict.
    pub fn of(config: &Config) -> Result<Elsewhere, ConfigError> {
        let offload = &config.offload;
        let is_pinned = offload.parameters == HostPlace::Pinned;
        Ok(Elsewhere {
            states: states_place(config)?.of_rank(config.member),
            parameter_slots: is_pinned.then_some(offload.parameter_slots),
            gradients: match (config.optim.release, offload.gradients) {
                (Release::Backward, _) => GradientsPlace::Released,
                (Release::Step, HostPlace::Pinned) => GradientsPlace::Pinned,
                (Release::Step, HostPlace::None) => GradientsPlace::Device,
            },
            fraction: offload.fraction,
            window: offload.window,
            chunk_bytes: offload.slab_mib << 20,
            slots: offload.buffer_count,
        })
    }
}

impl Default for Elsewhere {
    /// Everything on the device.
    fn default() -> Elsewhere {
        Elsewhere::of(&Config::default()).expect("the defaults place everything on the device")
    }
}

/// Where the states live that `offload.optimizer` and `offload.path` place together.
fn states_place(config: &Config) -> Result<StatesPlace, ConfigError> {
    let (place, path) = (&config.offload.optimizer, &config.offload.path);
    let contradiction = |sentence: String| Err(ConfigError::Contradiction(sentence));
    if path
        .as_ref()
        .is_some_and(|path| path.as_os_str().is_empty())
    {
        return contradiction(
            "`offload.path` is empty; name a folder on a disk, or leave it out".into(),
        );
    }
    match (place, path) {
        (OptimizerPlace::None, None) => Ok(StatesPlace::Device),
        (OptimizerPlace::Pinned, None) => Ok(StatesPlace::Pinned),
        (OptimizerPlace::None | OptimizerPlace::Disk, Some(folder)) => {
            Ok(StatesPlace::Disk(folder.clone()))
        }
        (OptimizerPlace::Folder(named), path) if path.as_ref().is_none_or(|path| path == named) => {
            Ok(StatesPlace::Disk(named.clone()))
        }
        (OptimizerPlace::Disk, None) => contradiction(
            "`offload.optimizer` is disk, and no folder is named; write --offload-optimizer DIR, or add offload.path".into(),
        ),
        (OptimizerPlace::Pinned, Some(folder)) => contradiction(format!(
            "`offload.optimizer` is pinned, but `offload.path` names the folder {} on a disk; keep one of the two",
            folder.display()
        )),
        (OptimizerPlace::Folder(named), path) => contradiction(format!(
            "`offload.optimizer` names the folder {} and `offload.path` another one, {}; keep one of the two",
            named.display(),
            path.as_deref().unwrap_or(named).display()
        )),
    }
}
