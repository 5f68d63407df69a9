//! The device of a run: opened once, before anything is written.

use crate::failure::Failure;
use kernels::cpu::Cpu;
use kernels::timed::{Timed, Timings};
use kernels::{Kernels, Target};
use memory::{DType, DeviceBytes, Layer, Memory, Phase, format_bytes};
use planner::{CUDA_OVERHEAD_BYTES, memory_size};
use session::Session;
use settings::{Device, Settings};

#[cfg(feature = "cuda")]
use kernels::KernelError;
#[cfg(feature = "cuda")]
use kernels::cuda::{Cuda, CudaDevice, CudaDriver};
#[cfg(feature = "cuda")]
use std::rc::Rc;

/// A device that is there.
pub(crate) enum OpenDevice {
    /// The processor.
    Cpu,
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(Rc<CudaDevice>),
}

impl OpenDevice {
    /// Opens a device, with all its kernels: what they take is taken before anybody asks what is free.
    ///
    /// # Errors
    /// [`Failure::NoDevice`] if it is not there or cannot be used.
    pub(crate) fn open(device: Device) -> Result<OpenDevice, Failure> {
        match device {
            Device::Cpu => Ok(OpenDevice::Cpu),
            #[cfg(feature = "cuda")]
            Device::Cuda { index } => {
                let refused = |error: KernelError| Failure::NoDevice {
                    device,
                    reason: error.message,
                };
                let opened = CudaDevice::open(index).map_err(refused)?;
                opened.load_kernels().map_err(refused)?;
                let facts = opened.facts();
                tracing::info!("{device} is {}", facts.name);
                Ok(OpenDevice::Cuda(opened))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { .. } => Err(Failure::NoDevice {
                device,
                reason: "this binary was built without CUDA".into(),
            }),
        }
    }

    /// Whose leases and scratch sizes apply.
    pub(crate) fn target(&self) -> Target {
        match self {
            OpenDevice::Cpu => Target::Cpu,
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(_) => Target::Cuda,
        }
    }

    /// Its memory, with nothing leased.
    pub(crate) fn memory(&self) -> Memory {
        match self {
            OpenDevice::Cpu => Memory::host(),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device) => Memory::device(device.clone()),
        }
    }

    /// A session on it.
    ///
    /// # Errors
    /// As [`Session::on_cpu`].
    pub(crate) fn session(&self, settings: Settings, memory: &Memory) -> Result<Session, Failure> {
        match self {
            OpenDevice::Cpu => Ok(Session::on_cpu(settings, memory)?),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device) => {
                if let Some(warning) = slow(&settings) {
                    tracing::warn!("{warning}");
                }
                Ok(Session::on_cuda(settings, memory, device)?)
            }
        }
    }

    /// A session whose operations are timed.
    ///
    /// # Errors
    /// As [`Session::on_cpu`].
    pub(crate) fn timed_session(
        &self,
        settings: Settings,
        memory: &Memory,
        timings: &Timings,
    ) -> Result<Session, Failure> {
        let place = memory.enter(Phase::Load, Layer::Whole);
        let dtype = settings.narrowest_dtype();
        let kernels: Box<dyn Kernels> = match self {
            OpenDevice::Cpu => Box::new(Timed::new(Cpu::new(memory, dtype)?, timings)),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device) => {
                let cuda = Cuda::new(CudaDriver::new(device)?, memory, dtype)?;
                Box::new(Timed::new(cuda, timings))
            }
        };
        drop(place);
        Ok(Session::on_kernels(settings, memory, kernels)?)
    }

    /// Its operations, for these settings.
    ///
    /// # Errors
    /// As [`Session::on_cpu`].
    pub(crate) fn kernels(
        &self,
        settings: &Settings,
        memory: &Memory,
    ) -> Result<Box<dyn Kernels>, Failure> {
        let dtype = settings.narrowest_dtype();
        match self {
            OpenDevice::Cpu => Ok(Box::new(Cpu::new(memory, dtype)?)),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device) => {
                let driver = CudaDriver::new(device)?;
                Ok(Box::new(Cuda::new(driver, memory, dtype)?))
            }
        }
    }

    /// What NVIDIA calls it; none for the processor.
    fn gpu_name(&self) -> Option<&str> {
        match self {
            OpenDevice::Cpu => None,
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device) => Some(&device.facts().name),
        }
    }

    /// Memory of a GPU, whoever uses it; none for the processor.
    fn gpu_bytes(&self) -> Result<Option<DeviceBytes>, Failure> {
        match self {
            OpenDevice::Cpu => Ok(None),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device) => Ok(Some(device.memory_bytes()?)),
        }
    }

    /// Its memory in all, for limits in percent.
    ///
    /// # Errors
    /// [`Failure::Usage`] where the system does not tell, [`Failure::Device`] where the driver fails.
    pub(crate) fn total_bytes(&self) -> Result<u64, Failure> {
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

    /// Host memory that is used outside the ledger, at most.
    pub(crate) fn untracked_host_bytes_max(&self) -> u64 {
        match self {
            OpenDevice::Cpu => kernels::cpu::untracked_bytes_max(rayon::current_num_threads()),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(_) => CudaDevice::untracked_host_bytes(),
        }
    }

    /// Most that its matrix units do, in units of 10^12 operations a second, where that is known.
    pub(crate) fn peak_tflops(&self, dtype: &str) -> Option<f64> {
        let name = self.gpu_name().filter(|_| dtype == "bf16");
        name.and_then(bf16_tflops)
    }

    /// Shows phases and layers to profilers.
    pub(crate) fn show_ranges(&self) {
        match self {
            OpenDevice::Cpu => {
                tracing::warn!("log.nvtx has no effect: this run is on the processor")
            }
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(device) => device.show_ranges(),
        }
    }

    /// Says beforehand if a run is close to what the device has left.
    ///
    /// # Errors
    /// [`Failure::Device`] where the driver fails.
    pub(crate) fn warn_if_tight(&self, reserved_bytes: u64) -> Result<(), Failure> {
        let bytes = self.gpu_bytes()?;
        if let Some(warning) = bytes.and_then(|bytes| tight(reserved_bytes, bytes)) {
            tracing::warn!("{warning}");
        }
        Ok(())
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

/// What to say where the settings are right and slow on a GPU.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a GPU is slow"))]
fn slow(settings: &Settings) -> Option<&'static str> {
    let widths = (settings.dtype, settings.states.gradients);
    (widths == (DType::F32, DType::BF16)).then_some(
        "cuBLASLt has no products of f32 with a bf16 result: with bf16 gradients in f32 every weight gradient is computed \
         by a plain kernel, many times slower; take --grad-dtype f32, or --dtype bf16",
    )
}

/// What is still to come beside the plan: of what plans count with, what context and kernels have not taken. Nothing is
/// known of it where other processes hold memory too.
fn to_come(bytes: DeviceBytes) -> u64 {
    match bytes.is_shared() {
        true => 0,
        false => CUDA_OVERHEAD_BYTES.saturating_sub(bytes.beside()),
    }
}

/// What to say where the free memory is short, or nearly so.
fn tight(reserved_bytes: u64, bytes: DeviceBytes) -> Option<String> {
    if reserved_bytes + to_come(bytes) <= bytes.free {
        return None;
    }
    let verdict = match reserved_bytes > bytes.free {
        true => "this run will not fit",
        false => "this run may not fit",
    };
    let others = match bytes.others_are_in_the_way(reserved_bytes) {
        true => format!(
            "; other processes hold most of {}",
            format_bytes(bytes.beside())
        ),
        false => String::new(),
    };
    Some(format!(
        "the plan reserves {}, and {} of the device's {} are free: {verdict}{others}",
        format_bytes(reserved_bytes),
        format_bytes(bytes.free),
        format_bytes(bytes.total),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    #[test]
    fn a_full_card_is_announced() {
        let bytes = DeviceBytes {
            total: 80 * GIB,
            free: 80 * GIB - 540 * MIB,
            held: 0,
        };
        let most = bytes.free - 100 * MIB;
        assert_eq!(tight(most, bytes), None);
        assert!(tight(most + 1, bytes).unwrap().ends_with("may not fit"));
        assert!(tight(bytes.free, bytes).unwrap().ends_with("may not fit"));
        let message = tight(80 * GIB, bytes).unwrap();
        assert!(message.contains("reserves 80.0 GiB") && message.ends_with("will not fit"));
    }

    #[test]
    fn what_kernels_have_taken_is_not_counted_twice() {
        let bytes = DeviceBytes {
            total: 80 * GIB,
            free: 79 * GIB,
            held: 0,
        };
        assert_eq!(tight(79 * GIB, bytes), None);
        assert!(
            tight(79 * GIB + 1, bytes)
                .unwrap()
                .ends_with("will not fit")
        );
    }

    #[test]
    fn a_shared_card_is_announced_as_shared() {
        let shared = DeviceBytes {
            total: 80 * GIB,
            free: 30 * GIB,
            held: 0,
        };
        assert_eq!(tight(29 * GIB, shared), None);
        let message = tight(60 * GIB, shared).unwrap();
        assert!(
            message.ends_with("will not fit; other processes hold most of 50.0 GiB"),
            "{message}"
        );
        let too_large = tight(79 * GIB, shared).unwrap();
        assert!(too_large.ends_with("will not fit"), "{too_large}");
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
