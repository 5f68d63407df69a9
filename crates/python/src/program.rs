//! The program: the command `trainer` is this module, called with its words.

use pyo3::prelude::*;
use std::ffi::OsString;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::thread;

/// The stack of the thread that does the work: as large as the program's own.
const STACK_BYTES: usize = 16 << 20;

/// Carries out a command line, whose first word is the program, and returns the exit code. Words that are refused, or ask for help, end the
/// process.
#[pyfunction]
pub(crate) fn main(py: Python, words: Vec<OsString>) -> u8 {
    py.detach(|| {
        let work = thread::Builder::new()
            .name("main".into())
            .stack_size(STACK_BYTES);
        match work.spawn(move || trainer::command(words.into_iter())) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(error) => panic!("the program needs a thread: {error}"),
        }
    })
}

/// Says where this module is, and which words start the program as a command.
#[pyfunction]
pub(crate) fn is_within(image: PathBuf, words: Vec<String>) {
    trainer::program::is_within(image, words);
}
