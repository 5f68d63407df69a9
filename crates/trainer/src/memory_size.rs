//! How much memory the device has, for limits in percent.

use crate::failure::Failure;

/// Bytes of memory that the CPU device may use: the machine's, or the control group's limit where that is lower.
pub(crate) fn host_bytes() -> Result<u64, Failure> {
    let unknown = || {
        Failure::Usage(
            "this system does not tell its memory size; give --memory-limit in bytes".into(),
        )
    };
    let text = std::fs::read_to_string("/proc/meminfo").map_err(|_| unknown())?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .ok_or_else(unknown)?;
    let kib: u64 = line
        .split_whitespace()
        .next()
        .and_then(|kib| kib.parse().ok())
        .ok_or_else(unknown)?;
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max")
        .ok()
        .and_then(|text| text.trim().parse().ok());
    Ok((kib * 1024).min(group.unwrap_or(u64::MAX)))
}
