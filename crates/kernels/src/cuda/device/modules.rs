//! The kernels of `kernels/*.cu`: compiled to PTX by the build script, and by the driver for the GPU at hand.

use super::error;
use crate::KernelError;
use crate::cuda::Kernel;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_void};

/// A source file, compiled; both texts end in a zero.
struct Ptx {
    /// Its name, without `.cu`.
    source: &'static str,
    /// For compute capability 8.0 and everything newer.
    portable: &'static [u8],
    /// For 9.0 alone, with Hopper's own instructions, where the source has any.
    hopper: Option<&'static [u8]>,
}

const SOURCES: &[Ptx] = include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) handle: sys::CUfunction,
    /// Dynamic shared memory that a block may ask for.
    shared_bytes_max: u32,
}

/// Modules, one a source, and their functions: loaded when first used, unloaded with the context.
pub(super) struct Modules {
    is_hopper: bool,
    modules: RefCell<HashMap<&'static str, sys::CUmodule>>,
    functions: RefCell<HashMap<Kernel, Function>>,
}

impl Modules {
    /// For a device of this compute capability, whose context is current.
    pub(super) fn new(capability: (i32, i32)) -> Modules {
        Modules {
            is_hopper: capability == (9, 0),
            modules: RefCell::default(),
            functions: RefCell::default(),
        }
    }

    /// A kernel that may be launched with `shared_bytes` of dynamic shared memory.
    pub(super) fn function(
        &self,
        kernel: Kernel,
        shared_bytes: u32,
    ) -> Result<Function, KernelError> {
        let mut functions = self.functions.borrow_mut();
        let function = match functions.entry(kernel) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => place.insert(self.load(kernel)?),
        };
        function.allow_shared(kernel, shared_bytes)?;
        Ok(*function)
    }

    /// Loads every source, used or not.
    pub(super) fn load_all(&self) -> Result<(), KernelError> {
        for ptx in SOURCES {
            let (source, name) = (ptx.source, ptx.source);
            self.module(Kernel { source, name })?;
        }
        Ok(())
    }

    fn load(&self, kernel: Kernel) -> Result<Function, KernelError> {
        let module = self.module(kernel)?;
        let name = CString::new(kernel.name).expect("the name of a kernel holds no zero");
        let refused = |error| error::of_driver(kernel.name, error);
        // SAFETY: modules are never unloaded while the context lives.
        let handle = unsafe { result::module::get_function(module, name) }.map_err(refused)?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function has just been found.
        let shared = unsafe { result::function::get_function_attribute(handle, attribute) };
        Ok(Function {
            handle,
            shared_bytes_max: shared.map_err(refused)?.max(0) as u32,
        })
    }

    fn module(&self, kernel: Kernel) -> Result<sys::CUmodule, KernelError> {
        let mut modules = self.modules.borrow_mut();
        if let Some(module) = modules.get(kernel.source) {
            return Ok(*module);
        }
        let found = SOURCES.iter().find(|ptx| ptx.source == kernel.source);
        let ptx = found.ok_or_else(|| {
            let message = format!("this binary has no source `{}.cu`", kernel.source);
            KernelError::misfit(kernel.name, message)
        })?;
        let text = match ptx.hopper {
            Some(hopper) if self.is_hopper => hopper,
            _ => ptx.portable,
        };
        let module = load_ptx(text).map_err(|(error, log)| {
            let mut error = error::of_driver(kernel.name, error);
            error.message += &format!(" ({}.cu; {log})", kernel.source);
            error
        })?;
        modules.insert(kernel.source, module);
        Ok(module)
    }
}

impl Function {
    /// Asks for more dynamic shared memory than a block has by default, 48 KiB less what is static.
    fn allow_shared(&mut self, kernel: Kernel, shared_bytes: u32) -> Result<(), KernelError> {
        if shared_bytes <= self.shared_bytes_max {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function's module is never unloaded while the context lives.
        let set = unsafe {
            result::function::set_function_attribute(self.handle, attribute, shared_bytes as i32)
        };
        set.map_err(|error| {
            let mut error = error::of_driver(kernel.name, error);
            error.message = format!("{shared_bytes} bytes of shared memory: {}", error.message);
            error
        })?;
        self.shared_bytes_max = shared_bytes;
        Ok(())
    }
}

/// Compiles PTX for the device of the current context; on failure, with what the compiler says.
fn load_ptx(text: &'static [u8]) -> Result<sys::CUmodule, (DriverError, String)> {
    assert_eq!(text.last(), Some(&0), "the build script ends PTX in a zero");
    let mut log = vec![0u8; 4096];
    let mut module = std::ptr::null_mut();
    let mut options = [
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    // Options are passed by value where they fit into a pointer.
    let mut values: [*mut c_void; 2] = [
        log.as_mut_ptr().cast(),
        std::ptr::without_provenance_mut(log.len()),
    ];
    // SAFETY: the text ends in a zero; both options have their values, and the log lives until the call returns.
    let loaded = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            text.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    loaded.result().map(|()| module).map_err(|error| {
        let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
        (
            error,
            String::from_utf8_lossy(&log[..end]).trim().to_string(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::SOURCES;
    use crate::cuda::device::driver::ARGUMENTS_MAX;
    use std::ffi::CStr;

    /// In PTX, a kernel is `.entry name(.param .u64 name_param_0, ...)`.
    #[test]
    fn a_launch_has_room_for_the_arguments_of_every_kernel() {
        let texts = SOURCES
            .iter()
            .flat_map(|ptx| [Some(ptx.portable), ptx.hopper])
            .flatten()
            .map(|text| CStr::from_bytes_with_nul(text).unwrap().to_str().unwrap());
        let most = texts
            .flat_map(|text| text.split(".entry").skip(1))
            .map(|kernel| {
                kernel[..kernel.find(')').unwrap()]
                    .matches(".param")
                    .count()
            })
            .max();
        assert_eq!(most, Some(ARGUMENTS_MAX));
    }

    #[test]
    fn every_source_is_embedded_as_text_that_the_driver_can_read() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels");
        let files = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let mut names: Vec<String> = files
            .filter(|path| path.extension().is_some_and(|end| end == "cu"))
            .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
            .collect();
        names.sort();
        let embedded: Vec<&str> = SOURCES.iter().map(|ptx| ptx.source).collect();
        assert_eq!(embedded, names);
        for ptx in SOURCES {
            let portable = CStr::from_bytes_with_nul(ptx.portable).unwrap();
            assert!(
                portable.to_str().unwrap().contains(".target sm_80"),
                "{}",
                ptx.source
            );
            if let Some(hopper) = ptx.hopper {
                let hopper = CStr::from_bytes_with_nul(hopper).unwrap();
                assert!(
                    hopper.to_str().unwrap().contains(".target sm_90a"),
                    "{}",
                    ptx.source
                );
            }
        }
    }
}
