//! Which cuDNN there is, and whether it can be used.
//!
//! Loading has an order: cuDNN ends the process where cuBLASLt of its own CUDA cannot be loaded, so that is looked for first.
//! Its version can be asked for before it loads anything else.

use super::interface as sys;
use crate::KernelError;
use crate::cuda::device::library::LoadedLibrary;
use crate::cuda::device::loading::CUDNN;
use crate::cuda::device::products::Products;

/// The first version with a backward pass that adds to dq in order and takes memory linear in the sequence.
const VERSION_MIN: usize = 92_500;

/// What to install, whatever is wrong.
const ADVICE: &str = "`pip install nvidia-cudnn-cu13` has it (nvidia-cudnn-cu12 for CUDA 12): put the folder nvidia/cudnn/lib \
     into LD_LIBRARY_PATH";

/// A version of cuDNN, as 92800 for 9.28.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudnnVersion(pub usize);

impl CudnnVersion {
    /// The library of this process.
    ///
    /// # Errors
    /// [`KernelError`], with what to install, if there is none, it is too old, or cuBLASLt of the same CUDA is missing.
    pub fn look_up() -> Result<CudnnVersion, KernelError> {
        let refused = |reason: String| {
            let message = format!("{reason}; {ADVICE}");
            Err(KernelError::device("cudnn", message))
        };
        if !CUDNN.is_there() {
            return refused("cuDNN (libcudnn.so.9) was not found".into());
        }
        // SAFETY: takes nothing; loads none of the parts of cuDNN that need cuBLASLt.
        let (version, cuda) = unsafe { (sys::cudnnGetVersion(), sys::cudnnGetCudartVersion()) };
        let version = CudnnVersion(version);
        if version.0 < VERSION_MIN {
            let oldest = CudnnVersion(VERSION_MIN);
            return refused(format!(
                "cuDNN {version} was found, and a deterministic backward pass needs {oldest} or newer"
            ));
        }
        Products::look_for_library()?;
        let products = LoadedLibrary::look_up();
        if products.version / 10_000 != cuda / 1000 {
            return refused(format!(
                "cuDNN {version} is for CUDA {}, and the cuBLASLt that was loaded for CUDA {}: they must be of one CUDA",
                cuda / 1000,
                products.version / 10_000,
            ));
        }
        Ok(version)
    }
}

impl std::fmt::Display for CudnnVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let (major, minor, patch) = (self.0 / 10_000, self.0 / 100 % 100, self.0 % 100);
        write!(f, "{major}.{minor}.{patch}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_nvidia_writes_them() {
        assert_eq!(CudnnVersion(92_801).to_string(), "9.28.1");
        assert_eq!(CudnnVersion(VERSION_MIN).to_string(), "9.25.0");
    }
}
