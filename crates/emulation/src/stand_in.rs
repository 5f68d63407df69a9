//! Libraries that stand in for NVIDIA's driver, cuBLASLt, NVML and NCCL: `kernels/emulation/README.md` says what
//! they do.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;

/// The folder of `libcuda.so`, `libcublasLt.so` and `libnvidia-ml.so.1`, for `LD_LIBRARY_PATH`. Programs without the
/// feature `cuda` ignore it.
pub fn stand_in_folder() -> &'static Path {
    Path::new(env!("STAND_IN"))
}

unsafe extern "C" {
    fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void;
}

/// Loads the libraries into this process: whatever loads them by name later gets these.
///
/// # Panics
/// If they do not load.
pub fn load_stand_in() {
    const RTLD_NOW: c_int = 2;
    for name in ["libcuda.so", "libcublasLt.so"] {
        let path = stand_in_folder().join(name);
        let path =
            CString::new(path.into_os_string().into_encoded_bytes()).expect("paths hold no zero");
        // SAFETY: the text ends in a zero; when they are loaded, the libraries only list their kernels.
        let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
        assert!(!library.is_null(), "{name} does not load");
    }
}
