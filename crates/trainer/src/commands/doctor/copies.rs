//! Measures how fast the processor copies beside its computation: the cost of offload on the CPU device.

use crate::failure::Result;
use kernels::{KernelError, Kernels, Queue};
use memory::{Buffer, Category, DType, Memory};
use serde::Serialize;
use std::time::{Duration, Instant};

/// The rates of copies between pinned and other memory, as queues make them, in units of 10^9 bytes a second.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Copies {
    /// Uploads: `hardware.h2d_gbps`.
    h2d_gbps: f64,
    /// Downloads: `hardware.d2h_gbps`.
    d2h_gbps: f64,
    /// The sum of both directions at a time: `hardware.both_ways_gbps`.
    both_ways_gbps: f64,
}

/// Bytes of a copy, more than caches hold.
const COPY_BYTES: usize = 128 << 20;

/// The number of copies, of which the fastest counts.
const REPETITIONS: usize = 5;

/// A pair of buffers for copies.
struct Lane {
    device: Buffer,
    host: Buffer,
}

impl Lane {
    fn lease(memory: &Memory) -> Result<Lane> {
        let (category, dims) = (Category::Temporary, [COPY_BYTES]);
        Ok(Lane {
            device: memory.lease_persistent(category, "device", dims, DType::U8)?,
            host: memory.lease_pinned(category, "host", dims, DType::U8)?,
        })
    }
}

impl Copies {
    /// Measures for less than a second.
    ///
    /// # Errors
    /// [`Failure::OutOfMemory`] if there is no half a GiB left.
    pub(super) fn measure(cpu: &Kernels, memory: &Memory) -> Result<Copies> {
        let (mut up, mut down) = (Lane::lease(memory)?, Lane::lease(memory)?);
        let mut best = |queues: &[Queue]| -> Result<f64> {
            let mut least = Duration::MAX;
            // The first repetition starts threads and touches pages, so it does not count.
            for repetition in 0..=REPETITIONS {
                let start = Instant::now();
                copy(cpu, &mut up, &mut down, queues)?;
                if repetition > 0 {
                    least = least.min(start.elapsed());
                }
            }
            let bytes = queues.len() * COPY_BYTES;
            Ok(bytes as f64 / least.as_secs_f64() / 1e9)
        };
        Ok(Copies {
            h2d_gbps: best(&[Queue::Upload])?,
            d2h_gbps: best(&[Queue::Download])?,
            both_ways_gbps: best(&[Queue::Upload, Queue::Download])?,
        })
    }
}

/// Starts a copy in each of the queues, and waits for all of them.
fn copy(
    cpu: &Kernels,
    up: &mut Lane,
    down: &mut Lane,
    queues: &[Queue],
) -> Result<(), KernelError> {
    for queue in queues {
        // SAFETY: the lanes outlive the copies, are different buffers, and are not used until both copies are over.
        unsafe {
            match queue {
                Queue::Upload => cpu.start_upload(up.device.view_mut(), up.host.view())?,
                _ => cpu.start_download(down.host.view_mut(), down.device.view())?,
            }
        }
    }
    let finish = |queue: &Queue| cpu.finish(cpu.record(*queue)?);
    queues.iter().try_for_each(finish)
}

impl std::fmt::Display for Copies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.1} GB/s up, {:.1} GB/s down, {:.1} GB/s both ways",
            self.h2d_gbps, self.d2h_gbps, self.both_ways_gbps
        )
    }
}
