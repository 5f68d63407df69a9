//! Random data for what is timed or repeated on a device. On zeros a GPU draws less power and runs at higher clocks, and sums
//! are the same in any order.

use super::{CudaDriver, error};
use crate::cuda::{Cuda, Driver};
use crate::random::random_u32;
use crate::{KernelError, Kernels, Result};
use cudarc::driver::sys;
use half::bf16;
use memory::Out;

/// Bytes after which the data begins again: 16 times a prime, so that rows of a matrix are not alike.
const PERIOD_BYTES: usize = 16 * 65_521;

/// The operation named in errors.
const OPERATION: &str = "random data";

/// Numbers from -1 to 1, as bf16; two of them are an f32 from -1 to 1.
pub(super) struct RandomData(Vec<u8>);

impl RandomData {
    pub(super) fn new() -> RandomData {
        let elements = 0..(PERIOD_BYTES / 2) as u64;
        RandomData(elements.flat_map(|at| uniform(0, at)).collect())
    }

    /// Fills memory of the device, in the order of its computation.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device, which nothing but the computation uses.
    pub(super) unsafe fn fill(&self, driver: &CudaDriver, to: *mut u8, bytes: u64) -> Result {
        // SAFETY: the caller's promise.
        unsafe { repeat(driver, to, bytes as usize, &self.0) }
    }
}

impl Kernels<Cuda<CudaDriver>> {
    /// Fills a contiguous tensor with bytes that begin again and again, in the order of the computation: for measurements.
    ///
    /// # Errors
    /// [`KernelError`] if the tensor is strided, there are no bytes, or the device refuses.
    pub fn fill_with(&self, out: Out, pattern: &[u8]) -> Result {
        let fits = out.is_contiguous() && !pattern.is_empty();
        KernelError::unless(fits, OPERATION, || {
            "the tensor is strided, or there is nothing to repeat".into()
        })?;
        // SAFETY: the tensor is contiguous, and a view that writes excludes others.
        unsafe { repeat(&self.backend.driver, out.pointer(), out.bytes(), pattern) }
    }
}

/// Fills memory of the device with a pattern, doubling what is there.
///
/// # Safety
/// As for [`RandomData::fill`].
unsafe fn repeat(driver: &CudaDriver, to: *mut u8, bytes: usize, pattern: &[u8]) -> Result {
    let mut filled = bytes.min(pattern.len());
    // SAFETY: the caller's promise.
    unsafe { driver.copy_to_device(to, &pattern[..filled]) }?;
    while filled < bytes {
        let more = filled.min(bytes - filled);
        let (end, start) = (to as u64 + filled as u64, to as u64);
        // SAFETY: the caller's promise; what is read lies before what is written.
        let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(end, start, more, driver.device.stream) };
        copied.result().map_err(error::of_driver(OPERATION))?;
        filled += more;
    }
    Ok(())
}

/// A bf16 from -1 to 1.
pub(super) fn uniform(key: u64, at: u64) -> [u8; 2] {
    let unit = random_u32(key, at) as f32 / u32::MAX as f32;
    bf16::from_f32(2.0 * unit - 1.0).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In both types, and most of them differ.
    #[test]
    fn data_is_finite_and_varied_as_bf16_and_as_f32() {
        let data = RandomData::new().0;
        let narrow = |bytes: &[u8]| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let wide = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let halves: Vec<f32> = data.chunks_exact(2).map(narrow).collect();
        let wholes: Vec<f32> = data.chunks_exact(4).map(wide).collect();
        for numbers in [&halves, &wholes] {
            assert!(numbers.iter().all(|number| number.abs() <= 1.01));
            let positive = numbers.iter().filter(|number| **number > 0.0).count();
            assert!((0.45..0.55).contains(&(positive as f64 / numbers.len() as f64)));
        }
        let mut bits: Vec<u32> = wholes.iter().map(|number| number.to_bits()).collect();
        bits.sort_unstable();
        bits.dedup();
        assert!(bits.len() > wholes.len() / 2);
    }
}
