//! NVIDIA's libraries, found by their names and loaded when they are first asked for.
//!
//! cudarc loads the driver and cuBLASLt too. But in a build with candle's feature `cuda` it links them, and then it has no
//! function that looks for a library. What is here works in both builds: a library that is linked is found as one that is loaded.

use libloading::Library;
use std::sync::OnceLock;

/// A library by the names of its file, of which the first that there is counts: those that cudarc tries, in its order.
pub(super) struct Lib {
    names: &'static [&'static str],
    loaded: OnceLock<Option<Library>>,
}

pub(super) static DRIVER: Lib = Lib::named(&["libcuda.so", "libcuda.so.1"]);
pub(super) static CUBLASLT: Lib =
    Lib::named(&["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"]);
pub(super) static CUDNN: Lib = Lib::named(&["libcudnn.so", "libcudnn.so.9"]);

impl Lib {
    const fn named(names: &'static [&'static str]) -> Lib {
        Lib {
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

    /// Whether it is there.
    pub(super) fn is_there(&self) -> bool {
        self.load().is_some()
    }

    /// A function by its name, which ends in a zero; none if the library or the function is not there.
    ///
    /// # Safety
    /// `F` is the type of a pointer to the function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.load()?.get::<F>(name.as_bytes()) };
        found.ok().map(|function| *function)
    }
}
