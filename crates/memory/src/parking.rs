//! Parks what leases hold, and gives it back ([`Parked`]).

use crate::backing::OwnedBlock;
use crate::parked::{Parked, ParkedLease, PersistentLease};
use crate::view::Reach;
use crate::{Category, DType, Dims, In, Lease, Memory, Out, OutOfMemory, Space};
use std::cell::RefCell;
use std::rc::Rc;

/// Whether what a lease holds is copied. The next step overwrites gradients.
fn is_copied(lease: &Lease) -> bool {
    lease.space == Space::Device && lease.category != Category::Gradient && lease.bytes > 0
}

/// All bytes of a lease.
fn dims(lease: &Lease) -> Dims {
    [lease.bytes as usize].into()
}

impl Memory {
    /// Bytes that [`Memory::park`] copies.
    pub fn bytes_to_park(&self) -> u64 {
        let (leases, _) = self.persistent();
        let copied = leases.iter().filter(|held| is_copied(&held.lease));
        copied.map(|held| held.lease.bytes).sum()
    }

    /// Copies, with `copy`, what leases that live across steps hold on the device to pinned host memory, but not gradients,
    /// which the next step overwrites. From now on pinned blocks are taken over when their leases end.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the host refuses the copies, and errors of `copy`. Nothing is parked then.
    ///
    /// # Safety
    /// Nothing writes these leases meanwhile.
    pub unsafe fn park<E: From<OutOfMemory>>(
        &self,
        mut copy: impl FnMut(&mut [u8], In) -> Result<(), E>,
    ) -> Result<Parked, E> {
        let (leases, reach) = self.persistent();
        let mut parked = Vec::new();
        for PersistentLease { lease, pointer, .. } in leases {
            let mut block = None;
            if is_copied(&lease) {
                let copied = self.copy_place(lease)?;
                // SAFETY: the lease covers these bytes and lives, and nobody writes it, as the caller promises.
                let held = unsafe { In::new(pointer, reach, DType::U8, dims(&lease)) };
                // SAFETY: the block is new and as large as the lease.
                let bytes = unsafe {
                    std::slice::from_raw_parts_mut(copied.pointer(), lease.bytes as usize)
                };
                copy(bytes, held)?;
                block = Some(copied);
            }
            parked.push(ParkedLease { lease, block });
        }
        let parked = Parked(Rc::new(RefCell::new(parked)));
        let mut state = self.state.borrow_mut();
        let leases = state.persistent.iter_mut().enumerate();
        leases.for_each(|(place, lease)| lease.place = place);
        state.parked = Some(parked.clone());
        Ok(parked)
    }

    /// Makes the leases that live across steps those that are parked: they must be taken in the same order, and pinned ones get
    /// their blocks back. Call it before the first lease.
    pub fn unpark(&self, parked: &Parked) {
        let mut state = self.state.borrow_mut();
        assert!(state.persistent.is_empty(), "leases come after this");
        state.parked = Some(parked.clone());
    }

    /// Copies, with `copy`, what was parked to the leases on the device, once all leases that live across steps are taken again. When the copies
    /// are done, [`Memory::end_parking`] follows.
    ///
    /// # Errors
    /// Those of `copy`. All is parked as before when the leases have ended.
    ///
    /// # Safety
    /// Nothing reads or writes these leases meanwhile.
    pub unsafe fn fill_from_parked<E>(
        &self,
        parked: &Parked,
        mut copy: impl FnMut(Out, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (leases, reach) = self.persistent();
        let parked = parked.0.borrow();
        assert_eq!(leases.len(), parked.len(), "every lease is taken again");
        for (PersistentLease { lease, pointer, .. }, parked) in leases.iter().zip(&*parked) {
            let Some(block) = &parked.block else { continue };
            // SAFETY: the lease covers these bytes and lives, and nobody uses it, as the caller promises.
            let out = unsafe { Out::new(*pointer, reach, DType::U8, dims(lease)) };
            // SAFETY: the block is as large as the lease was, which has the size of this one.
            let bytes =
                unsafe { std::slice::from_raw_parts(block.pointer(), lease.bytes as usize) };
            copy(out, bytes)?;
        }
        Ok(())
    }

    /// Nothing is parked from now on: the leases have it all.
    pub fn end_parking(&self, parked: &Parked) {
        parked.0.borrow_mut().clear();
        self.state.borrow_mut().parked = None;
    }

    /// The leases that live across steps, and who can read those on the device.
    fn persistent(&self) -> (Vec<PersistentLease>, Reach) {
        let state = self.state.borrow();
        (state.persistent.clone(), state.backing.reach(Space::Device))
    }

    /// A pinned block for a copy of a lease.
    fn copy_place(&self, lease: Lease) -> Result<OwnedBlock, OutOfMemory> {
        let space = Space::Host;
        let block = self
            .state
            .borrow_mut()
            .block_beside(Lease { space, ..lease });
        Ok(block?.expect("a memory of shapes parks nothing"))
    }
}
