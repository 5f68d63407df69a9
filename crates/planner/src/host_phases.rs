//! What the host has to hold while a run loads, saves, goes on and exports.

use crate::figures::Figures;
use kernels::Target;
use memory::format_bytes;
use model::{loading_bytes, saving_bytes};
use serde::Serialize;
use settings::Settings;
use std::fmt::{self, Display, Formatter};

/// Most host memory in each phase in which files are read or written: leases, and the chunks on their way between them and
/// files. On the CPU device all leases of the run count, for a GPU those that are pinned. What the process itself takes does
/// not count: its code, its training data, and what the library of matrix products packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HostPhases {
    /// Weights are loaded or made.
    pub load: u64,
    /// A checkpoint is saved.
    pub save: u64,
    /// Weights and states are loaded from a checkpoint.
    pub resume: u64,
    /// The model is written where `--save-final` says.
    pub export: u64,
    /// What of these is in no lease, at most.
    #[serde(skip)]
    pub(crate) beside_bytes: u64,
}

impl HostPhases {
    pub(crate) fn new(settings: &Settings, figures: &Figures, target: Target) -> HostPhases {
        let architecture = settings.architecture();
        let parameters = architecture.parameters();
        let [loading, saving] = [loading_bytes(parameters), saving_bytes(parameters)];
        let leased = |on_device| match target {
            Target::Cpu => on_device + figures.host_pinned_bytes,
            Target::Cuda => figures.host_pinned_bytes,
        };
        // The slab is reserved once weights are there.
        let load = leased(figures.persistent_bytes) + loading;
        let save = leased(figures.reserved_bytes) + saving;
        HostPhases {
            load,
            save,
            resume: load,
            export: save,
            beside_bytes: loading.max(saving),
        }
    }
}

impl Display for HostPhases {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [load, save, resume, export] =
            [self.load, self.save, self.resume, self.export].map(format_bytes);
        write!(
            f,
            "the host holds {load} to load, {save} to save, {resume} to resume, {export} to export"
        )
    }
}
