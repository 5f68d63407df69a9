//! Where a run keeps weights, gradients and states between steps, and how they come to the device.

use choices::choices;
use std::path::PathBuf;

/// Where something lives between steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Home {
    /// On the device.
    Device,
    /// In pinned host memory.
    Pinned,
    /// In files in this folder on a disk.
    Disk(PathBuf),
    /// Nowhere. It is used as soon as it is complete, and then its memory is given back.
    Released,
}

choices! {
    /// When states and weights that live elsewhere are updated.
    Window {
        /// During the next forward pass, each part of the model just before it runs.
        Forward = "forward",
        /// At the end of the step.
        End = "end",
    }
}

/// When the matrices of a run are updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateTime {
    /// At the end of a step.
    EndOfStep,
    /// Those of each part of the model just before the part's next forward pass, if something that the update needs lives elsewhere. The
    /// results of a step are complete only once that pass has been enqueued.
    NextForward,
    /// Those of each part as soon as the backward pass has computed their gradients, which are then released.
    Backward,
}

/// Where the matrices of a run live, and how those that live elsewhere come to the device. Vectors are small and stay
/// on the device.
#[derive(Clone, Debug, PartialEq)]
pub struct Homes {
    /// Home of the weights: the device, or pinned host memory.
    pub weights: Home,
    /// Number of units of weights on the device at one time, if they come from the host or from other ranks. One is in
    /// use while the others arrive.
    pub unit_slots: usize,
    /// Home of the gradients: the device, pinned host memory, or nowhere.
    pub gradients: Home,
    /// Home of the optimizer states: the device, pinned host memory, or a disk.
    pub states: Home,
    /// Share of the blocks whose states live there, counted from the last block, since the forward pass reaches these
    /// last. 1 includes the embedding.
    pub fraction: f64,
    /// When states and weights that live elsewhere are updated.
    pub window: Window,
    /// Upper limit for the bytes of an update's chunk.
    pub chunk_bytes: usize,
    /// Number of chunks on the device at one time.
    pub chunk_slots: usize,
}

impl Default for Homes {
    /// Everything lives on the device. The numbers are the defaults of settings.
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
    /// Whether something that an update needs lives elsewhere than on the device.
    pub fn streams_updates(&self) -> bool {
        self.states != Home::Device
            || self.weights != Home::Device
            || self.gradients == Home::Pinned
    }

    /// When weights are updated.
    pub fn update_time(&self) -> UpdateTime {
        match (&self.gradients, self.window) {
            (Home::Released, _) => UpdateTime::Backward,
            (_, Window::Forward) if self.streams_updates() => UpdateTime::NextForward,
            _ => UpdateTime::EndOfStep,
        }
    }

    /// Phrases for the end of a sentence that name what lives elsewhere. Each begins with a comma; the text may be
    /// empty.
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
