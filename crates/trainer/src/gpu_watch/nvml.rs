//! Asks NVML about a GPU. Figures that a GPU or a driver does not report are left out.

use super::figures::{GpuReading, Limits};
use super::tenants::Tenants;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};
use planner::OtherProcess;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

/// The library's name in a driver. The name without a number comes only with packages for developers.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// The most bytes of a process's name.
const NAME_BYTES: usize = 256;

/// A GPU as NVML knows it.
pub(super) struct Gpu {
    nvml: &'static Nvml,
    device: Device<'static>,
}

/// The library, loaded on first use; none without a driver.
fn library() -> Option<&'static Nvml> {
    static LOADED: OnceLock<Option<Nvml>> = OnceLock::new();
    let load = || {
        let loaded = Nvml::builder().lib_path(LIBRARY.as_ref()).init();
        loaded
            .inspect_err(|error| tracing::debug!("{LIBRARY}: {error}"))
            .ok()
    };
    LOADED.get_or_init(load).as_ref()
}

/// The GPU's address on the machine's bus. CUDA numbers GPUs in the order of CUDA_VISIBLE_DEVICES, while NVML does not.
fn bus_id(device: settings::Device) -> Option<String> {
    match device {
        settings::Device::Cpu => None,
        settings::Device::Cuda { index } => kernels::cuda::pci_bus_id(index).ok(),
    }
}

impl Gpu {
    /// The GPU that CUDA has under this number.
    pub(super) fn find(device: settings::Device) -> Option<Gpu> {
        let bus_id = bus_id(device)?;
        let nvml = library()?;
        let found = nvml.device_by_pci_bus_id(bus_id.as_str());
        let found = found.inspect_err(|error| tracing::debug!("NVML, {bus_id}: {error}"));
        found.ok().map(|device| Gpu { nvml, device })
    }

    /// The limits, which do not change during a run.
    pub(super) fn limits(&self) -> Limits {
        let milliwatts = self.device.enforced_power_limit().ok();
        Limits {
            sm_clock_mhz: self.device.max_clock_info(Clock::SM).ok(),
            power_w: milliwatts.map(|milliwatts| milliwatts / 1000),
        }
    }

    /// Its state now.
    pub(super) fn read(&self) -> GpuReading {
        let milliwatts = self.device.power_usage().ok();
        let reasons = self.device.current_throttle_reasons();
        GpuReading {
            sm_clock_mhz: self.device.clock_info(Clock::SM).ok(),
            memory_clock_mhz: self.device.clock_info(Clock::Memory).ok(),
            power_w: milliwatts.map(|milliwatts| milliwatts / 1000),
            temperature_c: self.device.temperature(TemperatureSensor::Gpu).ok(),
            reasons: words(reasons.unwrap_or(ThrottleReasons::empty())),
        }
    }

    /// Who uses it now.
    pub(super) fn tenants(&self) -> Tenants {
        // Uses the second version of this function: the first counts the driver's own memory as used.
        let used = self.device.memory_info().ok().map(|memory| memory.used);
        let compute = self.device.running_compute_processes().ok();
        let processes = compute.map(|compute| {
            let graphics = self.device.running_graphics_processes();
            let lists = [compute, graphics.unwrap_or_default()];
            let processes = by_pid(lists.concat()).into_iter();
            let named = processes.map(|(pid, bytes)| OtherProcess {
                pid,
                name: self.name(pid),
                bytes,
            });
            named.collect()
        });
        Tenants::new(used, processes, std::process::id())
    }

    fn name(&self, pid: u32) -> String {
        let name = self.nvml.sys_process_name(pid, NAME_BYTES);
        name.unwrap_or_else(|_| "unknown".into())
    }
}

/// The names of reasons, in lower case.
fn words(reasons: ThrottleReasons) -> BTreeSet<String> {
    let names = reasons.iter_names();
    names.map(|(name, _)| name.to_lowercase()).collect()
}

/// What each process holds. A process that computes and draws is in both lists, with the same bytes.
fn by_pid(processes: Vec<ProcessInfo>) -> BTreeMap<u32, Option<u64>> {
    let mut by_pid = BTreeMap::new();
    for process in processes {
        let bytes = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        let held = by_pid.entry(process.pid).or_insert(bytes);
        *held = bytes.max(*held);
    }
    by_pid
}
