//! An implementation with the memory that it works in, reached through leases, uploads and downloads alone.

use crate::DTYPES;
use crate::host::Host;
use emulation::Emulation;
use kernels::cpu::{Cpu, Instructions};
#[cfg(feature = "cuda")]
use kernels::cuda::CudaDriver;
use kernels::cuda::{Cuda, Driver, KernelKind};
use kernels::meta::{FlopCounter, Meta};
use kernels::{Init, KernelError, Kernels, Operation, Target};
use memory::{Buffer, Category, DType, Dims, In, Memory, Out};
use std::ops::Range;

/// Kernels and their memory.
pub struct Device {
    pub name: String,
    pub memory: Memory,
    pub kernels: Box<Kernels>,
    /// Elements by which every tensor is off an aligned address.
    pub shift: usize,
    /// Sees each operation of a case before it runs.
    pub watch: Option<Watch>,
}

pub type Watch = Box<dyn Fn(&Device, &Operation)>;

/// A name for `CONFORMANCE_DEVICES`, and how to open what it names; none where the machine or the build has no such.
type Implementation = (&'static str, fn(DType) -> Option<Device>);

/// What computes. The first is what others are compared with.
const IMPLEMENTATIONS: [Implementation; 4] = [
    ("cpu", |dtype| {
        Some(on_host("cpu", dtype, |memory| {
            Box::new(Cpu::new(memory, dtype).unwrap())
        }))
    }),
    ("emulation", |dtype| {
        Some(on_host("emulated cuda", dtype, |memory| {
            Box::new(Cuda::new(Emulation::default(), memory, dtype).unwrap())
        }))
    }),
    ("ptx", interpreted),
    ("gpu", gpu),
];

/// Every implementation that computes, or those that `CONFORMANCE_DEVICES` lists (`cpu,gpu`), which must be there: a
/// machine without a GPU must not pass for one whose GPU conforms.
pub fn computing(dtype: DType) -> Vec<Device> {
    let Ok(list) = std::env::var("CONFORMANCE_DEVICES") else {
        return IMPLEMENTATIONS
            .iter()
            .filter_map(|(_, open)| open(dtype))
            .collect();
    };
    let names: Vec<&str> = list.split(',').collect();
    let known = IMPLEMENTATIONS.map(|(name, _)| name);
    for name in &names {
        assert!(
            known.contains(name),
            "CONFORMANCE_DEVICES: `{name}` is none of {known:?}"
        );
    }
    let listed = IMPLEMENTATIONS
        .iter()
        .filter(|(name, _)| names.contains(name));
    let devices = listed.map(|(name, open)| {
        open(dtype).unwrap_or_else(|| {
            panic!("CONFORMANCE_DEVICES lists `{name}`: this machine, or this build, has none")
        })
    });
    devices.collect()
}

fn on_host(name: &str, dtype: DType, kernels: impl Fn(&Memory) -> Box<Kernels>) -> Device {
    let memory = Memory::host();
    let kernels = kernels(&memory);
    let name = format!("{name} for {dtype:?}");
    Device::new(name, memory, kernels)
}

/// The emulation, with products cut where a matrix reaches over more elements.
pub fn cutting_products(dtype: DType, elements_max: usize) -> Device {
    on_host("emulated cuda", dtype, |memory| {
        let cuda = Cuda::new(Emulation::default(), memory, dtype).unwrap();
        Box::new(cuda.cutting_products(elements_max))
    })
}

/// Kernels for Hopper; blocks compute as many tiles of products of experts as they may.
fn of_hopper<D: Driver + 'static>(kernels: Kernels<Cuda<D>>) -> Box<Kernels> {
    Box::new(
        kernels
            .with_attention_by(KernelKind::Sm90)
            .with_experts_by(KernelKind::Sm90)
            .with_blocks_enough(1),
    )
}

/// The emulation of kernels for Hopper.
pub fn emulating_hopper(dtype: DType) -> Device {
    on_host("emulated cuda of Hopper", dtype, |memory| {
        of_hopper(Cuda::new(Emulation::default(), memory, dtype).unwrap())
    })
}

/// Every device with kernels for Hopper of a compute type: emulated, interpreted, and the GPU if it is one.
pub fn of_hopper_kind(dtype: DType) -> Vec<Device> {
    let mut devices = Vec::new();
    if dtype == DType::BF16 {
        devices.push(emulating_hopper(dtype));
        #[cfg(feature = "cuda")]
        devices.extend(
            gpu_of_hopper(dtype)
                .into_iter()
                .chain([interpreting_hopper(dtype)]),
        );
    }
    devices
}

/// What Hopper runs, interpreted.
#[cfg(feature = "cuda")]
pub fn interpreting_hopper(dtype: DType) -> Device {
    let (memory, kernels) = interpreting(&crate::interpreted::TEXTS_ON_HOPPER, dtype);
    let name = format!("interpreted PTX of Hopper for {dtype:?}");
    Device::new(name, memory, of_hopper(kernels))
}

/// The processor, multiplying bf16 by these instructions, which it must have.
pub fn by_instructions(instructions: Instructions) -> Device {
    on_host(&format!("cpu by {instructions:?}"), DType::BF16, |memory| {
        let cpu = Cpu::new(memory, DType::BF16).unwrap();
        Box::new(cpu.multiplying_by(instructions))
    })
}

/// The PTX that the build script made, interpreted; none in a build without it.
#[cfg(feature = "cuda")]
fn interpreted(dtype: DType) -> Option<Device> {
    let (memory, kernels) = interpreting(&crate::interpreted::TEXTS, dtype);
    let name = format!("interpreted PTX for {dtype:?}");
    Some(Device::new(name, memory, Box::new(kernels)))
}

/// A device that interprets some texts.
#[cfg(feature = "cuda")]
pub fn interpreting(
    texts: &std::sync::Arc<ptx::PtxTexts>,
    dtype: DType,
) -> (Memory, Kernels<Cuda<ptx::Interpreter>>) {
    let interpreter = ptx::Interpreter::new(texts);
    let memory = Memory::device(std::rc::Rc::new(interpreter.clone()));
    let kernels = Cuda::new(interpreter, &memory, dtype).unwrap();
    (memory, kernels)
}

#[cfg(not(feature = "cuda"))]
fn interpreted(_dtype: DType) -> Option<Device> {
    None
}

/// The first GPU, on a machine that has one.
#[cfg(feature = "cuda")]
pub fn gpu(dtype: DType) -> Option<Device> {
    on_gpu(dtype, |kernels, _| Some(Box::new(kernels)))
}

/// The same with kernels for Hopper; none if it is another GPU.
#[cfg(feature = "cuda")]
pub fn gpu_of_hopper(dtype: DType) -> Option<Device> {
    on_gpu(dtype, |kernels, capability| {
        (capability == (9, 0)).then(|| of_hopper(kernels))
    })
}

#[cfg(feature = "cuda")]
fn on_gpu(
    dtype: DType,
    kernels: impl Fn(Kernels<Cuda<CudaDriver>>, (i32, i32)) -> Option<Box<Kernels>>,
) -> Option<Device> {
    use kernels::cuda::{CudaDevice, device_count};
    device_count().ok().filter(|count| *count > 0)?;
    let device = CudaDevice::open(0).unwrap();
    let memory = Memory::device(device.clone());
    let driver = CudaDriver::new(&device).unwrap();
    let cuda = Cuda::new(driver, &memory, dtype).unwrap();
    let name = format!("{} for {dtype:?}", device.facts().name);
    let kernels = kernels(cuda, device.facts().capability)?;
    Some(Device::new(name, memory, kernels))
}

#[cfg(not(feature = "cuda"))]
fn gpu(_dtype: DType) -> Option<Device> {
    None
}

/// The implementation that only checks, in place of every target.
pub fn planning(dtype: DType) -> Vec<Device> {
    let device = |target: Target| {
        let memory = Memory::shapes();
        let kernels = Box::new(Meta::new(&memory, target, dtype, FlopCounter::default()).unwrap());
        let name = format!("meta of {} for {dtype:?}", target.name());
        Device::new(name, memory, kernels)
    };
    [Target::Cpu, Target::Cuda].map(device).into()
}

/// A leased tensor between two guards that nothing may write, and that turn what reads them into NaN.
pub struct Tensor {
    buffer: Buffer,
    dims: Dims,
    shift: usize,
}

/// Elements on either side of a tensor: of any type, they keep the alignment of a lease.
const GUARD: usize = 256;

impl Tensor {
    fn range(&self) -> Range<usize> {
        let start = GUARD + self.shift;
        start..start + self.dims.elements()
    }

    fn guards(&self) -> [Range<usize>; 2] {
        let Range { start, end } = self.range();
        [start - GUARD..start, end..end + GUARD]
    }

    pub fn view(&self) -> In<'_> {
        self.buffer.view().rows(self.range()).reshape(self.dims)
    }

    pub fn view_mut(&mut self) -> Out<'_> {
        let (range, dims) = (self.range(), self.dims);
        self.buffer.view_mut().rows(range).reshape(dims)
    }
}

impl Device {
    pub fn new(name: impl Into<String>, memory: Memory, kernels: Box<Kernels>) -> Device {
        Device {
            name: name.into(),
            memory,
            kernels,
            shift: 0,
            watch: None,
        }
    }

    pub fn run<'a>(&self, operation: impl Into<Operation<'a>>) -> Result<(), KernelError> {
        let operation = operation.into();
        if let Some(watch) = &self.watch {
            watch(self, &operation);
        }
        self.kernels.run(operation)
    }

    /// A tensor with unspecified contents.
    pub fn room(&self, dtype: DType, dims: impl Into<Dims>) -> Tensor {
        let dims = dims.into();
        let elements = dims.elements() + 2 * GUARD + self.shift;
        let buffer = self
            .memory
            .lease(Category::Temporary, "tensor", [elements], dtype)
            .unwrap();
        let shift = self.shift;
        let mut tensor = Tensor {
            buffer,
            dims,
            shift,
        };
        for guard in tensor.guards() {
            let bytes = vec![0xff; GUARD * dtype.size_in_bytes()];
            self.kernels
                .upload(tensor.buffer.view_mut().rows(guard), &bytes)
                .unwrap();
        }
        tensor
    }

    /// A tensor with these contents.
    pub fn put(&self, host: &Host) -> Tensor {
        let mut tensor = self.room(host.dtype, host.dims);
        self.kernels.upload(tensor.view_mut(), &host.bytes).unwrap();
        tensor
    }

    /// The contents of a tensor, whose guards must be as they were.
    pub fn take(&self, tensor: &Tensor) -> Host {
        let dtype = tensor.buffer.dtype();
        let size = dtype.size_in_bytes();
        let mut bytes = vec![0; tensor.buffer.dims().elements() * size];
        self.kernels
            .download(&mut bytes, tensor.buffer.view())
            .unwrap();
        for guard in tensor.guards() {
            let untouched = bytes[guard.start * size..guard.end * size]
                .iter()
                .all(|byte| *byte == 0xff);
            assert!(
                untouched || self.memory.is_shapes(),
                "{}: written outside {:?}",
                self.name,
                tensor.dims
            );
        }
        let range = tensor.range();
        let bytes = bytes[range.start * size..range.end * size].to_vec();
        Host {
            dtype,
            dims: tensor.dims,
            bytes,
        }
    }

    /// Room for a result, with its initial contents where it accumulates.
    pub fn start(&self, start: Start, initial: &Host) -> Tensor {
        match start {
            Start::Accumulate => self.put(initial),
            Start::Overwrite | Start::Add => self.room(initial.dtype, initial.dims),
        }
    }
}

/// Every type of a gradient, with every way to start it.
pub fn gradient_starts() -> impl Iterator<Item = (DType, Start)> {
    let starts = |dtype| [Start::Overwrite, Start::Accumulate].map(|start| (dtype, start));
    DTYPES.into_iter().flat_map(starts)
}

/// An [`Init`] without its tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Start {
    Overwrite,
    Accumulate,
    Add,
}

impl Start {
    pub fn init(self, residual: &Tensor) -> Init<'_> {
        match self {
            Start::Overwrite => Init::Overwrite,
            Start::Accumulate => Init::Accumulate,
            Start::Add => Init::Add(residual.view()),
        }
    }

    /// What a result is added to.
    pub fn values(self, initial: &Host) -> Vec<f64> {
        match self {
            Start::Overwrite => vec![0.0; initial.dims.elements()],
            Start::Accumulate | Start::Add => initial.values(),
        }
    }
}
