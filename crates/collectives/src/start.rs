//! The engine that a job asks for.

use crate::launch::Launch;
use crate::mpi::Mpi;
use crate::nccl::Nccl;
use crate::{Group, GroupError, Patience, Result};
use std::sync::Arc;

/// What moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// NCCL between GPUs, else MPI.
    Auto,
    /// MPI, which moves host memory.
    Mpi,
    /// NCCL, which moves device memory.
    Nccl,
}

/// Where the bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// In host memory.
    Cpu,
    /// On the GPU of that number.
    Cuda {
        /// The number, as CUDA counts the GPUs that this process sees.
        ordinal: usize,
    },
}

/// Starts an engine; all ranks call it, once in a process, before other threads read the environment. `gathered_bytes` is the
/// most that they will gather at a time, for engines that hold memory of the device for it.
///
/// # Errors
/// [`GroupError`] if a library is missing or refuses, the engine does not work with the device or the launcher, or the
/// other ranks do not arrive in time.
pub fn start(
    launch: &Launch,
    engine: Engine,
    device: Device,
    patience: Patience,
    gathered_bytes: usize,
) -> Result<Arc<dyn Group>> {
    match (engine, device) {
        (Engine::Nccl, Device::Cpu) => Err(GroupError::Launch(
            "NCCL moves the memory of GPUs, and this run is on the CPU: leave collectives.engine at auto".into(),
        )),
        (Engine::Mpi, Device::Cuda { .. }) => Err(GroupError::Launch(
            "MPI moves host memory here, and this run is on a GPU: leave collectives.engine at auto".into(),
        )),
        (_, Device::Cpu) if !launch.launcher.has_mpi() => Err(GroupError::Launch(format!(
            "torchrun starts ranks that NCCL connects, between GPUs; on the CPU MPI does, which cannot start from it: run \
             `mpirun -n {} trainer ...`",
            launch.size
        ))),
        (_, Device::Cpu) => Ok(Arc::new(Mpi::start(launch, patience)?)),
        (_, Device::Cuda { ordinal }) => {
            let nccl = Nccl::start(launch, ordinal, patience, gathered_bytes)?;
            Ok(Arc::new(nccl))
        }
    }
}
