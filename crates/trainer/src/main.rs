//! The `trainer` binary.

use collectives::Launch;
use std::panic::resume_unwind;
use std::process::ExitCode;
use std::thread;
use trainer::{cli::Cli, log};

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
    // If the launcher's variables make no sense, the command that needs them reports it.
    let launch = Launch::from_environment().ok().flatten();
    log::begin(launch.map(|launch| launch.rank));
    match trainer::carry_out(&Cli::from_command_line()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ended) => ended.tell_and_leave(),
    }
}
