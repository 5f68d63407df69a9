//! What a process takes of a GPU besides its leases.

use memory::{DeviceBytes, format_bytes};
use planner::CUDA_OVERHEAD_BYTES;
use serde::Serialize;

/// Device memory besides this process's blocks, computed from what the driver reports free before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Overhead {
    /// Bytes in use when this process had only a context: the context, and what other processes hold.
    context_bytes: u64,
    /// What modules and cuBLASLt took afterwards, until all products of a step were computed.
    libraries_bytes: u64,
    /// The sum of both.
    overhead_bytes: u64,
    /// What plans assume: `device_overhead_bytes` of `plan.json`.
    planned_overhead_bytes: u64,
    /// Whether other processes hold a part of `context_bytes`, judged by its size.
    shared: bool,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a GPU has one"))]
impl Overhead {
    /// Compares the device's memory with only a context and with everything loaded. Blocks are not counted.
    pub(super) fn new(with_context: DeviceBytes, loaded: DeviceBytes) -> Overhead {
        let (context_bytes, overhead_bytes) = (with_context.beside(), loaded.beside());
        Overhead {
            context_bytes,
            libraries_bytes: overhead_bytes.saturating_sub(context_bytes),
            overhead_bytes,
            planned_overhead_bytes: CUDA_OVERHEAD_BYTES,
            shared: with_context.is_shared(),
        }
    }
}

impl std::fmt::Display for Overhead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = format_bytes;
        let libraries = bytes(self.libraries_bytes);
        let context = bytes(self.context_bytes);
        let planned = bytes(self.planned_overhead_bytes);
        if self.shared {
            return write!(
                f,
                "{libraries} for modules and libraries; {context} for the context and other processes, which hold most \
                 of it (plans count {planned} in all)"
            );
        }
        let verdict = match self.overhead_bytes.cmp(&self.planned_overhead_bytes) {
            std::cmp::Ordering::Greater => "less than that",
            _ => "enough",
        };
        write!(
            f,
            "{}: {context} for the context, {libraries} for modules and libraries; plans count {planned}, which is \
             {verdict}",
            bytes(self.overhead_bytes)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn bytes(used: u64, held: u64) -> DeviceBytes {
        let total = 80 << 30;
        DeviceBytes {
            total,
            free: total - used * MIB,
            held: held * MIB,
            page: 2 * MIB,
        }
    }

    #[test]
    fn blocks_do_not_count_and_plans_are_compared() {
        let overhead = Overhead::new(bytes(450, 0), bytes(2000, 1450));
        assert_eq!(overhead.context_bytes, 450 * MIB);
        assert_eq!(overhead.libraries_bytes, 100 * MIB);
        assert_eq!(overhead.overhead_bytes, 550 * MIB);
        assert!(!overhead.shared);
        let text = overhead.to_string();
        assert!(
            text.starts_with("550 MiB: 450 MiB for the context"),
            "{text}"
        );
        assert!(
            text.ends_with("plans count 640 MiB, which is enough"),
            "{text}"
        );
        let text = Overhead::new(bytes(450, 0), bytes(700, 0)).to_string();
        assert!(text.ends_with("which is less than that"), "{text}");
    }

    #[test]
    fn other_processes_are_not_taken_for_a_context() {
        let overhead = Overhead::new(bytes(30_000, 0), bytes(30_100, 0));
        assert!(overhead.shared);
        let text = overhead.to_string();
        assert!(text.starts_with("100 MiB for modules"), "{text}");
        assert!(text.contains("other processes, which hold most"), "{text}");
    }
}
