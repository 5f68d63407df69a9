//! A stand-in for NVML in a build without CUDA, which uses no GPU.

use super::figures::{GpuReading, Limits};
use super::tenants::Tenants;

/// A GPU that no such build has.
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
