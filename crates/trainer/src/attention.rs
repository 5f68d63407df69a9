//! What `--attention auto` stands for where the device is known, and whether cuDNN can be had where it is asked for.

use crate::device::OpenDevice;
use crate::failure::Failure;
use kernels::{Fault, KernelError};
use settings::{AttentionBackend, Config, Device, Resolved, Task, cudnn_fits, cudnn_misfit};

/// The configuration with cuDNN's attention in it, if that is open, fits, and works on this device. Asked for outright, it has to
/// work.
///
/// # Errors
/// [`Failure::NoCudnn`] where cuDNN's attention is asked for and cannot be had, [`Failure::CudnnUntried`] where a full device does
/// not tell, [`Failure::NoDevice`] where there is none.
pub(crate) fn chosen(resolved: &Resolved, mut config: Config) -> Result<Config, Failure> {
    let Device::Cuda { index } = config.device() else {
        return Ok(config);
    };
    let is_asked_for = config.attention.backend == AttentionBackend::Cudnn;
    match resolved.task {
        // Plans are the same on every machine, and ask no device.
        Task::Plan | Task::Init | Task::Doctor => {}
        Task::Train | Task::Profile | Task::Tune if is_asked_for => {
            // What does not fit is refused with the settings.
            if cudnn_misfit(&config).is_none() {
                // A device that is not there is another failure.
                drop(OpenDevice::open(config.device())?);
                found(index, &config).map_err(|error| match error.fault {
                    Fault::DeviceFull => Failure::CudnnUntried(error.message),
                    _ => Failure::NoCudnn(error.message),
                })?;
            }
        }
        Task::Train | Task::Profile | Task::Tune if cudnn_fits(&config) && is_hopper(index) => {
            match found(index, &config) {
                Ok(version) => {
                    tracing::info!(
                        "attention is cudnn: version {version} computes what our own does, and twice the same"
                    );
                    config.attention.backend = AttentionBackend::Cudnn;
                }
                Err(error) => tracing::info!("attention is flash, our own: {}", error.message),
            }
        }
        Task::Train | Task::Profile | Task::Tune => {}
    }
    Ok(config)
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
pub(crate) fn cudnn_version(attention: model::Attention) -> Option<String> {
    #[cfg(feature = "cuda")]
    if attention == model::Attention::Cudnn {
        let version = kernels::cuda::CudnnVersion::look_up();
        return version.ok().map(|version| version.to_string());
    }
    let _ = attention;
    None
}
