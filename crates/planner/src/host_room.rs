//! Checks whether host memory is sufficient before anything is leased.
//!
//! The system does not refuse memory on a full host: it kills the process, and the user sees no out-of-memory error.
//! Pinned memory cannot even be swapped. So the limits are compared before the run.

use crate::control_group::{MemoryLimit, memory_limit};
use crate::memory_size::{address_space, meminfo_bytes};
use memory::format_bytes;
use std::fmt::{self, Display, Formatter};
use std::path::Path;

/// Hint for too little pinned host memory.
pub(crate) const OFFLOAD_LESS: &str = "offload less: a lower offload.fraction, fewer labels in --offload-activations, or --state-dtype 8bit; \
                                        or keep optimizer states on a disk, with --offload-optimizer DIR; \
                                        --save-blocking needs no copy of the state for checkpoints";

/// Hint for too little memory on the CPU device.
const NEED_LESS: &str = "need less: --recompute full, a smaller --micro-batch, --state-dtype 8bit or a shorter --seq; \
                         `trainer plan --device cpu` with the same settings says what each saves";

/// Host memory is not sufficient.
#[derive(Debug, thiserror::Error)]
#[error("this run needs {need}, but {limit}{}", need.beside_the_device())]
pub struct NoHostRoom {
    /// What the run needs.
    pub need: HostNeed,
    /// The limit that is exceeded, and how much it leaves.
    pub limit: String,
    /// How to raise it.
    pub raise: &'static str,
}

impl NoHostRoom {
    /// What the user can do.
    pub fn hints(&self) -> Vec<String> {
        vec![self.raise.into(), self.need.hint().into()]
    }
}

/// The limits on this process's host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRoom {
    group: Option<MemoryLimit>,
    /// Memory that is free, or that the system can free; none if the system does not report it.
    available_bytes: Option<u64>,
    /// Free swap space, for memory that is not pinned.
    swap_bytes: u64,
    /// The limit on the process's address space, and how much of it is in use.
    address_space: Option<(u64, u64)>,
}

/// Host memory that a run needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostNeed {
    /// Pinned memory, besides a device's own memory.
    Pinned(u64),
    /// All that a run on the CPU device leases.
    Everything(u64),
}

impl HostNeed {
    /// A clause for readers who think of the device's memory.
    fn beside_the_device(&self) -> &'static str {
        match self {
            HostNeed::Pinned(_) => "; that is host memory, not the device's",
            HostNeed::Everything(_) => "",
        }
    }

    /// How to need less.
    fn hint(&self) -> &'static str {
        match self {
            HostNeed::Pinned(_) => OFFLOAD_LESS,
            HostNeed::Everything(_) => NEED_LESS,
        }
    }
}

impl Display for HostNeed {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            HostNeed::Pinned(bytes) => write!(f, "{} of pinned host memory", format_bytes(*bytes)),
            HostNeed::Everything(bytes) => {
                write!(f, "{} of memory on the CPU device", format_bytes(*bytes))
            }
        }
    }
}

impl HostRoom {
    /// Reads the limits from the system.
    pub fn ask() -> HostRoom {
        HostRoom {
            group: memory_limit(Path::new("/")),
            available_bytes: meminfo_bytes("MemAvailable:"),
            swap_bytes: meminfo_bytes("SwapFree:").unwrap_or(0),
            address_space: address_space(),
        }
    }

    /// Refuses a run that needs more host memory than there is.
    ///
    /// # Errors
    /// [`NoHostRoom`].
    pub fn check(&self, need: HostNeed) -> Result<(), NoHostRoom> {
        let (HostNeed::Pinned(needed_bytes) | HostNeed::Everything(needed_bytes)) = need;
        match self.tightest(need) {
            Some((left_bytes, limit, raise)) if left_bytes < needed_bytes => {
                Err(NoHostRoom { need, limit, raise })
            }
            _ => Ok(()),
        }
    }

    /// Bytes that this process may still take, without a device.
    pub fn left_bytes(&self) -> u64 {
        let tightest = self.tightest(HostNeed::Everything(0));
        tightest.map_or(u64::MAX, |(left_bytes, ..)| left_bytes)
    }

    /// What the tightest limit leaves, its description, and how to raise it.
    fn tightest(&self, need: HostNeed) -> Option<(u64, String, &'static str)> {
        let swap_bytes = match need {
            HostNeed::Pinned(_) => 0,
            HostNeed::Everything(_) => self.swap_bytes,
        };
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
            let mut limit = format!("the machine has {} free", format_bytes(bytes));
            if swap_bytes > 0 {
                limit += &format!(" and {} to swap to", format_bytes(swap_bytes));
            }
            (
                bytes + swap_bytes,
                limit,
                "end what else runs here, or take a machine with more",
            )
        });
        // A GPU's driver reserves address space that it does not use, so this limit counts on the CPU device alone.
        let own = self
            .address_space
            .filter(|_| matches!(need, HostNeed::Everything(_)));
        let own = own.map(|(limit_bytes, used_bytes)| {
            let left_bytes = limit_bytes.saturating_sub(used_bytes);
            let limit = format!(
                "the limit of {} on its address space leaves {}",
                format_bytes(limit_bytes),
                format_bytes(left_bytes)
            );
            (left_bytes, limit, "raise it with ulimit -v")
        });
        let limits = group.into_iter().chain(free).chain(own);
        limits.min_by_key(|(left, ..)| *left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn refusal(room: &HostRoom, need: HostNeed) -> String {
        let refused = room.check(need).unwrap_err();
        format!("{refused}; {}", refused.hints().join("; "))
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
            swap_bytes: 0,
            address_space: None,
        };
        room.check(HostNeed::Pinned(60 * GIB)).unwrap();
        let refused = refusal(&room, HostNeed::Pinned(60 * GIB + 1));
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
        let refused = refusal(&room, HostNeed::Pinned(11 * GIB));
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
            swap_bytes: 0,
            address_space: None,
        };
        room.check(HostNeed::Pinned(u64::MAX)).unwrap();
        room.check(HostNeed::Everything(u64::MAX)).unwrap();
    }

    /// On the CPU device all memory is the host's, and memory that is not pinned can be swapped.
    #[test]
    fn a_run_on_the_processor_that_the_host_has_no_room_for_is_refused() {
        let room = HostRoom {
            group: None,
            available_bytes: Some(10 * GIB),
            swap_bytes: 0,
            address_space: None,
        };
        room.check(HostNeed::Everything(10 * GIB)).unwrap();
        let refused = refusal(&room, HostNeed::Everything(11 * GIB));
        for words in [
            "needs 11.0 GiB of memory on the CPU device",
            "the machine has 10.0 GiB free; ",
            "end what else runs here",
            "--recompute full",
        ] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
        assert!(!refused.contains("pinned"), "{refused}");
        let room = HostRoom {
            swap_bytes: GIB,
            ..room
        };
        room.check(HostNeed::Everything(11 * GIB)).unwrap();
        let refused = refusal(&room, HostNeed::Everything(12 * GIB));
        assert!(
            refused.contains("10.0 GiB free and 1.00 GiB to swap to"),
            "{refused}"
        );
        refusal(&room, HostNeed::Pinned(11 * GIB));
    }

    #[test]
    fn a_group_bounds_a_run_on_the_processor() {
        let room = HostRoom {
            group: Some(MemoryLimit {
                limit_bytes: 4 * GIB,
                used_bytes: GIB,
                file: "/sys/fs/cgroup/memory.max".into(),
            }),
            available_bytes: Some(100 * GIB),
            swap_bytes: GIB,
            address_space: None,
        };
        room.check(HostNeed::Everything(3 * GIB)).unwrap();
        let refused = refusal(&room, HostNeed::Everything(3 * GIB + 1));
        for words in ["limit of 4.00 GiB leaves 3.00 GiB", "docker run --memory"] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
    }

    /// Threads and libraries use address space too, so only the rest counts.
    #[test]
    fn the_limit_on_the_address_space_bounds_a_run_on_the_processor() {
        let room = HostRoom {
            group: None,
            available_bytes: Some(100 * GIB),
            swap_bytes: 0,
            address_space: Some((4 * GIB, GIB)),
        };
        room.check(HostNeed::Everything(3 * GIB)).unwrap();
        room.check(HostNeed::Pinned(10 * GIB)).unwrap();
        let refused = refusal(&room, HostNeed::Everything(3 * GIB + 1));
        for words in [
            "limit of 4.00 GiB on its address space leaves 3.00 GiB",
            "ulimit -v",
        ] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
    }
}
