//! Measures how fast a device is with the operations that training uses.

use crate::failure::{Failure, Result};
use kernels::random::{key, random_u32};
use kernels::{Init, Kernels, Matmul, Queue, Target};
use memory::{Category, DType, Memory};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Sizes of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateWork {
    /// Rows and columns of square products.
    pub(super) gemm_size: usize,
    /// Elements of a copy.
    pub(super) copy_elements: usize,
    /// The number of repetitions, of which the fastest counts.
    pub(super) repetitions: usize,
}

/// Measured rates.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct DeviceRates {
    /// Matrix products, in units of 10^12 operations a second.
    gemm_tflops: f64,
    /// Copies within the device's memory, read and written bytes together, in units of 10^9 a second.
    copy_gbps: f64,
    /// Uploads as training does them, in units of 10^9 bytes a second.
    upload_gbps: f64,
    /// Downloads as training does them.
    download_gbps: f64,
}

impl RateWork {
    /// Operands that exceed the caches, and take less than about a second. On a GPU they have 900 MiB.
    pub(crate) fn of(target: Target) -> RateWork {
        match target {
            Target::Cpu => RateWork {
                gemm_size: 2048,
                copy_elements: 32 << 20,
                repetitions: 5,
            },
            Target::Cuda => RateWork {
                gemm_size: 8192,
                copy_elements: 128 << 20,
                repetitions: 10,
            },
        }
    }
}

impl DeviceRates {
    /// Matrix products, in units of 10^12 operations a second.
    pub(crate) fn gemm_tflops(&self) -> f64 {
        self.gemm_tflops
    }

    /// Copies on the device, read and written bytes together, in units of 10^9 a second.
    pub(crate) fn copy_gbps(&self) -> f64 {
        self.copy_gbps
    }

    /// Measures a device with operands of `dtype`.
    ///
    /// # Errors
    /// [`Failure::OutOfMemory`] if the operands do not fit; [`Failure::Device`] if an operation fails.
    pub(crate) fn measure(
        kernels: &Kernels,
        memory: &Memory,
        dtype: DType,
        work: RateWork,
    ) -> Result<DeviceRates> {
        let (size, elements) = (work.gemm_size, work.copy_elements);
        let lease = |name, elements: usize| {
            memory.lease_persistent(Category::Temporary, name, [elements], dtype)
        };
        let (mut from, mut to) = (lease("from", elements)?, lease("to", elements)?);
        let [mut a, mut b] = [lease("a", size * size)?, lease("b", size * size)?];
        let mut out = lease("out", size * size)?;
        let mut bytes = vec![0u8; elements * dtype.size_in_bytes()];
        let best = |time: &mut dyn FnMut() -> Result<Duration>| {
            let times = (0..=work.repetitions).map(|_| time());
            // The first one loads kernels and touches pages, so it does not count.
            let times: Vec<Duration> = times.skip(1).collect::<Result<_>>()?;
            let best = times.into_iter().min().unwrap_or_default();
            Ok::<f64, Failure>(best.as_secs_f64())
        };
        let upload = best(&mut || {
            let start = Instant::now();
            kernels.upload(from.view_mut(), &bytes)?;
            kernels.finish(kernels.record(Queue::Compute)?)?;
            Ok(start.elapsed())
        })?;
        let copy = best(&mut || {
            let (mut out, x) = (to.view_mut(), from.view());
            let time = kernels.timed(|| {
                let out = out.reborrow();
                kernels.run(kernels::Copy { out, x })
            });
            Ok(time?)
        })?;
        let download = best(&mut || {
            let start = Instant::now();
            kernels.download(&mut bytes, to.view())?;
            Ok(start.elapsed())
        })?;
        // Not zeros: their products draw less power, so the clock would be higher.
        let operand = random_bytes(size * size, dtype);
        kernels.upload(a.view_mut(), &operand)?;
        kernels.upload(b.view_mut(), &operand)?;
        let gemm = best(&mut || {
            let square = [size, size];
            let (a, b) = (a.view().reshape(square), b.view().reshape(square));
            let time = kernels.timed(|| {
                let out = out.view_mut().reshape(square);
                let (bias, init) = (None, Init::Overwrite);
                kernels.run(Matmul {
                    out,
                    a,
                    b,
                    bias,
                    init,
                })
            });
            Ok(time?)
        })?;
        Ok(DeviceRates {
            gemm_tflops: 2.0 * (size as f64).powi(3) / gemm / 1e12,
            copy_gbps: 2.0 * bytes.len() as f64 / copy / 1e9,
            upload_gbps: bytes.len() as f64 / upload / 1e9,
            download_gbps: bytes.len() as f64 / download / 1e9,
        })
    }

    /// The rate of products for people, with its share of the peak if that is known.
    pub(super) fn products(&self, peak_tflops: Option<f64>) -> String {
        let rate = format!("{:.3} TFLOP/s", self.gemm_tflops);
        match peak_tflops {
            Some(peak) => format!(
                "{rate}, {:.0} % of the peak",
                100.0 * self.gemm_tflops / peak
            ),
            None => rate,
        }
    }

    /// The rate of copies, for people.
    pub(super) fn copies(&self) -> String {
        format!("{:.1} GB/s read and written", self.copy_gbps)
    }

    /// The rates of uploads and downloads, for people.
    pub(super) fn transfers(&self) -> String {
        format!(
            "{:.1} GB/s up, {:.1} GB/s down",
            self.upload_gbps, self.download_gbps
        )
    }
}

/// Pseudo-random numbers from -1 to 1, the same every time. `dtype` is f32 or bf16.
pub(super) fn random_bytes(elements: usize, dtype: DType) -> Vec<u8> {
    let (key, width) = (key(0, 0, 0), dtype.size_in_bytes());
    let mut bytes = Vec::with_capacity(elements * width);
    for index in 0..elements as u64 {
        let number = random_u32(key, index) as i32 as f32 / (1u64 << 31) as f32;
        // The upper half of an f32 is a bf16.
        bytes.extend_from_slice(&number.to_le_bytes()[4 - width..]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_numbers_of_both_signs_and_no_two_alike() {
        let wide = random_bytes(1000, DType::F32);
        let narrow = random_bytes(1000, DType::BF16);
        let numbers: Vec<f32> = wide
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        assert_eq!((numbers.len(), narrow.len()), (1000, 2000));
        assert!(numbers.iter().all(|number| number.abs() <= 1.0));
        let negative = numbers.iter().filter(|number| **number < 0.0).count();
        assert!((400..600).contains(&negative), "{negative}");
        let distinct: std::collections::HashSet<u32> =
            numbers.iter().map(|number| number.to_bits()).collect();
        assert!(distinct.len() > 990);
        for (wide, narrow) in wide.chunks_exact(4).zip(narrow.chunks_exact(2)) {
            assert_eq!(wide[2..], *narrow);
        }
    }
}
