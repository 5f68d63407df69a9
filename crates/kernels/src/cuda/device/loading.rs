//! Finds NVIDIA's libraries by name, and loads them at first use.
//!
//! cudarc loads the driver and cuBLASLt too. But a build with candle's feature `cuda` links them, and then cudarc has
//! no function that looks for a library. The code here works in both builds, because it finds a linked library like a
//! loaded one.

use libloading::Library;
use std::sync::OnceLock;

/// A library by its possible file names. The first that exists is loaded. The names and their order are cudarc's, which loads
/// these libraries too.
pub(super) struct NvidiaLibrary {
    names: &'static [&'static str],
    loaded: OnceLock<Option<Library>>,
}

pub(super) static DRIVER: NvidiaLibrary = NvidiaLibrary::named(&["libcuda.so", "libcuda.so.1"]);
pub(super) static CUBLASLT: NvidiaLibrary =
    NvidiaLibrary::named(&["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"]);

impl NvidiaLibrary {
    const fn named(names: &'static [&'static str]) -> NvidiaLibrary {
        NvidiaLibrary {
            names,
            loaded: OnceLock::new(),
        }
    }

    fn load(&self) -> Option<&Library> {
        let load = || {
            let mut names = self.names.iter();
            // SAFETY: NVIDIA's libraries may be loaded at any time, and are never unloaded.
            names.find_map(|name| unsafe { Library::new(*name) }.ok())
        };
        self.loaded.get_or_init(load).as_ref()
    }

    /// Whether the library can be loaded.
    pub(super) fn is_there(&self) -> bool {
        self.load().is_some()
    }

    /// A function by its name, which ends in a zero. None if the library or the function does not exist.
    ///
    /// # Safety
    /// `F` is the type of a pointer to the function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.load()?.get::<F>(name.as_bytes()) };
        found.ok().map(|function| *function)
    }
}
