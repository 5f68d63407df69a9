//! The kernels of `kernels/*.cu`, as the build script compiled them: machine code for the GPUs that it knows, and PTX
//! that the driver of a later one compiles.

use super::error;
use crate::KernelError;
use crate::cuda::Kernel;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_void};

/// What the build script made of `kernels/`.
struct Embedded {
    /// Version of the compiler's toolkit, as 13000 for 13.0.
    toolkit_version: i32,
    /// One for each file, by name.
    sources: &'static [Source],
}

/// A source file, compiled.
struct Source {
    /// Its name, without `.cu`.
    name: &'static str,
    /// Names of its kernels.
    kernels: &'static [&'static str],
    /// A fat binary, of which the driver takes what fits the GPU.
    image: &'static Aligned<[u8]>,
}

/// Aligns a fat binary as in programs that nvcc links.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

const EMBEDDED: Embedded = include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Version of the toolkit that compiled the kernels.
pub(super) fn toolkit_version() -> i32 {
    EMBEDDED.toolkit_version
}

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) handle: sys::CUfunction,
    /// Dynamic shared memory that a block may ask for.
    shared_bytes_max: u32,
}

/// Modules of the current context, one a source, and their functions: loaded when first used, unloaded with the
/// context.
#[derive(Default)]
pub(super) struct Modules {
    modules: RefCell<HashMap<&'static str, sys::CUmodule>>,
    functions: RefCell<HashMap<Kernel, Function>>,
}

impl Modules {
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

    /// Loads every kernel, used or not. A driver that loads lazily has nothing of a module on the device before its
    /// functions are asked for.
    pub(super) fn load_all(&self) -> Result<(), KernelError> {
        for source in EMBEDDED.sources {
            for name in source.kernels {
                let source = source.name;
                self.function(Kernel { source, name }, 0)?;
            }
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
        let mut sources = EMBEDDED.sources.iter();
        let found = sources.find(|source| source.name == kernel.source);
        let source = found.ok_or_else(|| {
            let message = format!("this binary has no source `{}.cu`", kernel.source);
            KernelError::misfit(kernel.name, message)
        })?;
        let module = load(&source.image.0).map_err(|(error, log)| {
            let mut error = error::of_driver(kernel.name, error);
            error.message += &format!(" ({}.cu{log})", kernel.source);
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
            let message = format!(
                "{shared_bytes} bytes of shared memory are more than a block has on this GPU ({})",
                error::name(error)
            );
            KernelError::too_large(kernel.name, message)
        })?;
        self.shared_bytes_max = shared_bytes;
        Ok(())
    }
}

/// Loads a fat binary into the current context; on failure, with what the driver's compiler says if it was needed.
fn load(image: &'static [u8]) -> Result<sys::CUmodule, (DriverError, String)> {
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
    // SAFETY: the image tells its own size; both options have their values, and the log lives until the call returns.
    let loaded = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    loaded.result().map(|()| module).map_err(|error| {
        let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
        let said = String::from_utf8_lossy(&log[..end]);
        let said = match said.trim() {
            "" => String::new(),
            said => format!("; {said}"),
        };
        (error, said)
    })
}

#[cfg(test)]
mod tests {
    use super::{EMBEDDED, Source};
    use crate::cuda::device::driver::ARGUMENTS_MAX;

    /// What the fat binary of a source was made from.
    fn ptx(source: &Source) -> String {
        let path = format!(concat!(env!("OUT_DIR"), "/{}.ptx"), source.name);
        std::fs::read_to_string(path).unwrap()
    }

    fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
        let bytes = bytes[at..at + size].iter().rev();
        bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// Kind (1 is PTX, 2 machine code) and compute capability of what a fat binary holds.
    fn contents(image: &[u8]) -> Vec<(u64, u64)> {
        assert_eq!(number(image, 0, 4), 0xba55_ed50);
        let end = 16 + number(image, 8, 8) as usize;
        assert_eq!(end, image.len());
        let (mut at, mut contents) = (16, Vec::new());
        while at < end {
            contents.push((number(image, at, 2), number(image, at + 28, 4)));
            at += (number(image, at + 4, 4) + number(image, at + 8, 8)) as usize;
        }
        contents.sort();
        contents
    }

    /// Counts what PTX lists: a kernel is `.entry name(.param .u64 name_param_0, ...)`.
    #[test]
    fn a_launch_has_room_for_the_arguments_of_every_kernel() {
        let texts: Vec<String> = EMBEDDED.sources.iter().map(ptx).collect();
        let most = texts
            .iter()
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
    fn every_source_is_embedded_for_ampere_for_hopper_and_for_what_comes_later() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels");
        let files = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let mut names: Vec<String> = files
            .filter(|path| path.extension().is_some_and(|end| end == "cu"))
            .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
            .collect();
        names.sort();
        let embedded: Vec<&str> = EMBEDDED.sources.iter().map(|source| source.name).collect();
        assert_eq!(embedded, names);
        for source in EMBEDDED.sources {
            let name = source.name;
            assert!(ptx(source).contains(".target sm_80"), "{name}");
            assert!(!source.kernels.is_empty(), "{name}");
            let contents = contents(&source.image.0);
            assert_eq!(contents, [(1, 80), (2, 80), (2, 90)], "{name}");
        }
    }
}
