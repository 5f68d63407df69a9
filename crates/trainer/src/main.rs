//! The `trainer` binary.

use std::process::ExitCode;
use trainer::program;

fn main() -> ExitCode {
    // SAFETY: this runs first, before any thread has been started.
    unsafe { program::separate_connections() };
    ExitCode::from(program::run(std::env::args_os().collect()))
}
