//! What crosses in a step between disk, host and device, by what it is.

use kernels::Traffic;
use serde::Serialize;
use session::StepTraffic;

/// Bytes that cross in a step, by what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Crossing {
    /// Weights, which come when they are used and go back when they were updated.
    pub parameters: WayBytes,
    /// Gradients, between micro-batches.
    pub gradients: WayBytes,
    /// What comes for an update and goes back: states, and offloaded gradients.
    pub optimizer: WayBytes,
    /// Activations, and the tokens of the step.
    pub activations: WayBytes,
}

/// Bytes that cross in a step, by their way.
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
