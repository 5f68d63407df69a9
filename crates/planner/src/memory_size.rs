//! The machine's memory, and how much of it a process may use.

/// Bytes of memory that the CPU device may use: the machine's, or the control group's limit if that is lower. None if
/// the system does not report it.
pub fn host_bytes() -> Option<u64> {
    let machine = meminfo_bytes("MemTotal:")?;
    Some(machine.min(group_limit_bytes().unwrap_or(u64::MAX)))
}

/// A figure of the machine's memory, such as `MemTotal:`.
pub fn meminfo_bytes(figure: &str) -> Option<u64> {
    figure_bytes("/proc/meminfo", figure)
}

/// A figure that one of the system's files gives in KiB.
fn figure_bytes(file: &str, figure: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(figure))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// The control group's limit, if it has one.
pub fn group_limit_bytes() -> Option<u64> {
    let limit = crate::control_group::memory_limit(std::path::Path::new("/"));
    limit.map(|limit| limit.limit_bytes)
}

/// The most memory that a process may lock, if there is a limit.
pub fn locked_limit_bytes() -> Option<u64> {
    own_limit_bytes("Max locked memory")
}

/// The limit on this process's address space (`ulimit -v`), if there is one, and how much is in use.
pub(crate) fn address_space() -> Option<(u64, u64)> {
    let limit = own_limit_bytes("Max address space")?;
    Some((limit, figure_bytes("/proc/self/status", "VmSize:")?))
}

fn own_limit_bytes(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}
