//! The program of this process, for work that starts it again in a process of its own.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// This program, even if its file has been replaced since it was started.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Where the program is part of another one, such as Python's interpreter.
static WITHIN: OnceLock<Within> = OnceLock::new();

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
struct Within {
    image: PathBuf,
    words: Vec<String>,
}

/// Says that the program is the library in the file `image`, within another program; `words` start it as a command.
pub fn is_within(image: PathBuf, words: Vec<String>) {
    // A process imports the library once.
    let _ = WITHIN.set(Within { image, words });
}

/// A command that starts the program again, without arguments.
pub(crate) fn again() -> Command {
    let Some(Within { words, .. }) = WITHIN.get() else {
        return Command::new(THIS_PROGRAM);
    };
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// The file with the program's code.
#[cfg(feature = "cuda")]
pub(crate) fn image() -> std::io::Result<PathBuf> {
    match WITHIN.get() {
        Some(within) => Ok(within.image.clone()),
        None => std::env::current_exe(),
    }
}
