//! The `trainer` binary.

use clap::Parser;
use collectives::Launch;
use std::process::ExitCode;
use trainer::{cli::Cli, log};

fn main() -> ExitCode {
    // A launcher whose word makes no sense is told of by the command that needs it.
    let launch = Launch::from_environment().ok().flatten();
    log::begin(launch.map(|launch| launch.rank));
    match trainer::carry_out(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ended) => ended.tell_and_leave(),
    }
}
