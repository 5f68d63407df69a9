//! Host memory on the node of the machine that is closest to a GPU.
//!
//! Copies from the other socket's memory pass between the sockets first, at a fraction of the speed.

/// Prefers a node for the pages that this thread allocates, until it is dropped.
pub(super) struct Preference(());

/// Policies as `linux/mempolicy.h` numbers them.
const MPOL_DEFAULT: libc::c_int = 0;
const MPOL_PREFERRED: libc::c_int = 1;

impl Preference {
    /// Prefers a node. None, and pages lie where they would anyway, if the machine has no nodes (the driver says -1),
    /// if somebody chose a policy for this process (`numactl`), or if the system refuses.
    pub(super) fn new(node: i32) -> Option<Preference> {
        if policy()? != MPOL_DEFAULT {
            return None;
        }
        let bit = u32::try_from(node).ok().filter(|node| *node < u64::BITS)?;
        let nodes = 1u64 << bit;
        // The kernel reads one bit less than it is told.
        let bits = libc::c_ulong::from(u64::BITS) + 1;
        // SAFETY: reads one word of nodes; changes where later pages of this thread lie, and nothing else.
        let refused =
            unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, &nodes, bits) };
        (refused == 0).then_some(Preference(()))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        let no_nodes = std::ptr::null::<u64>();
        // SAFETY: as in `new`; the default policy, which it was before, has no nodes.
        unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_DEFAULT, no_nodes, 0) };
    }
}

/// This thread's policy; none where the system does not tell.
fn policy() -> Option<libc::c_int> {
    let mut policy = -1;
    let nothing = std::ptr::null::<u64>();
    // SAFETY: writes one number.
    let refused =
        unsafe { libc::syscall(libc::SYS_get_mempolicy, &mut policy, nothing, 0, nothing, 0) };
    (refused == 0).then_some(policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Containers may forbid the calls; then there is no preference, and nothing else happens.
    #[test]
    fn a_preference_ends_when_it_is_dropped() {
        for node in [-1, 64, 1000] {
            assert!(Preference::new(node).is_none(), "{node}");
        }
        if let Some(preference) = Preference::new(0) {
            assert_eq!(policy(), Some(MPOL_PREFERRED));
            assert!(Preference::new(0).is_none(), "a chosen policy stays");
            drop(preference);
            assert_eq!(policy(), Some(MPOL_DEFAULT));
        }
    }
}
