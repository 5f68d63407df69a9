//! The GPUs of this machine.

use super::rates::Rates;
use super::rows;
use memory::{DeviceBytes, format_bytes};
use report::Table;
use serde::Serialize;

/// A GPU that can be used.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Gpu {
    /// Its number, as in `cuda:N`.
    index: usize,
    /// As NVIDIA calls it.
    name: String,
    /// Compute capability.
    capability: String,
    /// Multiprocessors.
    multiprocessors: i32,
    /// Most shared memory of a block.
    shared_bytes_max: i32,
    /// CUDA version of the driver.
    driver_version: String,
    /// Version of cuBLASLt.
    library_version: usize,
    /// Its memory when this process had a context, its modules and libraries, and nothing else.
    memory: DeviceBytes,
    /// Dense bf16 peak by NVIDIA's data sheets, in units of 10^12 operations a second; null where it is not known.
    peak_tflops: Option<f64>,
    /// Rates in bf16, the GPU's training type.
    bf16: Rates,
}

impl Gpu {
    pub(super) fn table(&self) -> Table {
        let memory = format!(
            "{}, of which {} free; {} used by this process's context and by others",
            format_bytes(self.memory.total),
            format_bytes(self.memory.free),
            format_bytes(self.memory.beside()),
        );
        let peak = self.peak_tflops.map(|peak| format!("{peak} TFLOP/s"));
        let table = vec![
            ("name", Some(self.name.clone())),
            ("compute capability", Some(self.capability.clone())),
            ("multiprocessors", Some(self.multiprocessors.to_string())),
            ("driver's CUDA", Some(self.driver_version.clone())),
            ("cuBLASLt", Some(self.library_version.to_string())),
            ("memory", Some(memory)),
            ("peak, bf16", peak),
            ("matrix products, bf16", Some(self.bf16.products())),
            ("copies", Some(self.bf16.copies())),
            ("uploads, downloads", Some(self.bf16.transfers())),
        ];
        rows(&format!("cuda:{}", self.index), table)
    }
}

/// All GPUs that can be used, and why others cannot.
#[cfg(feature = "cuda")]
pub(super) fn gpus() -> (Vec<Gpu>, Vec<String>) {
    let count = match kernels::cuda::device_count() {
        Ok(count) => count,
        Err(error) => return (Vec::new(), vec![error.message]),
    };
    let (mut gpus, mut missing) = (Vec::new(), Vec::new());
    for index in 0..count {
        match gpu(index) {
            Ok(gpu) => gpus.push(gpu),
            Err(failure) => missing.push(format!("cuda:{index}: {failure}")),
        }
    }
    (gpus, missing)
}

/// No GPU can be used.
#[cfg(not(feature = "cuda"))]
pub(super) fn gpus() -> (Vec<Gpu>, Vec<String>) {
    let missing = "this binary was built without CUDA: `cargo build --release --features cuda`, after \
                   `eval \"$(scripts/cuda-toolkit)\"` where there is no toolkit";
    (Vec::new(), vec![missing.into()])
}

#[cfg(feature = "cuda")]
fn gpu(index: usize) -> Result<Gpu, crate::failure::Failure> {
    use kernels::cuda::{Cuda, CudaDevice, CudaDriver};
    use memory::{DType, Memory};

    /// 400 MiB of operands, and a second at the most.
    const WORK: super::rates::Work = super::rates::Work {
        gemm_size: 8192,
        copy_elements: 128 << 20,
        repetitions: 10,
    };
    let device = CudaDevice::open(index)?;
    let driver = CudaDriver::new(&device)?;
    let (memory_bytes, library_version) = (device.memory_bytes()?, driver.library_version());
    let memory = Memory::device(device.clone());
    let kernels = Cuda::new(driver, &memory, DType::BF16)?;
    let facts = device.facts();
    let (major, minor) = facts.capability;
    let version = facts.driver_version;
    Ok(Gpu {
        index,
        name: facts.name.clone(),
        capability: format!("{major}.{minor}"),
        multiprocessors: facts.multiprocessors,
        shared_bytes_max: facts.shared_bytes_max,
        driver_version: format!("{}.{}", version / 1000, version % 1000 / 10),
        library_version,
        memory: memory_bytes,
        peak_tflops: crate::device::bf16_tflops(&facts.name),
        bf16: Rates::measure(&kernels, &memory, DType::BF16, WORK)?,
    })
}
