//! Writes down which attention `--attention auto` stands for, and tries cuDNN if it is asked for.

use crate::device::OpenDevice;
use crate::failure::Failure;
use kernels::{Fault, KernelError};
use model::Attention;
use settings::{AttentionBackend, Config, Device, Task, auto_attention, cudnn_misfit};

/// Replaces `auto` in the configuration by the attention that is used, so that the written configuration gives the same
/// run, and returns it with the reason in words. If cuDNN's attention is asked for, it must work.
///
/// # Errors
/// [`Failure::NoCudnn`] if cuDNN's attention is asked for but does not work, [`Failure::CudnnUntried`] if a full device
/// leaves that open, [`Failure::NoDevice`] if there is no device.
pub(crate) fn choose_attention(task: Task, config: &mut Config) -> Result<Option<String>, Failure> {
    // Plans use no device, so that they are the same on every machine. They also try other sequence lengths, for which
    // `auto` may choose another attention.
    if matches!(task, Task::Plan | Task::Init | Task::Doctor) {
        return Ok(None);
    }
    match config.attention.backend {
        AttentionBackend::Auto => {
            let (attention, reason) = auto_attention(config);
            let backend = AttentionBackend::from(attention);
            config.attention.backend = backend;
            Ok(Some(format!("attention is {backend}: {reason}")))
        }
        AttentionBackend::Cudnn => refuse_without_cudnn(config).map(|()| None),
        AttentionBackend::Eager | AttentionBackend::Flash => Ok(None),
    }
}

fn refuse_without_cudnn(config: &Config) -> Result<(), Failure> {
    match (config.device(), cudnn_misfit(config)) {
        (Device::Cuda { index }, None) => {
            // If there is no device, that is reported instead.
            drop(OpenDevice::open(config.device())?);
            try_cudnn(index, config).map_err(|error| match error.fault {
                Fault::DeviceFull => Failure::CudnnUntried(error.message),
                _ => Failure::NoCudnn(error.message),
            })
        }
        // Settings that do not fit are refused with the configuration.
        _ => Ok(()),
    }
}

/// Whether cuDNN's attention works on this GPU, or why it does not.
#[cfg(feature = "cuda")]
fn try_cudnn(index: usize, config: &Config) -> Result<(), KernelError> {
    use std::collections::HashMap;
    use std::sync::Mutex;

    // Cached, because a matrix of strategies asks for the same few shapes many times.
    type Verdicts = HashMap<(usize, kernels::cuda::LibraryShape), Result<(), KernelError>>;
    static VERDICTS: Mutex<Option<Verdicts>> = Mutex::new(None);
    let shape = settings::library_shape(config);
    let key = (index, shape);
    let mut verdicts = VERDICTS.lock().expect("nobody panics over it");
    let verdicts = verdicts.get_or_insert_default();
    if let Some(verdict) = verdicts.get(&key) {
        return verdict.clone();
    }
    let device = kernels::cuda::CudaDevice::open(index);
    let checked = device.and_then(|device| device.check_cudnn(shape));
    let verdict = checked.map(drop);
    // Not cached if the device is full, because it may have room later.
    if !matches!(&verdict, Err(error) if error.fault == Fault::DeviceFull) {
        verdicts.insert(key, verdict.clone());
    }
    verdict
}

#[cfg(not(feature = "cuda"))]
fn try_cudnn(_index: usize, _config: &Config) -> Result<(), KernelError> {
    let reason = "this binary was built without CUDA";
    Err(KernelError::device("cudnn", reason))
}

/// The version of cuDNN, if it computes the attention.
pub(crate) fn cudnn_version(attention: Attention) -> Option<String> {
    #[cfg(feature = "cuda")]
    if attention.is_cudnn() {
        let version = kernels::cuda::CudnnVersion::look_up();
        return version.ok().map(|version| version.to_string());
    }
    let _ = attention;
    None
}
