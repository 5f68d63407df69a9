//! The bytes that cross between disk, host and device in a step, by purpose.

use kernels::{StepTraffic, Traffic};
use serde::Serialize;

/// Bytes that cross in a step, by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Crossing {
    /// Weights, which are fetched for their use, and sent back after an update.
    pub parameters: WayBytes,
    /// Gradients, which are sent and fetched between micro-batches.
    pub gradients: WayBytes,
    /// What is fetched for an update and sent back: states, and offloaded gradients.
    pub optimizer: WayBytes,
    /// Activations, and the tokens of the step.
    pub activations: WayBytes,
}

/// Bytes that cross in a step, by route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WayBytes {
    /// From the host to the device.
    pub h2d_bytes: u64,
    /// From the device to the host.
    pub d2h_bytes: u64,
    /// From the disk to the host.
    pub disk_read_bytes: u64,
    /// From the host to the disk.
    pub disk_written_bytes: u64,
}

impl From<Traffic> for WayBytes {
    fn from(traffic: Traffic) -> WayBytes {
        WayBytes {
            h2d_bytes: traffic.h2d_bytes,
            d2h_bytes: traffic.d2h_bytes,
            disk_read_bytes: traffic.disk_read_bytes,
            disk_written_bytes: traffic.disk_written_bytes,
        }
    }
}

impl From<StepTraffic> for Crossing {
    fn from(crossed: StepTraffic) -> Crossing {
        Crossing {
            parameters: crossed.weights.into(),
            gradients: crossed.gradients.into(),
            optimizer: crossed.update.into(),
            activations: crossed.passes.into(),
        }
    }
}
