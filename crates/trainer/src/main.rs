//! The `trainer` binary.

use std::panic::resume_unwind;
use std::process::ExitCode;
use std::thread;

/// The stack of the thread that does the work. That of the process's first thread is as large as its starter allows
/// (`ulimit -s`), which may be too little.
const STACK_BYTES: usize = 16 << 20;

fn main() -> ExitCode {
    // SAFETY: this runs first, before any thread has been started.
    #[cfg(feature = "cuda")]
    unsafe {
        kernels::cuda::separate_connections()
    };
    let with_stack = thread::Builder::new()
        .name("main".into())
        .stack_size(STACK_BYTES)
        .spawn(work);
    match with_stack {
        Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
        // No further thread is allowed; the work needs none.
        Err(_) => work(),
    }
}

fn work() -> ExitCode {
    ExitCode::from(trainer::command(std::env::args_os()))
}
