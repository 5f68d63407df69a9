//! Streams of another library that works in the same context, such as candle's.

use super::{CudaDevice, error};
use crate::{Queue, Result};
use cudarc::driver::result::DriverError;
use std::ffi::c_void;

impl CudaDevice {
    /// Makes its context that of this thread, which another library may have left in the context of another GPU.
    ///
    /// # Errors
    /// [`crate::KernelError`] if the driver refuses.
    pub fn enter(&self) -> Result {
        self.streams.enter().map_err(error::of_driver("cuda"))
    }

    /// Makes the computation wait for all work enqueued so far in another library's stream.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's primary context.
    ///
    /// # Errors
    /// [`crate::KernelError`] if the driver refuses.
    pub unsafe fn wait_for_stream(&self, stream: *mut c_void) -> Result {
        self.between_sections();
        let ordered = self.streams.order_streams(stream.cast(), self.stream);
        ordered.map_err(error::of_driver("cuda"))
    }

    /// Makes another library's stream wait for all computation enqueued so far. If the driver refuses, the caller waits
    /// instead.
    ///
    /// # Safety
    /// As for [`CudaDevice::wait_for_stream`].
    pub unsafe fn hold_back_stream(&self, stream: *mut c_void) {
        self.between_sections();
        let ordered = self.streams.order_streams(self.stream, stream.cast());
        let waited = ordered.or_else(|_: DriverError| self.streams.synchronize(Queue::Compute));
        // A failure here is one of earlier work, and is told by the next operation.
        let _ = waited;
    }

    fn between_sections(&self) {
        assert!(
            !self.keeps_back.get(),
            "what a section keeps back has not reached the stream"
        );
    }
}
