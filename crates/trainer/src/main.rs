//! The `trainer` binary.

use collectives::Launch;
use std::process::ExitCode;
use trainer::{cli::Cli, log};

fn main() -> ExitCode {
    // SAFETY: this runs first, before any thread has been started.
    #[cfg(feature = "cuda")]
    unsafe {
        kernels::cuda::separate_connections()
    };
    // If the launcher's variables make no sense, the command that needs them reports it.
    let launch = Launch::from_environment().ok().flatten();
    log::begin(launch.map(|launch| launch.rank));
    match trainer::carry_out(&Cli::from_command_line()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ended) => ended.tell_and_leave(),
    }
}
