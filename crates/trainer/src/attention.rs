//! What `--attention auto` stands for where the device is known, and whether cuDNN can be had where it is asked for.

use crate::device::OpenDevice;
use crate::failure::Failure;
use kernels::{Fault, KernelError};
use model::Attention;
use settings::{AttentionBackend, Config, Device, Task, auto_attention, cudnn_fits, cudnn_misfit};

/// Writes down the kind of attention that `auto` stands for, and returns it with the reason in words: planned or trained again
/// from what is written, the run is the same. cuDNN's, asked for outright, has to work.
///
/// # Errors
/// [`Failure::NoCudnn`] where cuDNN's attention is asked for and cannot be had, [`Failure::CudnnUntried`] where a full device does
/// not tell, [`Failure::NoDevice`] where there is none.
pub(crate) fn choose_attention(task: Task, config: &mut Config) -> Result<Option<String>, Failure> {
    // Plans are the same on every machine and ask no device; with another length of sequences, which they try, `auto` may stand
    // for another kind.
    if matches!(task, Task::Plan | Task::Init | Task::Doctor) {
        return Ok(None);
    }
    match config.attention.backend {
        AttentionBackend::Auto => {
            let (attention, reason) = chosen(config);
            let backend = AttentionBackend::from(attention);
            config.attention.backend = backend;
            Ok(Some(format!("attention is {backend}: {reason}")))
        }
        AttentionBackend::Cudnn => refuse_without_cudnn(config).map(|()| None),
        AttentionBackend::Eager | AttentionBackend::Flash => Ok(None),
    }
}

/// What `auto` stands for, and why: cuDNN's attention where it fits and works on this device.
fn chosen(config: &Config) -> (Attention, String) {
    match config.device() {
        Device::Cuda { index } if cudnn_fits(config) && is_hopper(index) => {
            match found(index, config) {
                Ok(version) => (
                    Attention::Cudnn,
                    format!(
                        "version {version} computes what our own does, and the same bits every time"
                    ),
                ),
                Err(error) => {
                    if error.fault == Fault::DeviceFull {
                        tracing::warn!(
                            "this run keeps attention of our own, also where it goes on; --attention cudnn ends instead where \
                             the card is full"
                        );
                    }
                    let reason = format!("our own, since {}", error.message);
                    (Attention::Flash, reason)
                }
            }
        }
        _ => auto_attention(config),
    }
}

fn refuse_without_cudnn(config: &Config) -> Result<(), Failure> {
    match (config.device(), cudnn_misfit(config)) {
        (Device::Cuda { index }, None) => {
            // A device that is not there is another failure.
            drop(OpenDevice::open(config.device())?);
            found(index, config)
                .map(drop)
                .map_err(|error| match error.fault {
                    Fault::DeviceFull => Failure::CudnnUntried(error.message),
                    _ => Failure::NoCudnn(error.message),
                })
        }
        // What does not fit is refused with the settings.
        _ => Ok(()),
    }
}

/// What to know of a plan whose run may take another attention than was planned.
pub(crate) fn note(config: &Config) -> Option<String> {
    cudnn_fits(config).then(|| {
        "attention auto is planned as our own; on a Hopper GPU a run takes cuDNN's where that is installed, whose backward pass needs \
         more memory: --attention cudnn plans that"
            .into()
    })
}

/// Whether a GPU is of the kind for which cuDNN is worth its while. One that cannot be asked is left to those who open it.
#[cfg(feature = "cuda")]
fn is_hopper(index: usize) -> bool {
    kernels::cuda::capability(index).is_ok_and(|capability| capability == (9, 0))
}

#[cfg(not(feature = "cuda"))]
fn is_hopper(_index: usize) -> bool {
    false
}

/// cuDNN's version, once it was tried on a GPU; or why it is not taken.
#[cfg(feature = "cuda")]
fn found(index: usize, config: &Config) -> Result<String, KernelError> {
    use std::collections::HashMap;
    use std::sync::Mutex;

    // A matrix of strategies asks about the same few shapes over and over.
    type Verdicts = HashMap<(usize, kernels::AttentionShape), Result<String, KernelError>>;
    static VERDICTS: Mutex<Option<Verdicts>> = Mutex::new(None);
    let shape = settings::cudnn_shape(config);
    let key = (index, shape);
    let mut verdicts = VERDICTS.lock().expect("nobody panics over it");
    let verdicts = verdicts.get_or_insert_default();
    if let Some(verdict) = verdicts.get(&key) {
        return verdict.clone();
    }
    let device = kernels::cuda::CudaDevice::open(index);
    let checked = device.and_then(|device| device.check_cudnn(shape));
    let verdict = checked.map(|version| version.to_string());
    // A device that is full now may have room the next time.
    if !matches!(&verdict, Err(error) if error.fault == Fault::DeviceFull) {
        verdicts.insert(key, verdict.clone());
    }
    verdict
}

#[cfg(not(feature = "cuda"))]
fn found(_index: usize, _config: &Config) -> Result<String, KernelError> {
    let reason = "this binary was built without CUDA";
    Err(KernelError::device("cudnn", reason))
}

/// The version of the cuDNN that computes attention, where it does.
pub(crate) fn cudnn_version(attention: Attention) -> Option<String> {
    #[cfg(feature = "cuda")]
    if attention == Attention::Cudnn {
        let version = kernels::cuda::CudnnVersion::look_up();
        return version.ok().map(|version| version.to_string());
    }
    let _ = attention;
    None
}
