//! The device of a run, which is opened once, before anything is written.

use crate::failure::{Failure, Result};
use crate::kernel_kinds::KernelKinds;
use collectives::{Alone, Group};
use kernels::cpu::Cpu;
use kernels::timed::{Timed, Timings};
use kernels::timeline::Timeline;
use kernels::{Backend, Kernels, Target};
use memory::{DType, DeviceBytes, Home, Layer, Memory, OutOfMemory, Phase, format_bytes};
use planner::{CUDA_OVERHEAD_BYTES, first_refused_by_device, memory_size};
use settings::{Config, ConfigError, Device, Settings};
use std::sync::Arc;
use std::time::Duration;
use units::Zero;

#[cfg(feature = "cuda")]
use {
    crate::algorithms::use_algorithms,
    crate::job::long_wait,
    kernels::cuda::{Cuda, CudaDevice, CudaDriver, KernelKind, Rehearsal},
    kernels::{Fault, KernelError},
    memory::Refused,
    planner::StepOnPaper,
    session::{LibraryCalls, library_calls},
    settings::check_shared_memory,
    std::rc::Rc,
};

/// An open device.
pub(crate) enum OpenDevice {
    /// The processor.
    Cpu(Ranks),
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(Rc<CudaDevice>, Ranks, KernelKinds),
}

/// The engine that moves bytes between ranks; none for a process without ranks.
type Ranks = Option<Arc<dyn Group>>;

/// A step for a device: its settings, and its calls to the device's libraries, which are listed once.
pub(crate) struct DeviceStep {
    pub(crate) settings: Settings,
    /// The algorithms of its products, as in records; none on the CPU.
    pub(crate) algorithms: Option<String>,
    #[cfg(feature = "cuda")]
    calls: LibraryCalls,
}

impl OpenDevice {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Failure::NoDevice`] if it does not exist or cannot be used.
    pub(crate) fn open(device: Device) -> Result<OpenDevice> {
        OpenDevice::in_group(device, None)
    }

    /// As [`OpenDevice::open`], for a rank of a group.
    ///
    /// # Errors
    /// As [`OpenDevice::open`].
    pub(crate) fn in_group(device: Device, ranks: Ranks) -> Result<OpenDevice> {
        match device {
            Device::Cpu => Ok(OpenDevice::Cpu(ranks)),
            #[cfg(feature = "cuda")]
            Device::Cuda { index } => {
                let refused = |error: KernelError| Failure::NoDevice {
                    device,
                    reason: error.message,
                };
                let opened = CudaDevice::open(index).map_err(refused)?;
                let facts = opened.facts();
                tracing::info!("{device} is {}", facts.name);
                Ok(OpenDevice::Cuda(opened, ranks, KernelKinds::default()))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { .. } => Err(Failure::NoDevice {
                device,
                reason: "this binary was built without CUDA".into(),
            }),
        }
    }

    /// The same device for a rank of a group.
    pub(crate) fn joining(self, ranks: Ranks) -> OpenDevice {
        match self {
            OpenDevice::Cpu(_) => OpenDevice::Cpu(ranks),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, _, kinds) => OpenDevice::Cuda(device, ranks, kinds),
        }
    }

    /// The same device with kernels of these kinds.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(unused_variables, reason = "only a GPU has kernels of several kinds")
    )]
    pub(crate) fn taking(self, kinds: KernelKinds) -> OpenDevice {
        match self {
            OpenDevice::Cpu(ranks) => OpenDevice::Cpu(ranks),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ranks, _) => OpenDevice::Cuda(device, ranks, kinds),
        }
    }

    /// The kinds of its kernels.
    pub(crate) fn kernel_kinds(&self) -> KernelKinds {
        match self {
            OpenDevice::Cpu(_) => KernelKinds::default(),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(.., kinds) => kinds.clone(),
        }
    }

    /// The target whose leases and scratch sizes apply.
    pub(crate) fn target(&self) -> Target {
        match self {
            OpenDevice::Cpu(_) => Target::Cpu,
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(..) => Target::Cuda,
        }
    }

    /// Its memory, with nothing leased.
    pub(crate) fn memory(&self) -> Memory {
        match self {
            OpenDevice::Cpu(_) => Memory::host(),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ..) => Memory::device(device.clone()),
        }
    }

    /// A step with these settings. On a GPU, its calls to libraries are listed, and the algorithms of its products are
    /// decided.
    ///
    /// # Errors
    /// [`Failure::NoFp8`] if the device has no products that the settings ask for, [`Failure::Algorithms`] if a file that they name
    /// cannot be used, and if no session can be made from the settings.
    pub(crate) fn step(&self, settings: Settings) -> Result<DeviceStep> {
        match self {
            OpenDevice::Cpu(_) => {
                if settings.hardware.algorithms.is_some() {
                    tracing::warn!(
                        "hardware.algorithms has no effect: this run is on the processor"
                    );
                }
                Ok(DeviceStep {
                    settings,
                    algorithms: None,
                    #[cfg(feature = "cuda")]
                    calls: LibraryCalls::default(),
                })
            }
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, _, kinds) => {
                let settings = Settings {
                    kernels: kinds.named(settings.kernels),
                    ..settings
                };
                listed(device, settings)
            }
        }
    }

    /// The device's operations for a step. A GPU rehearses the step first, so that kernels and libraries take their
    /// memory before anything else is leased.
    ///
    /// # Errors
    /// [`Failure::OutOfMemory`] if memory is short, [`Failure::Device`] if the device or its libraries fail.
    pub(crate) fn kernels(&self, step: &DeviceStep, memory: &Memory) -> Result<Box<Kernels>> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        match self {
            OpenDevice::Cpu(ranks) => Ok(Box::new(cpu(ranks, &step.settings, memory)?)),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ranks, kinds) => {
                Ok(Box::new(rehearsed(device, ranks, step, memory, kinds)?))
            }
        }
    }

    /// As [`OpenDevice::kernels`], with every operation timed, and recorded on a timeline if one is given.
    ///
    /// # Errors
    /// As [`OpenDevice::kernels`].
    pub(crate) fn timed_kernels(
        &self,
        step: &DeviceStep,
        memory: &Memory,
        timings: &Timings,
        timeline: Option<&Timeline>,
    ) -> Result<Box<Kernels>> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        match self {
            OpenDevice::Cpu(ranks) => {
                let cpu = cpu(ranks, &step.settings, memory)?;
                Ok(timed(cpu, memory, timings, timeline))
            }
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ranks, kinds) => {
                let cuda = rehearsed(device, ranks, step, memory, kinds)?;
                Ok(timed(cuda, memory, timings, timeline))
            }
        }
    }

    /// The GPU; none on the CPU.
    #[cfg(all(feature = "cuda", feature = "candle"))]
    pub(crate) fn gpu(&self) -> Option<&Rc<CudaDevice>> {
        match self {
            OpenDevice::Cpu(_) => None,
            OpenDevice::Cuda(device, ..) => Some(device),
        }
    }

    /// NVIDIA's name for the GPU; none on the CPU.
    fn gpu_name(&self) -> Option<&str> {
        match self {
            OpenDevice::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ..) => Some(&device.facts().name),
        }
    }

    /// The GPU's memory, including what others use; none on the CPU.
    pub(crate) fn gpu_bytes(&self) -> Result<Option<DeviceBytes>> {
        match self {
            OpenDevice::Cpu(_) => Ok(None),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ..) => Ok(Some(device.memory_bytes()?)),
        }
    }

    /// Returns memory that no lease has to the driver, for other processes.
    ///
    /// # Errors
    /// [`Failure::Device`] if the driver fails.
    #[cfg(feature = "candle")]
    pub(crate) fn give_back_free_memory(&self) -> Result {
        match self {
            OpenDevice::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ..) => Ok(device.trim()?),
        }
    }

    /// The first lease of a run that does not fit the GPU's memory; none if it fits, and on the CPU.
    ///
    /// # Errors
    /// [`Failure::Device`] if the driver fails.
    pub(crate) fn first_refused(
        &self,
        settings: &Settings,
        (peak_bytes, reserved_bytes): (u64, u64),
    ) -> Result<Option<OutOfMemory>> {
        let Some(bytes) = self.gpu_bytes()? else {
            return Ok(None);
        };
        let planned = (peak_bytes, reserved_bytes);
        Ok(first_refused_by_device(
            settings,
            self.target(),
            planned,
            bytes,
        )?)
    }

    /// All of its memory, for limits in percent.
    ///
    /// # Errors
    /// [`Failure::Usage`] if the system does not report it, [`Failure::Device`] if the driver fails.
    pub(crate) fn total_bytes(&self) -> Result<u64> {
        match self.gpu_bytes()? {
            None => memory_size::host_bytes().ok_or_else(|| {
                Failure::Usage(
                    "this system does not tell its memory size; give --memory-limit in bytes"
                        .into(),
                )
            }),
            Some(bytes) => Ok(bytes.total),
        }
    }

    /// What is free of its memory: for blocks of this process, in whole pages.
    ///
    /// # Errors
    /// As [`OpenDevice::total_bytes`].
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        match self.gpu_bytes()? {
            None => {
                let total = self.total_bytes()?;
                let free = memory_size::meminfo_bytes("MemAvailable:");
                Ok(free.unwrap_or(total).min(total))
            }
            Some(bytes) => Ok(bytes.room()),
        }
    }

    /// The most host memory that is used outside the ledger.
    pub(crate) fn untracked_host_bytes_max(&self) -> u64 {
        match self {
            OpenDevice::Cpu(_) => kernels::cpu::untracked_bytes_max(rayon::current_num_threads()),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(..) => CudaDevice::untracked_host_bytes(),
        }
    }

    /// Peak rate of its matrix units, in units of 10^12 operations a second; none if it is not known.
    pub(crate) fn peak_tflops(&self, dtype: &str) -> Option<f64> {
        let name = self.gpu_name().filter(|_| dtype == "bf16");
        name.and_then(bf16_tflops)
    }

    /// Refuses attention that takes more shared memory than a block of this GPU may have.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`] with what to do.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(unused_variables, reason = "only a GPU is asked")
    )]
    pub(crate) fn check_attention(&self, config: &Config) -> Result<(), ConfigError> {
        match self {
            OpenDevice::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ..) => {
                let facts = device.facts();
                check_shared_memory(config, &facts.name, facts.shared_bytes_max as usize)
            }
        }
    }

    /// Lets the host wait at least so long for a GPU before its work counts as never ending.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(unused_variables, reason = "only a GPU is asked")
    )]
    pub(crate) fn wait_at_least(&self, time: Duration) {
        match self {
            OpenDevice::Cpu(_) => {}
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ..) => wait_for(device, time),
        }
    }

    /// Shows profilers the phases and layers.
    pub(crate) fn show_ranges(&self) {
        match self {
            OpenDevice::Cpu(_) => {
                tracing::warn!("log.nvtx has no effect: this run is on the processor")
            }
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device, ..) => device.show_ranges(),
        }
    }

    /// Warns if a run needs more memory than the device has left once kernels and libraries have taken theirs.
    ///
    /// # Errors
    /// [`Failure::Device`] if the driver fails.
    pub(crate) fn warn_if_full(&self, reserved_bytes: u64) -> Result {
        let bytes = self.gpu_bytes()?;
        if let Some(warning) = bytes.and_then(|bytes| too_full(reserved_bytes, bytes)) {
            tracing::warn!("{warning}");
        }
        Ok(())
    }
}

/// The group of the settings: if they have ranks but there is no group, a group of one.
fn with_ranks(ranks: &Ranks, settings: &Settings) -> Ranks {
    let alone = || {
        settings
            .ranks
            .as_ref()
            .map(|_| Arc::new(Alone) as Arc<dyn Group>)
    };
    ranks.clone().or_else(alone)
}

fn cpu(ranks: &Ranks, settings: &Settings, memory: &Memory) -> Result<Kernels<Cpu>, OutOfMemory> {
    let narrowest = settings.narrowest_dtype();
    match with_ranks(ranks, settings) {
        None => Cpu::new(memory, narrowest),
        Some(group) => Cpu::in_group(memory, narrowest, group),
    }
}

fn timed<B: Backend + 'static>(
    kernels: Kernels<B>,
    memory: &Memory,
    timings: &Timings,
    timeline: Option<&Timeline>,
) -> Box<Kernels> {
    let timed = Timed::new(kernels, timings);
    match timeline {
        None => Box::new(timed),
        Some(timeline) => Box::new(timed.beside(timeline, memory)),
    }
}

/// Dense bf16 peak of a GPU by NVIDIA's data sheets, in units of 10^12 operations a second.
pub(crate) fn bf16_tflops(name: &str) -> Option<f64> {
    match name {
        "NVIDIA H200" | "NVIDIA H100 80GB HBM3" => Some(989.0),
        name if name.starts_with("NVIDIA A100") => Some(312.0),
        _ => None,
    }
}

/// A warning about settings that are valid but slow on a GPU.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a GPU is slow"))]
fn slow(settings: &Settings) -> Option<&'static str> {
    let widths = (settings.dtype, settings.states.gradients);
    (widths == (DType::F32, DType::BF16)).then_some(
        "cuBLASLt has no products of f32 with a bf16 result: with bf16 gradients in f32 every weight gradient is computed \
         by a plain kernel, many times slower; take --grad-dtype f32, or --dtype bf16",
    )
}

/// The library calls of a step of the whole model that updates all matrices, if each rank has a stage of it, or updates only some
/// matrices whole. All ranks name their choice of algorithms by these calls. None if every rank makes the same products.
#[cfg(feature = "cuda")]
fn all_products(step: &Settings) -> Result<Option<LibraryCalls>> {
    let Some(ranks) = &step.ranks else {
        return Ok(None);
    };
    let updates_some = ranks.zero != Zero::Replicated && step.optimizer.product_dtype().is_some();
    if !updates_some && step.pipeline.is_none() {
        return Ok(None);
    }
    Ok(Some(library_calls(&whole_step(step))?))
}

/// A step of the whole model in which this rank updates everything. Where gradients live makes no difference to its products.
#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "a GPU's products are chosen")
)]
fn whole_step(step: &Settings) -> Settings {
    let mut whole = step.in_one_stage();
    whole.homes.gradients = Home::Device;
    if let Some(ranks) = &mut whole.ranks {
        (ranks.zero, ranks.shard_group) = (Zero::Replicated, None);
    }
    whole
}

/// A step whose library calls have been listed. Each listing is logged, to show that it happens once per step.
#[cfg(feature = "cuda")]
pub(crate) fn listed(device: &CudaDevice, settings: Settings) -> Result<DeviceStep> {
    let missing = settings.fp8.as_ref().and(device.facts().no_fp8());
    if let Some(reason) = missing {
        return Err(Failure::NoFp8(reason));
    }
    let calls = library_calls(&settings)?;
    let products = calls.products.len();
    tracing::debug!("listed a step: {products} products");
    let named = all_products(&settings)?;
    let named = named.as_ref().unwrap_or(&calls);
    let algorithms = Some(use_algorithms(device, &settings, named.products_of_step())?);
    Ok(DeviceStep {
        settings,
        algorithms,
        calls,
    })
}

/// Operations on a GPU that has rehearsed a step.
#[cfg(feature = "cuda")]
pub(crate) fn rehearsed(
    device: &Rc<CudaDevice>,
    ranks: &Ranks,
    step: &DeviceStep,
    memory: &Memory,
    kinds: &KernelKinds,
) -> Result<Kernels<Cuda<CudaDriver>>> {
    let DeviceStep {
        settings, calls, ..
    } = step;
    if let Some(warning) = slow(settings) {
        tracing::warn!("{warning}");
    }
    let seconds = StepOnPaper::new(settings, Target::Cuda)?.seconds;
    wait_for(device, long_wait(seconds));
    let driver = match with_ranks(ranks, settings) {
        None => CudaDriver::new(device)?,
        Some(group) => CudaDriver::in_group(device, group)?,
    };
    let cuda = Cuda::new(driver, memory, settings.narrowest_dtype())?
        .with_attention_by(kinds.taken.attention.unwrap_or(KernelKind::Sm80))
        .with_experts_by(kinds.taken.experts.unwrap_or(KernelKind::Sm80));
    let rehearsal = cuda.rehearse(&calls.products);
    tell_of_products(&rehearsal.map_err(|error| explained(error, device, memory))?);
    if settings.fp8.is_some() && !cuda.check_conversion_to_fp8()? {
        tracing::warn!(
            "this GPU converts to FP8 otherwise than expected: integer instructions make the codes instead, which takes longer"
        );
    }
    Ok(cuda)
}

/// Lets the host wait at least so long for a GPU before its work counts as never ending.
#[cfg(feature = "cuda")]
fn wait_for(device: &CudaDevice, time: Duration) {
    let patience = device.patience();
    patience.set(patience.get().max(time));
}

/// Logs products that are not computed in the usual way.
#[cfg(feature = "cuda")]
fn tell_of_products(rehearsal: &Rehearsal) {
    let Rehearsal {
        products,
        tuned,
        refused,
        rounded,
    } = rehearsal;
    tracing::debug!("rehearsed {products} products");
    if tuned + refused > 0 {
        tracing::info!("{tuned} of {products} products take an algorithm that was measured");
    }
    if *refused > 0 {
        tracing::warn!(
            "cuBLASLt does not take the algorithm that was measured for {refused} of {products} products, which take its first \
             choice: `trainer tune` measures them again"
        );
    }
    if *rounded > 0 {
        tracing::warn!(
            "cuBLASLt adds up the parts of long sums in less than f32 in {rounded} of {products} products"
        );
    }
}

/// A rehearsal's failure. If the device is full, it becomes an out-of-memory error.
#[cfg(feature = "cuda")]
pub(crate) fn explained(error: KernelError, device: &CudaDevice, memory: &Memory) -> Failure {
    let (Fault::DeviceFull, Ok(bytes)) = (error.fault, device.memory_bytes()) else {
        return error.into();
    };
    // The message of the driver or cuBLASLt does not mention memory.
    tracing::debug!("{error}");
    let refused = Refused {
        device_bytes: Some(bytes),
        error: None,
    };
    let name = "what kernels and cuBLASLt load";
    memory.shortage(name, to_come(bytes), refused).into()
}

/// The most that kernels and libraries may still load: what plans assume, less what is already taken. If other
/// processes hold memory too, it is not known how much is taken, so all of it may still come.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a GPU loads"))]
fn to_come(bytes: DeviceBytes) -> u64 {
    match bytes.is_shared() {
        true => CUDA_OVERHEAD_BYTES,
        false => CUDA_OVERHEAD_BYTES
            .saturating_sub(bytes.beside())
            .max(bytes.page),
    }
}

/// A warning if the memory that blocks can have is too small.
fn too_full(reserved_bytes: u64, bytes: DeviceBytes) -> Option<String> {
    if reserved_bytes <= bytes.room() {
        return None;
    }
    let others = match bytes.others_are_in_the_way(reserved_bytes) {
        true => format!(
            "; other processes hold most of {}",
            format_bytes(bytes.beside())
        ),
        false => String::new(),
    };
    Some(format!(
        "the plan reserves {}, and of the device's {} this run can have {}: it will not fit{others}",
        format_bytes(reserved_bytes),
        format_bytes(bytes.total),
        format_bytes(bytes.room()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Rank;
    use settings::Config;

    /// Products are named by those of a step that one rank makes alone, whatever ranks divide.
    #[test]
    fn whole_steps_can_be_listed_whatever_ranks_divide() {
        let muon = "optim.kind=muon";
        let ways: [&[&str]; 3] = [
            &[muon, "collectives.zero=3", "collectives.shard_group=2"],
            &[muon, "collectives.zero=2", "offload.gradients=pinned"],
            &[
                "parallel.pipeline=4",
                "model.tie_embeddings=false",
                "offload.gradients=pinned",
                "offload.parameters=pinned",
            ],
        ];
        for way in ways {
            let mut config = Config::default();
            config.join(Rank { number: 0, of: 4 }).unwrap();
            let set: Vec<String> = way.iter().map(ToString::to_string).collect();
            let settings = Settings::new(&config.with(&set).unwrap()).unwrap();
            let calls = session::library_calls(&whole_step(&settings)).unwrap();
            assert!(!calls.products.is_empty(), "{way:?}");
        }
    }

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn bytes(free: u64, held: u64) -> DeviceBytes {
        DeviceBytes {
            total: 80 * GIB,
            free,
            held,
            page: 32 * MIB,
        }
    }

    /// Exact to the byte, in the whole pages that blocks have.
    #[test]
    fn a_full_card_is_announced() {
        let bytes = bytes(79 * GIB - 1, 32 * MIB);
        let most = 79 * GIB;
        assert_eq!(too_full(most, bytes), None);
        let message = too_full(most + 1, bytes).unwrap();
        assert!(message.contains("reserves 79.0 GiB") && message.ends_with("will not fit"));
    }

    #[test]
    fn a_shared_card_is_announced_as_shared() {
        let shared = bytes(30 * GIB, 0);
        assert_eq!(too_full(30 * GIB, shared), None);
        let message = too_full(60 * GIB, shared).unwrap();
        assert!(
            message.ends_with("will not fit; other processes hold most of 50.0 GiB"),
            "{message}"
        );
        let too_large = too_full(79 * GIB, shared).unwrap();
        assert!(too_large.ends_with("will not fit"), "{too_large}");
    }

    #[test]
    fn what_was_loaded_is_not_counted_twice() {
        let alone = bytes(80 * GIB - 540 * MIB, 0);
        assert_eq!(to_come(alone), 100 * MIB);
        assert_eq!(to_come(bytes(79 * GIB, 0)), 32 * MIB);
        assert_eq!(to_come(bytes(30 * GIB, 0)), CUDA_OVERHEAD_BYTES);
    }

    #[test]
    fn peaks_are_known_for_the_full_cards_alone() {
        assert_eq!(bf16_tflops("NVIDIA H200"), Some(989.0));
        assert_eq!(bf16_tflops("NVIDIA H100 80GB HBM3"), Some(989.0));
        assert_eq!(bf16_tflops("NVIDIA H100 PCIe"), None);
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn without_cuda_there_is_no_gpu() {
        let failure = OpenDevice::open(Device::Cuda { index: 1 }).err().unwrap();
        assert_eq!(failure.exit_code(), 5);
        assert!(failure.to_string().contains("cuda:1"), "{failure}");
    }
}
