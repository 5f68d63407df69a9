//! Host memory that a run needs to load, save, resume and export.

use crate::figures::Figures;
use kernels::Target;
use memory::format_bytes;
use model::{loading_bytes, saving_bytes};
use serde::Serialize;
use settings::Settings;
use std::fmt::{self, Display, Formatter};

/// The most host memory in each phase that reads or writes files: leases, and the chunks between them and the files. On
/// the CPU device all of the run's leases count, for a GPU only pinned ones. The process's own memory does not count:
/// its code, its training data, and the packing buffers of the library of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HostPhases {
    /// Weights are loaded or initialised.
    pub load: u64,
    /// A checkpoint is saved.
    pub save: u64,
    /// Weights and states are loaded from a checkpoint.
    pub resume: u64,
    /// The model is exported to `--save-final`.
    pub export: u64,
    /// The most of these bytes that is in no lease.
    #[serde(skip)]
    pub(crate) beside_bytes: u64,
}

impl HostPhases {
    pub(crate) fn new(settings: &Settings, figures: &Figures, target: Target) -> HostPhases {
        let architecture = settings.architecture();
        let parameters = architecture.parameters;
        let [loading, saving] = [loading_bytes(&parameters), saving_bytes(&parameters)];
        let leased = |on_device| match target {
            Target::Cpu => on_device + figures.host_pinned_bytes,
            Target::Cuda => figures.host_pinned_bytes,
        };
        // The slab is reserved only after the weights are loaded.
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
