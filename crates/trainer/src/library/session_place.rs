//! Where a trainer's session is, and what it is opened on.

use crate::device::{DeviceStep, OpenDevice};
use crate::failure::{Failure, Result};
use memory::Memory;
use session::{Asleep, Session};
use std::path::PathBuf;

/// Where a trainer's session is.
pub(super) enum SessionPlace {
    /// On the device, ready for steps.
    Device(Box<Session>),
    /// In host memory, without a device.
    Host(Asleep),
    /// In this checkpoint.
    Checkpoint(PathBuf),
}

/// What a session is opened on, when a trainer starts and when it wakes.
pub(super) struct Opening {
    pub(super) device: OpenDevice,
    pub(super) step: DeviceStep,
    /// The limit on live device bytes.
    pub(super) limit: Option<u64>,
}

impl SessionPlace {
    pub(super) fn awake(&self) -> Result<&Session> {
        match self {
            SessionPlace::Device(session) => Ok(session),
            SessionPlace::Host(_) | SessionPlace::Checkpoint(_) => Err(asleep()),
        }
    }

    pub(super) fn awake_mut(&mut self) -> Result<&mut Session> {
        match self {
            SessionPlace::Device(session) => Ok(session),
            SessionPlace::Host(_) | SessionPlace::Checkpoint(_) => Err(asleep()),
        }
    }
}

fn asleep() -> Failure {
    Failure::Usage("the trainer sleeps, and has no memory of the device; call wake() first".into())
}

impl Opening {
    /// The device's memory, with the limit.
    pub(super) fn memory(&self) -> Memory {
        let memory = self.device.memory();
        memory.set_limit(self.limit);
        memory
    }

    /// A session that leases from it what lives across steps. Its weights are zero.
    pub(super) fn session(&self, memory: &Memory) -> Result<Session> {
        let kernels = self.device.kernels(&self.step, memory)?;
        let settings = self.step.settings.clone();
        Ok(Session::on_kernels(settings, memory, kernels)?)
    }
}
