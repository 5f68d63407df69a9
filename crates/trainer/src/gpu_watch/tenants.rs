//! Who holds a GPU's memory at one moment.

use planner::OtherProcess;

/// The processes on a GPU.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tenants {
    /// All processes except this one, those that hold most first.
    pub(super) others: Vec<OtherProcess>,
    /// Whether NVML shows this process too.
    pub(super) shows_this_process: bool,
    /// Memory in use, less what all processes hold; none if one of these is not known.
    pub(super) unowned_bytes: Option<u64>,
}

impl Tenants {
    /// From the memory in use, and the processes with what they hold, as far as these are known.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn new(
        used_bytes: Option<u64>,
        processes: Option<Vec<OtherProcess>>,
        this_pid: u32,
    ) -> Tenants {
        let owned_bytes = processes
            .as_ref()
            .and_then(|all| all.iter().map(|one| one.bytes).sum::<Option<u64>>());
        let mut others = processes.unwrap_or_default();
        let all = others.len();
        others.retain(|process| process.pid != this_pid);
        others.sort_by_key(|process| std::cmp::Reverse(process.bytes));
        Tenants {
            shows_this_process: others.len() < all,
            others,
            unowned_bytes: used_bytes
                .zip(owned_bytes)
                .map(|(used, owned)| used.saturating_sub(owned)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, bytes: Option<u64>) -> OtherProcess {
        OtherProcess {
            pid,
            name: "python".into(),
            bytes,
        }
    }

    #[test]
    fn what_no_process_owns_is_what_is_left() {
        let processes = vec![
            process(1, Some(10)),
            process(2, Some(20)),
            process(7, Some(5)),
        ];
        let tenants = Tenants::new(Some(100), Some(processes), 7);
        let pids: Vec<u32> = tenants.others.iter().map(|process| process.pid).collect();
        assert_eq!((pids, tenants.unowned_bytes), (vec![2, 1], Some(65)));
        assert!(tenants.shows_this_process);
    }

    #[test]
    fn nothing_is_guessed() {
        let unknown = vec![process(1, None), process(2, Some(20))];
        let tenants = Tenants::new(Some(100), Some(unknown), 7);
        assert_eq!((tenants.others[0].pid, tenants.unowned_bytes), (2, None));
        assert!(!tenants.shows_this_process);
        assert_eq!(Tenants::new(Some(100), None, 7).unowned_bytes, None);
        assert_eq!(Tenants::new(None, Some(Vec::new()), 7).unowned_bytes, None);
        // A process may end between two queries.
        let more = Tenants::new(Some(10), Some(vec![process(1, Some(20))]), 7);
        assert_eq!(more.unowned_bytes, Some(0));
    }
}
