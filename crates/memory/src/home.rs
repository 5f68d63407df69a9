//! Where a run keeps what lives across steps, and how what is not on the device comes to it.

use choices::choices;
use std::path::PathBuf;

/// Where something lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Home {
    /// On the device.
    Device,
    /// In pinned host memory.
    Pinned,
    /// In files in this folder on a disk.
    Disk(PathBuf),
    /// Nowhere: it is used as soon as it is there, and its memory is given back.
    Released,
}

choices! {
    /// When what is not on the device is updated.
    Window {
        /// During the next forward pass, each part of the model just before it runs.
        Forward = "forward",
        /// At the end of the step.
        End = "end",
    }
}

/// Where the matrices of a run live, and how what is not on the device comes to it. Vectors, which are small, stay on the
/// device.
#[derive(Clone, Debug, PartialEq)]
pub struct Homes {
    /// The weights': the device, or pinned host memory.
    pub weights: Home,
    /// Units of weights that are on the device at a time, where they come from the host or from other ranks: the one in use,
    /// and those that come meanwhile.
    pub unit_slots: usize,
    /// The gradients': the device, pinned host memory, or none.
    pub gradients: Home,
    /// The optimizer states': the device, pinned host memory, or a disk.
    pub states: Home,
    /// Share of the blocks whose states live there, from the last one on: the forward pass leaves those the most time. 1
    /// takes the embedding too.
    pub fraction: f64,
    /// When what is not on the device is updated.
    pub window: Window,
    /// Most bytes of a chunk of an update.
    pub chunk_bytes: usize,
    /// Chunks that are on the device at a time.
    pub chunk_slots: usize,
}

impl Default for Homes {
    /// Everything on the device; the numbers are those of a configuration that names none.
    fn default() -> Homes {
        Homes {
            weights: Home::Device,
            unit_slots: 2,
            gradients: Home::Device,
            states: Home::Device,
            fraction: 1.0,
            window: Window::Forward,
            chunk_bytes: 64 << 20,
            chunk_slots: 3,
        }
    }
}

impl Homes {
    /// Whether anything that an update needs is not on the device.
    pub fn streams_updates(&self) -> bool {
        self.states != Home::Device
            || self.weights != Home::Device
            || self.gradients == Home::Pinned
    }

    /// Whether updates wait for the next forward pass: an outcome of a step is complete only when that has been asked for.
    pub fn updates_in_forward(&self) -> bool {
        self.streams_updates() && self.window == Window::Forward && self.gradients != Home::Released
    }

    /// Names what is not on the device, to end a sentence with: empty, or phrases that each begin with a comma.
    pub fn words(&self) -> String {
        let states = match &self.states {
            Home::Pinned => ", optimizer states offloaded",
            Home::Disk(folder) => &format!(", optimizer states in {}", folder.display()),
            Home::Device | Home::Released => "",
        };
        let weights = match self.weights {
            Home::Pinned => ", weights offloaded",
            _ => "",
        };
        let gradients = match self.gradients {
            Home::Pinned => ", gradients offloaded",
            Home::Released => ", gradients released in the backward pass",
            Home::Device | Home::Disk(_) => "",
        };
        [states, weights, gradients].concat()
    }
}
