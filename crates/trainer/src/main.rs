//! The `trainer` binary.

use clap::Parser;
use std::io::{Write, stderr};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;
use trainer::failure::Failure;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let colour = std::env::var_os("NO_COLOR").is_none()
        && std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colour)
        .with_target(false)
        .without_time()
        .log_internal_errors(false)
        .init();
    let outcome = trainer::carry_out(&trainer::cli::Cli::parse());
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            tell(&failure);
            ExitCode::from(failure.exit_code())
        }
    }
}

/// Says what was wrong, if anyone still reads: the exit code says it too.
fn tell(failure: &Failure) {
    let _ = writeln!(stderr(), "error: {failure}");
    for hint in failure.hints() {
        let _ = writeln!(stderr(), "hint: {hint}");
    }
}
