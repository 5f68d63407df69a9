//! Which cuBLASLt was loaded. The library's name without a version is tried first, so one installed by the system may
//! be loaded instead of the intended one.

use super::facts::version_text;
use crate::{KernelError, Result};
use cudarc::cublaslt::sys;
use std::path::PathBuf;

/// cuBLASLt as loaded in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedLibrary {
    /// Its version, as 130002 for 13.0.2.
    pub version: usize,
    /// Its file; none if the system does not tell.
    pub path: Option<PathBuf>,
}

impl LoadedLibrary {
    /// Finds the library of this process, which must be loaded already.
    pub(super) fn look_up() -> LoadedLibrary {
        LoadedLibrary {
            // SAFETY: takes nothing.
            version: unsafe { sys::cublasLtGetVersion() },
            path: mapped(&std::fs::read_to_string("/proc/self/maps").unwrap_or_default()),
        }
    }

    /// Whether it works with a driver for this version of CUDA (12020 for 12.2): one of the same major version, or a
    /// later one.
    ///
    /// # Errors
    /// [`KernelError`], with what to do, where it does not.
    pub(super) fn check(&self, driver_version: i32) -> Result {
        let (major, minor) = (self.version / 10_000, self.version / 100 % 100);
        let driver = version_text(driver_version);
        if major as i32 <= driver_version / 1000 {
            return Ok(());
        }
        let path = self.path.as_ref();
        let path = path.map_or_else(String::new, |path| format!(" ({})", path.display()));
        let message = format!(
            "the cuBLASLt that was found is that of CUDA {major}.{minor}{path}, and the driver is for CUDA {driver}: put \
             the folder of libcublasLt.so.12 into LD_LIBRARY_PATH, ahead of others; `pip install nvidia-cublas-cu12` has it"
        );
        Err(KernelError::device("gemm", message))
    }
}

/// The file of cuBLASLt among the maps of a process.
fn mapped(maps: &str) -> Option<PathBuf> {
    // Address, rights, offset, device and inode come before the path, which may hold spaces.
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    let mut paths = paths.map(PathBuf::from);
    paths.find(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libcublasLt.so")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_among_the_maps() {
        let maps = "55d0-55d1 r--p 00000000 fe:01 12  /usr/bin/trainer\n\
                    7f00-7f01 rw-p 00000000 00:00 0 \n\
                    7f10-7f11 r-xp 00000000 fe:01 34  /a folder/lib/libcublasLt.so.12.9.1.4\n\
                    7f20-7f21 r--p 00000000 fe:01 35  /usr/lib/libcublas.so.12\n";
        let path = mapped(maps).unwrap();
        assert_eq!(path.to_str(), Some("/a folder/lib/libcublasLt.so.12.9.1.4"));
        assert_eq!(mapped("7f00-7f01 rw-p 00000000 00:00 0 [heap]\n"), None);
    }

    #[test]
    fn a_library_of_a_later_cuda_than_the_driver_is_refused() {
        let library = |version| LoadedLibrary {
            version,
            path: Some("/lib/libcublasLt.so".into()),
        };
        for (version, driver) in [(120_904, 12020), (120_103, 13000), (130_002, 13000)] {
            library(version).check(driver).unwrap();
        }
        let message = library(130_002).check(12090).unwrap_err().message;
        for part in [
            "CUDA 13.0 (/lib/libcublasLt.so)",
            "for CUDA 12.9",
            "nvidia-cublas-cu12",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
}
