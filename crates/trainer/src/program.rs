//! The program: carried out as a command, and started again for work in a process of its own.

use crate::command;
use std::ffi::OsString;
use std::panic::resume_unwind;
use std::process::Command;
use std::sync::OnceLock;
use std::thread;

/// The stack of a thread that does the work. That of the process's first thread is as large as its starter allows
/// (`ulimit -s`), which may be too little.
pub const STACK_BYTES: usize = 16 << 20;

/// This program, even if its file has been replaced since it was started.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// The words that start the program, where it is part of another one, such as Python's interpreter.
static WITHIN: OnceLock<Vec<String>> = OnceLock::new();

/// Carries out the words of a command line as [`command`] does, on a thread with a stack that is large enough.
pub fn run(words: Vec<OsString>) -> u8 {
    let with_stack = thread::Builder::new()
        .name("main".into())
        .stack_size(STACK_BYTES);
    let own = words.clone();
    match with_stack.spawn(move || command(own.into_iter())) {
        Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
        // No further thread is allowed; the work needs none.
        Err(_) => command(words.into_iter()),
    }
}

/// Gives every stream of a GPU its own connection, unless the environment sets their number or the driver has started. Without CUDA it does
/// nothing.
///
/// # Safety
/// No other thread of this process uses the environment.
pub unsafe fn separate_connections() {
    // SAFETY: the caller's promise.
    #[cfg(feature = "cuda")]
    unsafe {
        kernels::cuda::separate_connections()
    };
}

/// Says that the program is part of another one, and that `words` start it as a command.
pub fn is_within(words: Vec<String>) {
    // A process imports the library once.
    let _ = WITHIN.set(words);
}

/// A command that starts the program again, without arguments.
pub(crate) fn again() -> Command {
    let Some(words) = WITHIN.get() else {
        return Command::new(THIS_PROGRAM);
    };
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// The file with the program's code.
#[cfg(feature = "cuda")]
pub(crate) fn image() -> std::io::Result<std::path::PathBuf> {
    use std::ffi::{CStr, OsStr};
    use std::os::unix::ffi::OsStrExt;

    if WITHIN.get().is_none() {
        return std::env::current_exe();
    }
    // SAFETY: zeros are a value of it.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `found` outlives the call.
    let is_found = unsafe { libc::dladdr(run as *const libc::c_void, &mut found) } != 0;
    if !is_found || found.dli_fname.is_null() {
        return Err(std::io::Error::other(
            "the linker knows no file of this code",
        ));
    }
    // SAFETY: the linker's name of a library that is loaded.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    Ok(OsStr::from_bytes(name.to_bytes()).into())
}
