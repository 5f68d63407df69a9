//! Finds and loads the compiler, and compiles a program.

use crate::{Error, Source};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

/// `nvrtcProgram`.
type Handle = *mut std::ffi::c_void;

/// `nvrtcResult`; 0 is success.
type Answer = c_int;

type Size = unsafe extern "C" fn(Handle, *mut usize) -> Answer;
type Get = unsafe extern "C" fn(Handle, *mut c_char) -> Answer;

/// The first version that compiles for Blackwell, so the oldest that can compile for all targets.
const VERSION_MIN: u32 = 12080;

/// Where toolkits keep libraries: NVIDIA's installer, its packages on PyPI.
const LIBRARY_FOLDERS: [&str; 3] = ["lib64", "lib", "targets/x86_64-linux/lib"];

/// Targets on which no kernel may spill registers.
const FITTED: [&str; 3] = ["sm_80", "sm_90", "sm_90a"];

/// How the name of the library with the device's functions begins; it ends in the toolkit's version.
const BUILTINS: &str = "libnvrtc-builtins.so.";

/// Headers of the C library that sources include, since the compiler has none.
const HEADERS: [(&CStr, &str); 4] = [
    (c"float.h", include_str!("../headers/float.h")),
    (c"math.h", include_str!("../headers/math.h")),
    (c"stddef.h", include_str!("../headers/stddef.h")),
    (c"stdint.h", include_str!("../headers/stdint.h")),
];

/// NVRTC, loaded. Threads may compile at the same time.
pub struct Nvrtc {
    version: u32,
    headers: PathBuf,
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Answer,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Answer,
    destroy: unsafe extern "C" fn(*mut Handle) -> Answer,
    log: (Size, Get),
    machine_code: (Size, Get),
    ptx: (Size, Get),
    // The functions above are this library's, so it must live as long as they do.
    _libraries: [Library; 2],
}

/// The result of compiling a source.
pub struct Compiled {
    /// An ELF file for the target.
    pub machine_code: Vec<u8>,
    /// The PTX that the machine code was made from, with the zero that ends it.
    pub ptx: Vec<u8>,
    /// Warnings of the compiler, including spilled registers and local memory; empty if there are none.
    pub warnings: String,
    /// Spilled registers and local memory on other targets, where they are allowed: slower, but no mistake.
    pub notes: String,
}

impl Nvrtc {
    /// Loads the compiler of a toolkit: the folder that `CUDA_HOME` names.
    ///
    /// # Errors
    /// [`Error::NoToolkit`] if there is none, or it is older than CUDA 12.8; [`Error::Library`] if it does not load.
    pub fn load(toolkit: Option<&Path>) -> Result<Nvrtc, Error> {
        let toolkit = toolkit.ok_or_else(|| Error::NoToolkit("CUDA_HOME is not set".into()))?;
        let missing =
            |what: &str| Error::NoToolkit(format!("{what} in CUDA_HOME={}", toolkit.display()));
        let (builtins, version) = LIBRARY_FOLDERS
            .iter()
            .find_map(|folder| find_builtins(&toolkit.join(folder)))
            .ok_or_else(|| missing("there is no NVRTC"))?;
        if version < VERSION_MIN {
            return Err(missing("NVRTC is older than CUDA 12.8"));
        }
        let compiler = builtins.with_file_name(format!("libnvrtc.so.{}", version / 1000));
        // SAFETY: the toolkit's own libraries, which do nothing when they are loaded. NVRTC loads the first by its bare
        // name, and so gets the one that is already loaded.
        let [builtins, library] = unsafe { [Library::new(&builtins)?, Library::new(&compiler)?] };
        // SAFETY: the functions have these types in nvrtc.h of CUDA 12 and 13.
        unsafe {
            Ok(Nvrtc {
                version,
                headers: toolkit.join("include"),
                create: *library.get(b"nvrtcCreateProgram\0")?,
                compile: *library.get(b"nvrtcCompileProgram\0")?,
                destroy: *library.get(b"nvrtcDestroyProgram\0")?,
                log: (
                    *library.get(b"nvrtcGetProgramLogSize\0")?,
                    *library.get(b"nvrtcGetProgramLog\0")?,
                ),
                machine_code: (
                    *library.get(b"nvrtcGetCUBINSize\0")?,
                    *library.get(b"nvrtcGetCUBIN\0")?,
                ),
                ptx: (
                    *library.get(b"nvrtcGetPTXSize\0")?,
                    *library.get(b"nvrtcGetPTX\0")?,
                ),
                _libraries: [library, builtins],
            })
        }
    }

    /// The toolkit's version as drivers count, 12090 for 12.9.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Compiles a source to machine code for a target, such as `sm_90`.
    ///
    /// # Errors
    /// [`Error::Source`] with what the compiler says, if it refuses.
    pub fn compile(&self, source: &Source, target: &str) -> Result<Compiled, Error> {
        let more = [
            "--ptxas-options=--warn-on-spills",
            "--ptxas-options=--warn-on-local-memory-usage",
        ];
        let (program, said) = self.program(source, target, &more)?;
        let [warnings, notes] = sort_out(&said, FITTED.contains(&target));
        Ok(Compiled {
            machine_code: program.get(self.machine_code),
            ptx: program.get(self.ptx),
            warnings,
            notes,
        })
    }

    /// The PTX of a source for a target, with the file and line of each instruction: the same instructions as without.
    ///
    /// # Errors
    /// As [`Nvrtc::compile`].
    pub fn ptx_with_lines(&self, source: &Source, target: &str) -> Result<String, Error> {
        // A virtual architecture: no machine code is made.
        let target = target.replace("sm_", "compute_");
        let (program, _) = self.program(source, &target, &["--generate-line-info"])?;
        let ptx = String::from_utf8_lossy(&program.get(self.ptx)).into_owned();
        Ok(ptx.trim_end_matches('\0').into())
    }

    /// A compiled program, and what the compiler said.
    fn program(
        &self,
        source: &Source,
        target: &str,
        more: &[&str],
    ) -> Result<(Program<'_>, String), Error> {
        let program = Program::new(self, source);
        let folder = source.path.parent().unwrap_or(Path::new("."));
        let options = [
            format!("--gpu-architecture={target}"),
            "--std=c++17".into(),
            // Functions without `__host__` or `__device__` are the device's, since there is no host code.
            "--device-as-default-execution-space".into(),
            format!("--include-path={}", folder.display()),
            format!("--include-path={}", self.headers.display()),
        ];
        let more = more.iter().map(|option| (*option).into());
        let options: Vec<CString> = options.into_iter().chain(more).map(text).collect();
        let is_compiled = program.compile(&options);
        let said = program.get(self.log);
        // A zero ends the text, and another ends the assembler's messages, if there are any.
        let said = String::from_utf8_lossy(&said).replace('\0', "");
        let said = said.trim().to_string();
        match is_compiled {
            true => Ok((program, said)),
            false => Err(Error::Source {
                path: source.path.clone(),
                target: target.into(),
                said,
            }),
        }
    }
}

/// Splits messages into warnings and notes: where spilling is allowed, messages on spilled registers and local memory
/// are notes.
fn sort_out(said: &str, is_fitted: bool) -> [String; 2] {
    let is_of_registers = |line: &&str| {
        let is_said = |words| line.contains(words);
        line.starts_with("ptxas warning") && (is_said("spilled") || is_said("Local memory"))
    };
    let lines = said.lines().filter(|line| !line.trim().is_empty());
    let (notes, warnings) = lines.partition(|line| !is_fitted && is_of_registers(line));
    [warnings, notes].map(|lines: Vec<&str>| lines.join("\n"))
}

/// The library of the device's functions in a folder, and the version in its name.
fn find_builtins(folder: &Path) -> Option<(PathBuf, u32)> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let (major, minor) = name.strip_prefix(BUILTINS)?.split_once('.')?;
        let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
        Some((entry.path(), major * 1000 + minor * 10))
    })
}

/// A C string.
fn text(text: impl Into<Vec<u8>>) -> CString {
    CString::new(text).expect("sources, paths and options hold no zero")
}

/// A program of the compiler, destroyed when it is dropped.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

impl<'a> Program<'a> {
    fn new(nvrtc: &'a Nvrtc, source: &Source) -> Program<'a> {
        let (code, name) = (text(source.text.as_str()), source.path.display());
        let name = text(name.to_string());
        let headers = HEADERS.map(|(_, header)| text(header));
        let headers = headers.each_ref().map(|header| header.as_ptr());
        let names = HEADERS.map(|(name, _)| name.as_ptr());
        let (count, headers, names) = (HEADERS.len() as c_int, headers.as_ptr(), names.as_ptr());
        let mut handle = null_mut();
        let (code, name) = (code.as_ptr(), name.as_ptr());
        // SAFETY: texts end in a zero and live until the call returns, which copies them.
        let created = unsafe { (nvrtc.create)(&mut handle, code, name, count, headers, names) };
        assert_eq!(created, 0, "NVRTC makes a program of any text");
        Program { nvrtc, handle }
    }

    /// Whether it compiled; the log says why not.
    fn compile(&self, options: &[CString]) -> bool {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive; the options live until the call returns.
        unsafe { (self.nvrtc.compile)(self.handle, options.len() as c_int, options.as_ptr()) == 0 }
    }

    /// One of the program's outputs, by a function that gives its size and one that copies it; empty if there is none.
    fn get(&self, (size, get): (Size, Get)) -> Vec<u8> {
        let mut bytes = 0;
        // SAFETY: the program is alive; writes one number.
        if unsafe { size(self.handle, &mut bytes) } != 0 {
            return Vec::new();
        }
        let mut out = vec![0u8; bytes];
        // SAFETY: as above; there is room for as many bytes as it said.
        let got = unsafe { get(self.handle, out.as_mut_ptr().cast()) };
        assert_eq!(got, 0, "NVRTC gives what it told the size of");
        out
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: created in `new`, and destroyed here alone.
        unsafe { (self.nvrtc.destroy)(&mut self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::sort_out;

    #[test]
    fn what_is_slow_where_no_kernel_is_fitted_is_told_apart_from_what_is_wrong() {
        let wrong =
            "x.cu(1): warning #177-D: variable \"spilled\" was declared but never referenced";
        let slow = "ptxas warning : Local memory used for function 'f', size of stack frame: 8 bytes\n\
                    ptxas warning : Registers are spilled to local memory in function 'f', 8 bytes spill stores";
        let said = format!("{wrong}\n\n{slow}\n \n");
        assert_eq!(sort_out(&said, false), [wrong, slow]);
        assert_eq!(
            sort_out(&said, true),
            [format!("{wrong}\n{slow}"), String::new()]
        );
        assert_eq!(sort_out(" \n\n", true), ["", ""]);
    }
}
