//! The memory behind leases, and blocks of it.

use crate::blocks::DeviceBlock;
use crate::host::HostBlock;
use crate::view::Reach;
use crate::{Blocks, Refused, Space, round_up};
use std::rc::Rc;

/// The memory behind leases.
pub(crate) enum Backing {
    /// Host memory.
    Host,
    /// A device's memory.
    Device(Rc<dyn Blocks>),
    /// Nothing: shapes only.
    Shapes,
}

impl Backing {
    /// The device's name in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Backing::Device(blocks) => blocks.device(),
            Backing::Host | Backing::Shapes => "CPU",
        }
    }

    /// Whether the processor can read leases in a space.
    pub(crate) fn reach(&self, space: Space) -> Reach {
        match (self, space) {
            (Backing::Device(_), Space::Device) => Reach::Device,
            _ => Reach::Host,
        }
    }

    /// A zeroed block; none for shapes.
    pub(crate) fn block(&self, space: Space, bytes: u64) -> Result<Option<OwnedBlock>, Refused> {
        match self {
            Backing::Host => match HostBlock::new(bytes) {
                Some(block) => Ok(Some(OwnedBlock::Host(block))),
                None => Err(Refused {
                    device_bytes: None,
                    error: None,
                }),
            },
            Backing::Device(blocks) => {
                // A device has no blocks of 0 bytes.
                let block = DeviceBlock::new(blocks, space, round_up(bytes.max(1)))?;
                Ok(Some(OwnedBlock::Device(block)))
            }
            Backing::Shapes => Ok(None),
        }
    }

    /// Fills a lease of a step with NaN.
    pub(crate) fn poison(&self, pointer: *mut u8, bytes: u64) {
        match self {
            // SAFETY: `pointer` starts `bytes` of memory that no live lease shares.
            Backing::Host => unsafe { std::ptr::write_bytes(pointer, 0xff, bytes as usize) },
            // SAFETY: as above.
            Backing::Device(blocks) => unsafe { blocks.fill(pointer, 0xff, bytes) },
            Backing::Shapes => (),
        }
    }
}

/// Memory from one request to the system, freed when dropped.
pub(crate) enum OwnedBlock {
    Host(HostBlock),
    Device(DeviceBlock),
}

impl OwnedBlock {
    pub(crate) fn pointer(&self) -> *mut u8 {
        match self {
            OwnedBlock::Host(block) => block.pointer().as_ptr(),
            OwnedBlock::Device(block) => block.pointer(),
        }
    }
}
