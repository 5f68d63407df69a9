//! Describes other processes that hold memory of a GPU.

use memory::format_bytes;
use serde::{Deserialize, Serialize};

/// Smaller amounts are not reported: desktops and the driver itself hold some.
pub const NOTABLE_BYTES: u64 = 64 << 20;

/// Another process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherProcess {
    /// Its number.
    pub pid: u32,
    /// Its program.
    pub name: String,
    /// What it holds; none if the driver does not report it.
    pub bytes: Option<u64>,
}

impl OtherProcess {
    /// The process and what it holds, in words.
    pub fn describe(&self) -> String {
        let holds = match self.bytes {
            Some(bytes) => format!("which holds {}", format_bytes(bytes)),
            None => "and what it holds the driver does not tell".into(),
        };
        format!("`{}` (pid {}), {holds}", self.name, self.pid)
    }
}

/// Explains used memory that no process owns.
pub fn unowned(bytes: u64) -> String {
    format!(
        "{} of the GPU's memory is in use by no process that can be seen: a process that crashed has left it, or it is \
         another MIG instance's, or that of a process outside this container",
        format_bytes(bytes)
    )
}
