//! Replaces NVML in a build without CUDA, which uses no GPU.

use super::figures::{GpuReading, Limits};
use super::tenants::Tenants;

/// A GPU, which does not exist in such a build.
pub(super) enum Gpu {}

impl Gpu {
    pub(super) fn find(_device: settings::Device) -> Option<Gpu> {
        None
    }

    pub(super) fn limits(&self) -> Limits {
        match *self {}
    }

    pub(super) fn read(&self) -> GpuReading {
        match *self {}
    }

    pub(super) fn tenants(&self) -> Tenants {
        match *self {}
    }
}
