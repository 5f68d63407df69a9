//! The kernels of `kernels/*.cu`, as the build script compiled them: machine code for the GPUs that it knows, and PTX
//! that the driver of another compiles.

use super::error;
use super::image::{Code, Image};
use crate::cuda::Kernel;
use crate::{KernelError, Result};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_void};

/// What the build script made of `kernels/`.
struct Embedded {
    /// Version of the compiler's toolkit, as 12090 for 12.9.
    toolkit_version: i32,
    /// One for each file, by name.
    sources: &'static [Source],
}

/// A source file, compiled.
struct Source {
    /// Its name, without `.cu`.
    name: &'static str,
    /// Whether it has instructions of Hopper alone, and so code for no other GPU.
    is_for_hopper_alone: bool,
    /// Names of its kernels.
    kernels: &'static [&'static str],
    /// Its code, for the same GPUs as that of every other source, but for sources of Hopper's own instructions.
    images: &'static [Image],
}

const EMBEDDED: Embedded = include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

impl Source {
    /// What a GPU takes of it: the latest machine code for its major compute capability, or else PTX.
    fn choose(&self, capability: (i32, i32)) -> Option<&'static Image> {
        let fitting = self
            .images
            .iter()
            .filter(|image| image.code().runs_on(capability));
        fitting.max_by_key(|image| image.code())
    }
}

/// Version of the toolkit that compiled the kernels.
pub(super) fn toolkit_version() -> i32 {
    EMBEDDED.toolkit_version
}

/// What a GPU runs of the kernels; none if it is too old.
pub(super) fn code_for(capability: (i32, i32)) -> Option<Code> {
    let source = EMBEDDED.sources.first()?;
    source.choose(capability).map(Image::code)
}

/// The kinds of code that this binary has of its kernels, read from the code itself: `sm_90` is machine code for compute
/// capability 9.0, `sm_90a` that of kernels with instructions of 9.0 alone, `compute_80 ptx 8.8` what the driver of another GPU compiles.
pub fn carried() -> Vec<String> {
    let mut carried = Vec::new();
    for source in EMBEDDED.sources {
        let own = if source.is_for_hopper_alone { "a" } else { "" };
        for image in source.images {
            let name = format!("{}{own}", image.code());
            if !carried.contains(&name) {
                carried.push(name);
            }
        }
    }
    carried
}

/// The PTX of every source that has some, by its name, without `.cu`: what this binary has for GPUs of which it has no machine
/// code.
pub fn ptx() -> impl Iterator<Item = (&'static str, String)> {
    EMBEDDED.sources.iter().filter_map(|source| {
        let image = source.images.last()?;
        let is_ptx = matches!(image.code(), Code::Ptx { .. });
        let text = is_ptx.then(|| String::from_utf8(image.bytes()).expect("PTX is text"))?;
        Some((source.name, text))
    })
}

/// PTX that the build script made for Hopper of the sources that are others there, by name: for tests alone.
pub fn ptx_on_hopper() -> impl Iterator<Item = (&'static str, String)> {
    const OTHERS: &[(&str, Image)] = include!(concat!(env!("OUT_DIR"), "/on_hopper.rs"));
    OTHERS.iter().map(|(name, image)| {
        let text = String::from_utf8(image.bytes()).expect("PTX is text");
        (*name, text)
    })
}

/// The embedded code of the sources whose names begin with `name`, compressed. It differs between builds of different sources.
pub fn images(name: &str) -> impl Iterator<Item = &'static [u8]> {
    let sources = EMBEDDED.sources.iter();
    let named = sources.filter(move |source| source.name.starts_with(name));
    named.flat_map(|source| source.images.iter().map(|image| image.0))
}

/// The share of a multiprocessor's memory that shared memory may have, where blocks ask for it at their launch.
const CARVEOUT_PERCENT: i32 = 100;

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) handle: sys::CUfunction,
    /// Local memory of a thread, where spilled registers lie.
    local_bytes: usize,
    /// Dynamic shared memory that a block may ask for.
    shared_bytes_max: u32,
    /// Whether shared memory has the share that it may have.
    has_share: bool,
}

/// Modules of the current context, one a source, and their functions: loaded when first used, unloaded when this is
/// dropped.
pub(super) struct Modules {
    /// The compute capability of the context's GPU, which decides what of a source is loaded.
    capability: (i32, i32),
    modules: RefCell<HashMap<&'static str, sys::CUmodule>>,
    functions: RefCell<HashMap<Kernel, Function>>,
}

impl Modules {
    /// Modules of a GPU of this compute capability.
    pub(super) fn new(capability: (i32, i32)) -> Modules {
        Modules {
            capability,
            modules: RefCell::default(),
            functions: RefCell::default(),
        }
    }

    /// A kernel that may be launched with `shared_bytes` of dynamic shared memory.
    pub(super) fn function(&self, kernel: Kernel, shared_bytes: u32) -> Result<Function> {
        let mut functions = self.functions.borrow_mut();
        let function = match functions.entry(kernel) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => place.insert(self.load(kernel)?),
        };
        function.allow_shared(kernel, shared_bytes)?;
        Ok(*function)
    }

    /// Loads every kernel that there is code of for the GPU, used or not, and lets the driver take the local memory that they need, which
    /// it would take at their first launch. A driver that loads lazily has nothing of a module on the device before its functions are asked for.
    pub(super) fn load_all(&self) -> Result {
        let sources = EMBEDDED.sources.iter();
        for source in sources.filter(|source| source.choose(self.capability).is_some()) {
            for name in source.kernels {
                let source = source.name;
                self.function(Kernel { source, name }, 0)?;
            }
        }
        self.reserve_local_memory()
    }

    /// Lets the driver take local memory for all threads, for the kernel that needs most of it.
    fn reserve_local_memory(&self) -> Result {
        const STACK: sys::CUlimit = sys::CUlimit::CU_LIMIT_STACK_SIZE;
        let functions = self.functions.borrow();
        let most = functions
            .values()
            .map(|function| function.local_bytes)
            .max();
        let Some(most) = most.filter(|bytes| *bytes > 0) else {
            return Ok(());
        };
        let mut limit = 0;
        // SAFETY: writes one number.
        let asked = unsafe { sys::cuCtxGetLimit(&mut limit, STACK) }.result();
        let raise = || {
            // SAFETY: the context is current.
            unsafe { sys::cuCtxSetLimit(STACK, limit.max(most)) }.result()
        };
        asked
            .and_then(|()| raise())
            .map_err(error::of_driver("local memory"))
    }

    fn load(&self, kernel: Kernel) -> Result<Function> {
        let module = self.module(kernel)?;
        let name = CString::new(kernel.name).expect("the name of a kernel holds no zero");
        let refused = error::of_driver(kernel.name);
        // SAFETY: modules are unloaded when `self` is dropped.
        let handle = unsafe { result::module::get_function(module, name) }.map_err(refused)?;
        use sys::CUfunction_attribute as Attribute;
        let ask = |attribute| {
            // SAFETY: the function has just been found.
            let value = unsafe { result::function::get_function_attribute(handle, attribute) };
            value.map(|bytes| bytes.max(0)).map_err(refused)
        };
        Ok(Function {
            handle,
            local_bytes: ask(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)? as usize,
            shared_bytes_max: ask(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?
                as u32,
            has_share: false,
        })
    }

    fn module(&self, kernel: Kernel) -> Result<sys::CUmodule> {
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
        let image = source.choose(self.capability).ok_or_else(|| {
            let message = format!(
                "this binary has no code of `{}.cu` for this GPU: of kernels for 9.0 there is none for others, and KERNELS_TARGETS leaves some out of a build",
                kernel.source
            );
            KernelError::misfit(kernel.name, message)
        })?;
        let module = load(&image.bytes()).map_err(|(error, log)| {
            let mut error = error::of_driver(kernel.name)(error);
            error.message += &format!(" ({}.cu{log})", kernel.source);
            error
        })?;
        modules.insert(kernel.source, module);
        Ok(module)
    }
}

impl Modules {
    /// Leaves all loaded, for the life of the process.
    pub(super) fn stay(&mut self) {
        self.modules.get_mut().clear();
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        for module in self.modules.get_mut().values() {
            // A failure here is one of earlier work, and was told there.
            // SAFETY: loaded by `module`; nothing runs any more, and the functions go with this.
            let _ = unsafe { result::module::unload(*module) };
        }
    }
}

impl Function {
    /// Asks for dynamic shared memory, where that is more than a block has by default, 48 KiB less what is static, and for all
    /// of a multiprocessor's memory that shared memory may have: else the driver may split it so that one block fits where two
    /// would.
    fn allow_shared(&mut self, kernel: Kernel, shared_bytes: u32) -> Result {
        let is_allowed = shared_bytes <= self.shared_bytes_max;
        if shared_bytes == 0 || is_allowed && self.has_share {
            return Ok(());
        }
        use sys::CUfunction_attribute as Attribute;
        let set = |attribute, value| {
            // SAFETY: the function's module is loaded as long as the function is known.
            unsafe { result::function::set_function_attribute(self.handle, attribute, value) }
        };
        let bytes = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let share = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        let more = match is_allowed {
            true => Ok(()),
            false => set(bytes, shared_bytes as i32),
        };
        let allowed = more.and_then(|()| set(share, CARVEOUT_PERCENT));
        allowed.map_err(|error| {
            let message = format!(
                "{shared_bytes} bytes of shared memory are more than a block has on this GPU ({})",
                error::name(error)
            );
            KernelError::too_large(kernel.name, message)
        })?;
        self.shared_bytes_max = self.shared_bytes_max.max(shared_bytes);
        self.has_share = true;
        Ok(())
    }
}

/// Loads machine code or PTX into the current context; on failure, with what the driver's compiler says if it was needed.
fn load(image: &[u8]) -> Result<sys::CUmodule, (DriverError, String)> {
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
    // SAFETY: the image is as the driver takes it, which keeps a copy; both options have their values, and the log lives
    // until the call returns.
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
    use super::{EMBEDDED, carried, ptx, ptx_on_hopper, toolkit_version};
    use crate::cuda::device::driver::ARGUMENTS_MAX;

    /// Counts what PTX lists: a kernel is `.entry name(.param .u64 name_param_0, ...)`.
    #[test]
    fn a_launch_has_room_for_the_arguments_of_every_kernel() {
        let texts: Vec<String> = ptx().chain(ptx_on_hopper()).map(|(_, text)| text).collect();
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
    fn every_source_is_embedded_for_every_kind_of_gpu_and_for_others_or_for_hopper_alone() {
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
        let carried = carried();
        assert_eq!(carried[..4], ["sm_80", "sm_90", "sm_100", "sm_120"]);
        assert_eq!(carried[5..], ["sm_90a"]);
        for source in EMBEDDED.sources {
            let images = source.images.iter().map(|image| image.code().to_string());
            let expected = match source.is_for_hopper_alone {
                true => &carried[1..2],
                false => &carried[..5],
            };
            assert_eq!(images.collect::<Vec<_>>(), expected, "{}", source.name);
            assert!(!source.kernels.is_empty(), "{}", source.name);
        }
        let on_hopper = ptx_on_hopper().find(|(name, _)| *name == "grouped_matmul_sm90");
        assert!(on_hopper.unwrap().1.contains(".target sm_90a"));
        assert!(ptx().all(|(name, text)| text.ends_with('\0') && !name.ends_with("_sm90")));
    }

    /// With the toolkit of `scripts/cuda-toolkit`, drivers of CUDA 12 run all that the binary has: PTX 8.8 is that of
    /// CUDA 12.9.
    #[test]
    fn ptx_is_no_newer_than_its_toolkit() {
        let carried = carried();
        let mut versions = carried
            .iter()
            .filter_map(|name| name.strip_prefix("compute_80 ptx "));
        let version = versions.next().unwrap();
        match toolkit_version() {
            12080 => assert_eq!(version, "8.7"),
            12090 => assert_eq!(version, "8.8"),
            _ => assert!(version.starts_with("9."), "{version}"),
        }
    }
}
