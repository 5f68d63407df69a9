//! Times an operation on a GPU, and says what its kernels take.

use crate::models::Model;
use crate::operands::{Gpu, Operands};
use crate::table::Build;
use kernels::cuda::{Call, Cuda, CudaDevice, CudaDriver, Listing, pci_bus_id};
use kernels::{AbsMax, Copy, Cost, Fill};
use memory::{Blocks, Buffer, Category, DType, Memory, OutOfMemory};
use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::{Device, Nvml};
use std::error::Error;
use std::rc::Rc;
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// An operation as it would be launched, without a GPU.
pub struct Listed {
    pub sizes: Vec<usize>,
    pub cost: Cost,
    pub calls: Vec<Call>,
    /// What its tensors take.
    pub bytes: u64,
}

/// None where the model has no such operation.
pub fn list(build: Build, model: &Model) -> Result<Option<Listed>> {
    let memory = Listing::memory();
    let listing = Listing::of_rank(0, &memory);
    let kernels = Cuda::new(listing.clone(), &memory, DType::BF16)?;
    let before = memory.live_bytes();
    let operands = Operands::new(&memory, None);
    let Some(operation) = build(model, &operands) else {
        return Ok(None);
    };
    let (sizes, cost) = (operation.sizes(), operation.cost());
    kernels.run(operation)?;
    Ok(Some(Listed {
        sizes,
        cost,
        calls: listing
            .take()
            .into_iter()
            .map(|listed| listed.call)
            .collect(),
        bytes: memory.live_bytes() - before,
    }))
}

/// How often, after how many times that do not count.
#[derive(Clone, Copy)]
pub struct Rounds {
    pub warm_up: usize,
    pub timed: usize,
}

/// A GPU, and what empties its cache.
pub struct Bench {
    pub device: Rc<CudaDevice>,
    memory: Memory,
    gpu: Rc<Gpu>,
    rounds: Rounds,
    written: Buffer,
    read: Buffer,
    largest: Buffer,
    nvml: Option<Device<'static>>,
}

/// Times in order, and the state of the GPU while it worked.
pub struct Times {
    pub sorted: Vec<Duration>,
    pub sm_mhz: Option<u32>,
    pub watts: Option<f64>,
}

impl Times {
    pub fn median_us(&self) -> f64 {
        self.us(self.sorted.len() / 2)
    }

    pub fn min_us(&self) -> f64 {
        self.us(0)
    }

    fn us(&self, place: usize) -> f64 {
        1e6 * self.sorted[place].as_secs_f64()
    }
}

/// What one call takes: a kernel's name with its block, and registers of a thread and blocks of a multiprocessor.
pub struct Launch {
    pub variant: String,
    pub registers: i32,
    pub local_bytes: i32,
    pub blocks_per_sm: i32,
}

impl Bench {
    pub fn open(rounds: Rounds) -> Result<Bench> {
        let device = CudaDevice::open(0)?;
        let memory = Memory::device(device.clone());
        let gpu = Cuda::new(CudaDriver::new(&device)?, &memory, DType::BF16)?;
        let twice = 2 * device.facts().l2_bytes as usize / DType::F32.size_in_bytes();
        let lease = |elements| lease(&memory, elements);
        let (written, read, largest) = (lease(twice)?, lease(twice)?, lease(1)?);
        Ok(Bench {
            nvml: watched(),
            gpu: Rc::new(gpu),
            device,
            memory,
            rounds,
            written,
            read,
            largest,
        })
    }

    /// Bytes that tensors may take: some are left for what the driver and cuBLASLt load.
    pub fn room(&self) -> Result<u64> {
        Ok(self.device.memory_bytes()?.free / 10 * 9)
    }

    /// Copies on the device, read and written bytes together, in units of 10^9 a second.
    pub fn copy_gbps(&mut self, elements: usize) -> Result<f64> {
        let (mut to, from) = (
            lease(&self.memory, elements)?,
            lease(&self.memory, elements)?,
        );
        let bytes = 2 * from.bytes();
        let times = self.time(&mut |gpu| {
            let (out, x) = (to.view_mut(), from.view());
            Ok(gpu.run(Copy { out, x })?)
        })?;
        Ok(bytes as f64 / times.median_us() / 1e3)
    }

    /// Times an operation that a model has.
    pub fn times(&mut self, build: Build, model: &Model) -> Result<Times> {
        let mut operands = Operands::new(&self.memory, Some(self.gpu.clone()));
        // Fills the tensors, which takes longer than the first time.
        build(model, &operands);
        operands.rewind()?;
        self.time(&mut |gpu| {
            let operation = build(model, &operands).expect("the model has it");
            gpu.run(operation)?;
            Ok(operands.rewind()?)
        })
    }

    /// Nothing is waited for before all is launched, so the launches are ahead and no time has one in it.
    fn time(&mut self, work: &mut dyn FnMut(&Gpu) -> Result<()>) -> Result<Times> {
        let mut stamps = Vec::new();
        for _ in 0..self.rounds.warm_up + self.rounds.timed {
            self.empty_cache()?;
            let stamp = || self.device.stamp().ok_or("the GPU failed");
            let from = stamp()?;
            work(&self.gpu)?;
            stamps.push((from, stamp()?));
        }
        let nvml = self.nvml.as_ref();
        let sm_mhz = nvml.and_then(|gpu| gpu.clock_info(Clock::SM).ok());
        let milliwatts = nvml.and_then(|gpu| gpu.power_usage().ok());
        let mut sorted = Vec::new();
        for (from, to) in stamps {
            sorted.push(self.device.elapsed(from, to).ok_or("the GPU failed")?);
            self.device.give_back_stamp(from);
            self.device.give_back_stamp(to);
        }
        sorted.drain(..self.rounds.warm_up);
        sorted.sort_unstable();
        let watts = milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3);
        Ok(Times {
            sorted,
            sm_mhz,
            watts,
        })
    }

    /// Writes a buffer of twice the cache's size, and reads another, so that nothing is left that would have to be written while
    /// the next operation is timed.
    fn empty_cache(&mut self) -> Result<()> {
        self.gpu.run(Fill {
            out: self.written.view_mut(),
            value: 1.0,
        })?;
        let (out, x) = (self.largest.view_mut(), self.read.view());
        Ok(self.gpu.run(AbsMax { out, x })?)
    }

    /// What each kernel takes; none of a library's products.
    pub fn launches(&self, calls: &[Call]) -> Result<Vec<Launch>> {
        let launch = |call: &Call| {
            let Call::Launch {
                kernel,
                block,
                shared_bytes,
                ..
            } = call
            else {
                return None;
            };
            let [x, y, z] = block;
            let asked = self.device.occupancy(*kernel, *block, *shared_bytes);
            Some(asked.map(|occupancy| Launch {
                variant: format!("{} {}x{shared_bytes}", kernel.name, x * y * z),
                registers: occupancy.registers,
                local_bytes: occupancy.local_bytes,
                blocks_per_sm: occupancy.blocks,
            }))
        };
        Ok(calls
            .iter()
            .filter_map(launch)
            .collect::<std::result::Result<_, _>>()?)
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
