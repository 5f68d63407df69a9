//! Times an operation on a GPU, and says what its kernels take.

use crate::models::ModelShapes;
use crate::operands::{CaseTensors, CudaKernels};
use crate::table::Build;
use kernels::cuda::{Call, Cuda, CudaDevice, CudaDriver, Driver, KernelKind, Listing, pci_bus_id};
use kernels::{AbsMax, Copy, Cost, Fill, KernelError, Kernels, Queue};
use memory::{Buffer, Category, DType, Memory, OutOfMemory};
use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::{Device, Nvml};
use serde_json::{Value, json};
use std::error::Error;
use std::rc::Rc;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// An operation as it would be launched, without a GPU.
pub struct ListedCase {
    pub sizes: Vec<usize>,
    pub cost: Cost,
    calls: Vec<Call>,
    /// Bytes of its tensors.
    bytes: u64,
}

impl ListedCase {
    /// The names of the kernels that it launches; a product of the library has none.
    pub fn kernels(&self) -> Vec<Option<&str>> {
        let name = |call: &Call| match call {
            Call::Launch { kernel, .. } => Some(kernel.name),
            _ => None,
        };
        self.calls.iter().map(name).collect()
    }
}

/// Computes all that has kinds by kernels of one.
fn by<D: Driver>(kind: KernelKind, kernels: Kernels<Cuda<D>>) -> Kernels<Cuda<D>> {
    kernels.with_attention_by(kind).with_experts_by(kind)
}

/// An operation by kernels of a kind; none where the model has no such operation.
pub fn list(build: Build, model: &ModelShapes, kind: KernelKind) -> Result<Option<ListedCase>> {
    let memory = Listing::memory();
    let listing = Listing::of_rank(0, &memory);
    let kernels = by(kind, Cuda::new(listing.clone(), &memory, DType::BF16)?);
    let before = memory.live_bytes();
    let operands = CaseTensors::new(&memory, None);
    let Some(operation) = build(model, &operands) else {
        return Ok(None);
    };
    let (sizes, cost) = (operation.sizes(), operation.cost());
    kernels.run(operation)?;
    let calls = listing.take().into_iter().map(|listed| listed.call);
    Ok(Some(ListedCase {
        sizes,
        cost,
        calls: calls.collect(),
        bytes: memory.live_bytes() - before,
    }))
}

/// A GPU, and what empties its cache.
pub struct Bench {
    device: Rc<CudaDevice>,
    memory: Memory,
    gpu: Rc<CudaKernels>,
    gpu_of_hopper: Rc<CudaKernels>,
    /// How often an operation runs before it is timed, and how often then.
    rounds: [usize; 2],
    written: Buffer,
    read: Buffer,
    largest: Buffer,
    nvml: Option<Device<'static>>,
    copy_gbps: f64,
}

impl Bench {
    /// Measures copies of so many elements first.
    pub fn open(rounds: [usize; 2], copied: usize) -> Result<Bench> {
        let device = CudaDevice::open(0)?;
        let memory = Memory::device(device.clone());
        let gpu =
            || -> Result<_> { Ok(Cuda::new(CudaDriver::new(&device)?, &memory, DType::BF16)?) };
        let [gpu, gpu_of_hopper] = [gpu()?, by(KernelKind::Sm90, gpu()?)].map(Rc::new);
        let twice = 2 * device.facts().l2_bytes as usize / DType::F32.size_in_bytes();
        let [written, read, largest, mut to, from] =
            [twice, twice, 1, copied, copied].map(|elements| lease(&memory, elements));
        let mut bench = Bench {
            nvml: watched(),
            gpu,
            gpu_of_hopper,
            device,
            rounds,
            written: written?,
            read: read?,
            largest: largest?,
            copy_gbps: 0.0,
            memory,
        };
        let (to, from) = (to.as_mut().map_err(|error| error.clone())?, from?);
        let [us, _] = bench.us(KernelKind::Sm80, &mut |gpu| {
            let (out, x) = (to.view_mut(), from.view());
            gpu.run(Copy { out, x })
        })?;
        bench.copy_gbps = 2.0 * from.bytes() as f64 / us / 1e3;
        Ok(bench)
    }

    /// Times an operation that a model has, by kernels of a kind.
    pub fn measure(
        &mut self,
        listed: &ListedCase,
        build: Build,
        model: &ModelShapes,
        kind: KernelKind,
    ) -> Result<Value> {
        // Some memory is left for what the driver and cuBLASLt load.
        let (needed, room) = (listed.bytes, self.device.memory_bytes()?.free / 10 * 9);
        if needed > room {
            return Err(format!("its tensors take {needed} bytes, and {room} are free").into());
        }
        let mut operands = CaseTensors::new(&self.memory, Some(self.gpu.clone()));
        // Fills the tensors.
        build(model, &operands);
        operands.rewind()?;
        let [us, min_us] = self.us(kind, &mut |gpu| {
            gpu.run(build(model, &operands).expect("the model has it"))?;
            operands.rewind()
        })?;
        let nvml = self.nvml.as_ref();
        let sm_mhz = nvml.and_then(|gpu| gpu.clock_info(Clock::SM).ok());
        let milliwatts = nvml.and_then(|gpu| gpu.power_usage().ok());
        let (mut variant, mut takes) = (Vec::new(), [const { Vec::new() }; 3]);
        for call in &listed.calls {
            let Call::Launch {
                kernel,
                block,
                shared_bytes,
                ..
            } = call
            else {
                variant.push("library".into());
                continue;
            };
            let occupancy = self.device.occupancy(*kernel, *block, *shared_bytes)?;
            let threads: u32 = block.iter().product();
            variant.push(format!("{}:{threads}x{shared_bytes}", kernel.name));
            takes[0].push(occupancy.registers);
            takes[1].push(occupancy.local_bytes);
            takes[2].push(occupancy.blocks);
        }
        let [registers, local_bytes, blocks_per_sm] = takes;
        Ok(json!({
            "us": us,
            "min_us": min_us,
            "tflops": listed.cost.flops as f64 / us / 1e6,
            "gbps": listed.cost.bytes as f64 / us / 1e3,
            "copy_gbps": self.copy_gbps,
            "sm_mhz": sm_mhz,
            "watts": milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3),
            "registers": registers,
            "local_bytes": local_bytes,
            "blocks_per_sm": blocks_per_sm,
            "variant": variant,
        }))
    }

    /// The median and the least of some times. What empties the cache takes longer than the launch, so no time has one in it.
    fn us(
        &mut self,
        kind: KernelKind,
        work: &mut dyn FnMut(&CudaKernels) -> std::result::Result<(), KernelError>,
    ) -> Result<[f64; 2]> {
        let [untimed, timed] = self.rounds;
        let gpu = match kind {
            KernelKind::Sm80 => &self.gpu,
            KernelKind::Sm90 => &self.gpu_of_hopper,
        };
        let mut times = Vec::new();
        for round in 0..untimed + timed {
            // Writes as much as the cache holds twice, and reads as much elsewhere: nothing is left that would have to be written
            // while the operation runs.
            let (out, value) = (self.written.view_mut(), 1.0);
            self.gpu.run(Fill { out, value })?;
            let (out, x) = (self.largest.view_mut(), self.read.view());
            self.gpu.run(AbsMax { out, x })?;
            let time = self.device.timed(Queue::Compute, || work(gpu))?;
            if round >= untimed {
                times.push(1e6 * time.as_secs_f64());
            }
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok([times[times.len() / 2], times[0]])
    }
}

fn lease(memory: &Memory, elements: usize) -> std::result::Result<Buffer, OutOfMemory> {
    memory.lease_persistent(Category::Temporary, "bench", [elements], DType::F32)
}

/// The GPU as NVML knows it; none without that library.
fn watched() -> Option<Device<'static>> {
    let nvml = Nvml::builder()
        .lib_path("libnvidia-ml.so.1".as_ref())
        .init()
        .ok()?;
    // For the rest of the process.
    let nvml: &'static Nvml = Box::leak(Box::new(nvml));
    nvml.device_by_pci_bus_id(pci_bus_id(0).ok()?).ok()
}
