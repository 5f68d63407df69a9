//! Keeps in host memory what leases hold across steps, while a device's memory is given back.

use crate::backing::OwnedBlock;
use crate::{Lease, Space};
use std::cell::RefCell;
use std::rc::Rc;

/// The contents of the leases that live across steps, in the order of the leases.
///
/// [`Memory::park`](crate::Memory::park) copies what they hold on the device. When they end, it takes over the pinned blocks themselves. After
/// [`Memory::unpark`](crate::Memory::unpark) another memory gives the pinned blocks to the same leases, which are taken in the same order, and
/// [`Memory::fill_from_parked`](crate::Memory::fill_from_parked) copies the rest back. If a lease is refused in between, the pinned blocks return when the leases end: all is
/// parked as before, and can be taken again.
#[derive(Clone)]
pub struct Parked(pub(crate) Rc<RefCell<Vec<ParkedLease>>>);

/// A lease, and what it held.
pub(crate) struct ParkedLease {
    pub(crate) lease: Lease,
    /// None for what is not copied, and while a lease has the pinned block.
    pub(crate) block: Option<OwnedBlock>,
}

/// A live lease that lives across steps.
#[derive(Clone)]
pub(crate) struct PersistentLease {
    /// Its number in the ledger.
    pub(crate) number: usize,
    /// Its place among what is parked.
    pub(crate) place: usize,
    pub(crate) lease: Lease,
    pub(crate) pointer: *mut u8,
}

impl Parked {
    /// Bytes in host memory: copies of device memory, and pinned blocks that no lease has.
    pub fn bytes(&self) -> u64 {
        let leases = self.0.borrow();
        let parked = leases.iter().filter(|parked| parked.block.is_some());
        parked.map(|parked| parked.lease.bytes).sum()
    }

    /// The block of a pinned lease; none on the device, where leases get new blocks.
    pub(crate) fn take_block(&self, place: usize, lease: &Lease) -> Option<OwnedBlock> {
        let mut leases = self.0.borrow_mut();
        let same = |of: &Lease| (of.name, of.category, of.space, of.bytes);
        let parked = leases.get_mut(place);
        let parked = parked.filter(|parked| same(&parked.lease) == same(lease));
        let parked = parked.expect("leases are taken again in the order in which they were parked");
        match lease.space {
            Space::Device => None,
            Space::Host => parked.block.take(),
        }
    }

    /// Takes over the block of a pinned lease that ends.
    pub(crate) fn take_over(&self, place: usize, block: OwnedBlock) {
        self.0.borrow_mut()[place].block = Some(block);
    }
}
