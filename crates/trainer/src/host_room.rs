//! Whether pinned host memory will fit, asked before anything is leased.
//!
//! Pinned memory cannot be swapped, so a host that has too little does not slow down: the system kills the process. That
//! is no out-of-memory error of the device, and looks like none: the limits are compared first.

use crate::control_group::{MemoryLimit, memory_limit};
use crate::failure::Failure;
use crate::memory_size::meminfo_bytes;
use memory::format_bytes;
use std::path::Path;

/// What bounds the host memory of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostRoom {
    group: Option<MemoryLimit>,
    /// Free, or free when asked for; none where the system does not tell.
    available_bytes: Option<u64>,
}

impl HostRoom {
    /// Asks the system.
    pub(crate) fn ask() -> HostRoom {
        HostRoom {
            group: memory_limit(Path::new("/")),
            available_bytes: meminfo_bytes("MemAvailable:"),
        }
    }

    /// Refuses a run that needs `pinned_bytes` of host memory that are not there.
    ///
    /// # Errors
    /// [`Failure::HostMemory`].
    pub(crate) fn check(&self, pinned_bytes: u64) -> Result<(), Failure> {
        let group = self.group.as_ref().map(|group| {
            let limit = format!(
                "its control group's limit of {} leaves {} ({})",
                format_bytes(group.limit_bytes),
                format_bytes(group.left_bytes()),
                group.file.display()
            );
            let raise = "raise it: in a container with docker run --memory, under Slurm with --mem, in Kubernetes with \
                         resources.limits.memory";
            (group.left_bytes(), limit, raise)
        });
        let free = self.available_bytes.map(|bytes| {
            let limit = format!("the machine has {} free", format_bytes(bytes));
            (
                bytes,
                limit,
                "end what else runs here, or take a machine with more",
            )
        });
        let tightest = group.into_iter().chain(free).min_by_key(|(left, ..)| *left);
        match tightest {
            Some((left_bytes, limit, raise)) if left_bytes < pinned_bytes => {
                Err(Failure::HostMemory {
                    needed_bytes: pinned_bytes,
                    limit,
                    raise,
                })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn refusal(room: &HostRoom, needed: u64) -> String {
        let failure = room.check(needed).unwrap_err();
        assert_eq!(failure.exit_code(), 3);
        format!("{failure}; {}", failure.hints().join("; "))
    }

    #[test]
    fn the_tightest_limit_is_named_with_the_way_to_raise_it() {
        let room = HostRoom {
            group: Some(MemoryLimit {
                limit_bytes: 64 * GIB,
                used_bytes: 4 * GIB,
                file: "/sys/fs/cgroup/memory.max".into(),
            }),
            available_bytes: Some(100 * GIB),
        };
        room.check(60 * GIB).unwrap();
        let refused = refusal(&room, 60 * GIB + 1);
        for words in [
            "64.0 GiB",
            "60.0 GiB",
            "memory.max",
            "docker run --memory",
            "host memory",
            "not the device",
        ] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
        let room = HostRoom {
            available_bytes: Some(10 * GIB),
            ..room
        };
        let refused = refusal(&room, 11 * GIB);
        assert!(
            refused.contains("has 10.0 GiB free") && !refused.contains("docker"),
            "{refused}"
        );
    }

    #[test]
    fn a_system_that_tells_nothing_refuses_nothing() {
        let room = HostRoom {
            group: None,
            available_bytes: None,
        };
        room.check(u64::MAX).unwrap();
    }
}
