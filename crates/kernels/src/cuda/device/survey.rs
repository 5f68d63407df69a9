//! Measures a GPU: the unit in which it allocates memory, and how fast it copies.

use super::block::Block;
use super::handles::Stream;
use super::{CudaDevice, error};
use crate::{KernelError, Result};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys;
use memory::Space;
use std::time::{Duration, Instant};

/// The operation named in errors.
const OPERATION: &str = "doctor";

/// Bytes of a measured copy: 5 ms over PCIe 5.
const COPY_BYTES: u64 = 256 << 20;

/// Copies per measurement; the fastest counts.
const REPETITIONS: usize = 5;

/// Copies between page-locked host memory and the device by its copy engines, in units of 10^9 bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyRates {
    /// Host to device, alone.
    pub h2d_gbps: f64,
    /// Device to host, alone.
    pub d2h_gbps: f64,
    /// Both at a time, on a stream each: the sum of both ways.
    pub both_ways_gbps: f64,
}

impl CudaDevice {
    /// The unit in which the driver maps this device's memory.
    ///
    /// # Errors
    /// [`KernelError`] if the driver refuses.
    pub fn allocation_granularity_bytes(&self) -> Result<u64> {
        let properties = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.device,
            },
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: the properties are valid and read before the call returns, which writes one number.
        let asked = unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, &properties, least) };
        asked.result().map_err(refused)?;
        Ok(bytes as u64)
    }

    /// Measures copies between page-locked host memory and the device. Takes less than a second, and 512 MiB of each
    /// memory.
    ///
    /// # Errors
    /// [`KernelError`] if the memory is refused or a copy fails.
    pub fn copy_rates(&self) -> Result<CopyRates> {
        let lane = || Lane::new(self);
        let (up, down) = (lane()?, lane()?);
        // The blocks are zeroed in the device's own stream.
        self.synchronize().map_err(refused)?;
        let best = |lanes: &[(&Lane, Way)]| -> Result<f64> {
            let times = (0..=REPETITIONS).map(|_| timed(lanes).map_err(refused));
            let times: Vec<Duration> = times.collect::<Result<_, _>>()?;
            // The first copy only wakes the copy engines.
            let best = times.into_iter().skip(1).min().unwrap_or_default();
            Ok((COPY_BYTES * lanes.len() as u64) as f64 / best.as_secs_f64() / 1e9)
        };
        Ok(CopyRates {
            h2d_gbps: best(&[(&up, Way::Up)])?,
            d2h_gbps: best(&[(&down, Way::Down)])?,
            both_ways_gbps: best(&[(&up, Way::Up), (&down, Way::Down)])?,
        })
    }
}

fn refused(error: DriverError) -> KernelError {
    error::of_driver(OPERATION)(error)
}

/// A direction of a copy.
#[derive(Clone, Copy)]
enum Way {
    Up,
    Down,
}

/// Starts a copy in each lane, and waits for all.
fn timed(lanes: &[(&Lane, Way)]) -> Result<Duration, DriverError> {
    let start = Instant::now();
    for (lane, way) in lanes {
        lane.copy(*way)?;
    }
    for (lane, _) in lanes {
        lane.stream.synchronize()?;
    }
    Ok(start.elapsed())
}

/// Memory on both sides, and a stream to copy in.
struct Lane<'a> {
    // Dropped first: a stream waits for its copies.
    stream: Stream,
    host: Block<'a>,
    device: Block<'a>,
}

impl<'a> Lane<'a> {
    fn new(device: &'a CudaDevice) -> Result<Lane<'a>> {
        Ok(Lane {
            stream: Stream::new().map_err(refused)?,
            host: Block::new(device, OPERATION, Space::Host, COPY_BYTES)?,
            device: Block::new(device, OPERATION, Space::Device, COPY_BYTES)?,
        })
    }

    fn copy(&self, way: Way) -> Result<(), DriverError> {
        let (host, device) = (self.host.pointer(), self.device.pointer());
        let (bytes, stream) = (COPY_BYTES as usize, self.stream.handle());
        // SAFETY: both blocks have this size, and nothing but this stream uses them.
        let copied = unsafe {
            match way {
                Way::Up => sys::cuMemcpyHtoDAsync_v2(device as u64, host.cast(), bytes, stream),
                Way::Down => sys::cuMemcpyDtoHAsync_v2(host.cast(), device as u64, bytes, stream),
            }
        };
        copied.result()
    }
}
