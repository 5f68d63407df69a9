//! The name of a device: `cpu`, `cuda` or `cuda:N`.

use std::fmt;
use std::str::FromStr;

use kernels::Target;
use serde::{Deserialize, Serialize};

/// The device of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda {
        /// Its number, from 0.
        index: usize,
    },
}

impl Device {
    /// The device of a run that names none: the first GPU, if this binary was built with CUDA and the driver finds a
    /// GPU, else the CPU.
    pub fn best() -> Device {
        match gpus() {
            0 => Device::Cpu,
            _ => Device::Cuda { index: 0 },
        }
    }

    /// The device of a rank: in place of the first GPU, the one with the rank's number on its machine.
    pub fn of_rank(self, local_rank: usize) -> Device {
        match self {
            Device::Cuda { index: 0 } => Device::Cuda {
                // A launcher may show each process only its own GPU.
                index: local_rank % gpus().max(1),
            },
            named => named,
        }
    }

    /// The target whose leases and scratch sizes apply.
    pub fn target(self) -> Target {
        match self {
            Device::Cpu => Target::Cpu,
            Device::Cuda { .. } => Target::Cuda,
        }
    }
}

/// The number of GPUs that this binary can use.
fn gpus() -> usize {
    #[cfg(feature = "cuda")]
    {
        static GPUS: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
        *GPUS.get_or_init(|| kernels::cuda::device_count().unwrap_or(0))
    }
    #[cfg(not(feature = "cuda"))]
    0
}

/// A text that is not a device's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` names no device; write cpu, cuda or cuda:N")]
pub struct DeviceError(String);

impl FromStr for Device {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda { index: 0 }),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|index| index.parse().ok())
                .map(|index| Self::Cuda { index })
                .ok_or_else(|| DeviceError(text.to_owned())),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.pad("cpu"),
            Self::Cuda { index: 0 } => f.pad("cuda"),
            Self::Cuda { index } => f.pad(&format!("cuda:{index}")),
        }
    }
}

impl TryFrom<String> for Device {
    type Error = DeviceError;

    fn try_from(text: String) -> Result<Self, DeviceError> {
        text.parse()
    }
}

impl From<Device> for String {
    fn from(device: Device) -> Self {
        device.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_back_as_they_are_written() {
        for device in [
            Device::Cpu,
            Device::Cuda { index: 0 },
            Device::Cuda { index: 3 },
        ] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda:0".parse(), Ok(Device::Cuda { index: 0 }));
    }

    #[test]
    fn other_names_are_refused() {
        for text in ["gpu", "cuda:", "cuda:-1", "CPU", ""] {
            let error = text.parse::<Device>().unwrap_err();
            assert!(error.to_string().contains("cuda:N"), "{error}");
        }
    }
}
