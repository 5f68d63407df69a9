//! The `tune` command: times the algorithms of a run's matrix products once, and keeps the fastest for later runs.

#[cfg(feature = "cuda")]
mod on_gpu;

use crate::decisions;
use crate::device::OpenDevice;
use crate::failure::{Failure, Result};
use settings::{Completed, PerFamily};

#[cfg(feature = "cuda")]
use {
    crate::stdout::{print, print_json},
    settings::Settings,
};

/// Times the algorithms of a run's products, and prints the choice.
pub(crate) fn tune(command: &Completed) -> Result {
    let (resolved, device) = decisions::on_device(command, None, None, PerFamily::default())?;
    match &device {
        OpenDevice::Cpu(_) => Err(Failure::Usage(format!(
            "`trainer tune` times products on a GPU, and the device is {}; leave --device out, or name cuda",
            resolved.device()
        ))),
        #[cfg(feature = "cuda")]
        OpenDevice::Cuda(gpu, ..) => {
            let tuned = on_gpu::tune(gpu, &resolved, &Settings::new(&resolved.config)?)?;
            match resolved.options.json {
                true => print_json(&tuned),
                false => print(tuned),
            }
        }
    }
}
