//! An engine of device memory, tried like one of host memory: on libraries that stand in for NVIDIA's, they are the same.

use collectives::{DeviceGroup, Group, GroupError, Incoming, Outgoing};
use std::sync::Arc;

/// A group whose exchanges go by its streams; the stand-in's are done when they have been asked for.
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
