//! Standard output, which carries only the data of a command.

use crate::failure::{Failure, Result};
use serde::Serialize;
use std::fmt::Display;
use std::io::{ErrorKind, Write, stdout};

/// Prints; a failure ends the command. A reader that stopped early (`| head`) is not a failure.
pub(crate) fn print(text: impl Display) -> Result {
    let mut out = stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::file("standard output")(error))
        }
        _ => Ok(()),
    }
}

/// Prints a value as JSON, for programs.
///
/// # Errors
/// As [`print`].
pub(crate) fn print_json(value: &impl Serialize) -> Result {
    let json = serde_json::to_string_pretty(value);
    let json = json.map_err(|error| Failure::Usage(error.to_string()))?;
    print(format_args!("{json}\n"))
}
