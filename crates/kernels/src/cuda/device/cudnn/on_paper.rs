//! Plans for a GPU that is not there, from a description of it.

use super::descriptor::Descriptor;
use super::interface::{Kind, Name};
use super::library::CudnnVersion;
use super::plan::{Device, Plan};
use crate::KernelError;
use crate::cuda::{AttentionPass, LibraryShape};

/// An H100 SXM, by NVIDIA's data sheets, in the keys that cuDNN writes for a device itself.
const H100: &str = r#"{"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":85017624576,"smClockRateKHz":1980000,"memClockRateKHz":2619000,"memoryBusWidth":5120,"l2CacheSize":52428800,"cudaDeviceId":0,"deviceVer":900,"driverVer":13000,"deviceName":"NVIDIA H100 80GB HBM3"}"#;

/// What cuDNN would do on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaperPlan {
    /// What it takes beside its tensors, in bytes.
    pub workspace_bytes: usize,
    /// The plan as cuDNN writes it down, with the machine code in it.
    pub written: Vec<u8>,
}

/// The plan for attention on an H100, made without one. It takes a library of the name of the driver's, `libcuda.so.1`, which is
/// asked for nothing that needs a GPU.
///
/// # Errors
/// [`KernelError`] if cuDNN cannot be used, or has no plan.
pub fn plan_on_paper(shape: LibraryShape, pass: AttentionPass) -> Result<PaperPlan, KernelError> {
    CudnnVersion::look_up()?;
    let planned = || {
        let json = H100.as_bytes();
        let properties = Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?
            .with_all(Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, json)?
            .finalized()?;
        let plan = Plan::new(Device::Described(&properties), shape, pass)?;
        Ok(PaperPlan {
            workspace_bytes: plan.workspace_bytes,
            written: plan.written()?,
        })
    };
    planned().map_err(|refused: super::descriptor::Refused| refused.of("cudnn"))
}
