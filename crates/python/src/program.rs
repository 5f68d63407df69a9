//! The program: the command `trainer` is this module, called with its words.

use pyo3::prelude::*;
use std::ffi::OsString;
use trainer::program;

/// Carries out a command line, whose first word is the program, and returns the exit code. Words that are refused, or ask for help, end the
/// process.
#[pyfunction]
pub(crate) fn main(py: Python, words: Vec<OsString>) -> u8 {
    separate_connections(py);
    py.detach(|| program::run(words))
}

/// Says which words start the program as a command.
#[pyfunction]
pub(crate) fn is_within(words: Vec<String>) {
    program::is_within(words);
}

/// As the program does first, before the driver starts.
pub(crate) fn separate_connections(_py: Python) {
    // SAFETY: Python changes the environment under its lock too, which this thread has; what reads it besides is as safe as beside Python.
    unsafe { program::separate_connections() };
}
