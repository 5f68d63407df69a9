//! Tests an engine of device memory like one of host memory: with the stand-ins for NVIDIA's libraries both memories
//! are the same.

use collectives::{DeviceGroup, Group, GroupError, Incoming, Outgoing};
use std::sync::Arc;

/// A group whose exchanges go through a stream; the stand-in's are complete when the call returns.
pub struct OnDevice(Arc<dyn Group>);

impl OnDevice {
    pub fn of(group: Arc<dyn Group>) -> Arc<dyn Group> {
        Arc::new(OnDevice(group))
    }
}

impl Group for OnDevice {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn engine(&self) -> String {
        self.0.engine()
    }

    unsafe fn exchange(&self, sends: &[Outgoing], receives: &[Incoming]) -> Result<(), GroupError> {
        let device = self.0.on_device().expect("NCCL moves device memory");
        // SAFETY: the caller's promise; a null stream is CUDA's default.
        unsafe { device.enqueue(std::ptr::null_mut(), sends, receives)? };
        device.check()
    }

    fn share(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        self.0.share(bytes)
    }

    fn sent_bytes(&self) -> u64 {
        self.0.sent_bytes()
    }

    fn abort(&self, code: i32) {
        self.0.abort(code)
    }

    fn leave(&self) {
        self.0.leave()
    }

    fn on_device(&self) -> Option<&dyn DeviceGroup> {
        self.0.on_device()
    }
}
