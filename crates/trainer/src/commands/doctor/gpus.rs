//! The GPUs of this machine.

use super::overhead::Overhead;
use super::rates::DeviceRates;
use super::rows;
use memory::{DeviceBytes, format_bytes};
use report::Table;
use serde::Serialize;
use std::path::PathBuf;

#[cfg(feature = "cuda")]
use crate::kernel_trial::Verdict;

/// A GPU that can be used.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FoundGpu {
    /// Its number, as in `cuda:N`.
    index: usize,
    /// NVIDIA's name for it.
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
    /// The file of the cuBLASLt that was loaded; null if the system does not report it.
    library_path: Option<PathBuf>,
    /// Why it has no products in FP8; null if it has.
    fp8_missing: Option<String>,
    /// What came of a trial of kernels of attention for 9.0, with small heads; null on a GPU that runs none of them.
    #[cfg(feature = "cuda")]
    attention_kernels: Option<Verdict>,
    /// What is kept against them, of earlier trials with other heads: runs with these take others.
    #[cfg(feature = "cuda")]
    attention_kernels_against: Vec<String>,
    /// The same of kernels of experts.
    #[cfg(feature = "cuda")]
    experts_kernels: Option<Verdict>,
    /// What is kept against these, of other widths.
    #[cfg(feature = "cuda")]
    experts_kernels_against: Vec<String>,
    /// Its memory after this process had made a context and nothing else.
    memory: DeviceBytes,
    /// What this process takes besides its leases.
    #[serde(flatten)]
    overhead: Overhead,
    /// The unit in which the driver maps memory.
    allocation_granularity_bytes: u64,
    /// What the pool reserves for its first and smallest block.
    pool_page_bytes: u64,
    /// Copies from page-locked host memory, in units of 10^9 bytes a second: `hardware.h2d_gbps`.
    h2d_gbps: f64,
    /// Copies to page-locked host memory: `hardware.d2h_gbps`.
    d2h_gbps: f64,
    /// The sum of both directions at a time: `hardware.both_ways_gbps`.
    both_ways_gbps: f64,
    /// Dense bf16 peak by NVIDIA's data sheets, in units of 10^12 operations a second; null if it is not known.
    peak_tflops: Option<f64>,
    /// Rates in bf16, the GPU's training type.
    bf16: DeviceRates,
}

impl FoundGpu {
    pub(super) fn table(&self) -> Table {
        let memory = format!(
            "{}, of which {} free",
            format_bytes(self.memory.total),
            format_bytes(self.memory.free),
        );
        let units = format!(
            "mapped by {}, pooled by {}",
            format_bytes(self.allocation_granularity_bytes),
            format_bytes(self.pool_page_bytes),
        );
        let pinned = format!(
            "{:.1} GB/s up, {:.1} GB/s down, {:.1} GB/s both ways at once",
            self.h2d_gbps, self.d2h_gbps, self.both_ways_gbps
        );
        let peak = self.peak_tflops.map(|peak| format!("{peak} TFLOP/s"));
        let library = match &self.library_path {
            Some(path) => format!("{} in {}", self.library_version, path.display()),
            None => self.library_version.to_string(),
        };
        let fp8 = match &self.fp8_missing {
            None => "by --fp8 tensor".to_string(),
            Some(reason) => format!("none: {reason}"),
        };
        #[cfg(feature = "cuda")]
        let [attention, experts] = [
            kernels(&self.attention_kernels, &self.attention_kernels_against),
            kernels(&self.experts_kernels, &self.experts_kernels_against),
        ];
        #[cfg(not(feature = "cuda"))]
        let [attention, experts] = [String::new(), String::new()];
        let table = vec![
            ("name", Some(self.name.clone())),
            ("compute capability", Some(self.capability.clone())),
            ("multiprocessors", Some(self.multiprocessors.to_string())),
            ("driver's CUDA", Some(self.driver_version.clone())),
            ("cuBLASLt", Some(library)),
            ("products in FP8", Some(fp8)),
            ("kernels of attention", Some(attention)),
            ("kernels of experts", Some(experts)),
            ("memory", Some(memory)),
            ("beside leases", Some(self.overhead.to_string())),
            ("units of memory", Some(units)),
            ("peak, bf16", peak),
            (
                "matrix products, bf16",
                Some(self.bf16.products(self.peak_tflops)),
            ),
            ("copies", Some(self.bf16.copies())),
            ("copies, page-locked", Some(pinned)),
            ("uploads, downloads", Some(self.bf16.transfers())),
        ];
        rows(&format!("cuda:{}", self.index), table)
    }
}

/// Which kernels of a family a GPU takes, and what is kept against others.
#[cfg(feature = "cuda")]
fn kernels(verdict: &Option<Verdict>, against: &[String]) -> String {
    let taken = match verdict.as_ref().map(Verdict::against) {
        None => "sm80".to_string(),
        Some(None) => "sm90, which passed a trial".into(),
        Some(Some(against)) => format!("sm80: those for 9.0 (sm90) {against}"),
    };
    [&[taken], against].concat().join("; ")
}

/// All usable GPUs, and what is missing for others.
#[cfg(feature = "cuda")]
pub(super) fn gpus() -> (Vec<FoundGpu>, Vec<String>) {
    let (mut gpus, mut missing) = (Vec::new(), Vec::new());
    let count = kernels::cuda::device_count();
    let library = kernels::cuda::look_for_library();
    match (&count, &library) {
        (Ok(count), Ok(())) => {
            for index in 0..*count {
                match gpu(index) {
                    Ok(gpu) => gpus.push(gpu),
                    Err(failure) => missing.push(format!("cuda:{index}: {failure}")),
                }
            }
        }
        _ => missing.extend(
            [count.err(), library.err()]
                .into_iter()
                .flatten()
                .map(|error| error.message),
        ),
    }
    (gpus, missing)
}

/// No GPUs: this binary was built without CUDA.
#[cfg(not(feature = "cuda"))]
pub(super) fn gpus() -> (Vec<FoundGpu>, Vec<String>) {
    let found = match std::path::Path::new("/proc/driver/nvidia/version").exists() {
        true => "there is an NVIDIA driver, but this binary was built without CUDA",
        false => "this binary was built without CUDA, and there is no NVIDIA driver",
    };
    let build = "`cargo build --release --features cuda`, after `eval \"$(scripts/cuda-toolkit)\"` where there is no \
                 toolkit, builds one that trains on GPUs of compute capability 8.0 (Ampere) and newer";
    (Vec::new(), vec![format!("{found}: {build}")])
}

/// The preset whose step is rehearsed: the smallest of the models that people buy GPUs for.
#[cfg(feature = "cuda")]
const REHEARSED: &str = "qwen2.5-0.5b";

#[cfg(feature = "cuda")]
fn gpu(index: usize) -> crate::failure::Result<FoundGpu> {
    use crate::device::{listed, rehearsed};
    use crate::kernel_kinds::KernelKinds;
    use crate::kernel_trial::{Widths, all_against, tried};
    use kernels::cuda::{CudaDevice, KernelKind, device_facts};
    use memory::{DType, Memory};
    use settings::load::{Source, load};
    use settings::{Device, KernelFamily, PerFamily, Settings, latest_kind};

    let facts = device_facts(index)?;
    let against = PerFamily::new(|family| all_against(&facts, family));
    let runs_sm90 = latest_kind(facts.capability) == KernelKind::Sm90;
    let verdicts = PerFamily::new(|family: KernelFamily| {
        runs_sm90.then(|| tried(&facts, Widths::standard(family)))
    });
    let device = CudaDevice::open(index)?;
    let with_context = device.memory_bytes()?;
    let mut config = load(&Source::open(REHEARSED)?, &[], false)?.config;
    config.train.device = Some(Device::Cuda { index });
    let library = device.library();
    let memory = Memory::device(device.clone());
    let step = listed(&device, Settings::new(&config)?)?;
    let kernels = rehearsed(&device, &None, &step, &memory, &KernelKinds::default())?;
    let bf16 = DeviceRates::measure(
        &kernels,
        &memory,
        DType::BF16,
        super::RateWork::of(kernels::Target::Cuda),
    )?;
    let overhead = Overhead::new(with_context, device.memory_bytes()?);
    let copies = device.copy_rates()?;
    let (major, minor) = facts.capability;
    let version = facts.driver_version;
    Ok(FoundGpu {
        index,
        name: facts.name.clone(),
        capability: format!("{major}.{minor}"),
        multiprocessors: facts.multiprocessors,
        shared_bytes_max: facts.shared_bytes_max,
        driver_version: format!("{}.{}", version / 1000, version % 1000 / 10),
        library_version: library.version,
        library_path: library.path,
        fp8_missing: facts.no_fp8(),
        attention_kernels: verdicts.attention,
        attention_kernels_against: against.attention,
        experts_kernels: verdicts.experts,
        experts_kernels_against: against.experts,
        memory: with_context,
        overhead,
        allocation_granularity_bytes: device.allocation_granularity_bytes()?,
        pool_page_bytes: with_context.page,
        h2d_gbps: copies.h2d_gbps,
        d2h_gbps: copies.d2h_gbps,
        both_ways_gbps: copies.both_ways_gbps,
        peak_tflops: crate::device::bf16_tflops(&facts.name),
        bf16,
    })
}
