//! Lists the calls of a step without a device: the products that a rehearsal runs, and the calls that an estimate of a
//! step's time counts.
//!
//! A step on shapes counts operations. Here it goes through the launch code of the device, on addresses without memory.
//! So blocks and threads, sizes, strides and alignments are those of the run.

use super::{Argument, Driver, Gemm, Kernel, Launch, Workspace};
use crate::{Cost, DiskCopy, Exchange, Operation, Queue, Queues, Reading, Result};
use memory::{Blocks, In, Memory, Out, Place, Refused, Space};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::rc::Rc;

/// A driver that only keeps the calls that it gets. Clones share one list.
#[derive(Clone)]
pub struct Listing {
    calls: Rc<RefCell<Vec<Listed>>>,
    /// The current operation, and the part of its cost that no call has been given yet.
    operation: Rc<Cell<(&'static str, Cost)>>,
    /// The memory that knows where the step is.
    memory: Memory,
    rank: usize,
}

/// A call of the device, and its purpose. Of its pointers only the alignment is that of a run.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Where in the step and in the model.
    pub place: Place,
    /// The operation that it carries out, alone or with other calls.
    pub operation: &'static str,
    /// The operation's least cost, on its first call; zero on the others.
    pub cost: Cost,
    /// The call.
    pub call: Call,
}

/// A call that computes.
#[derive(Clone, Debug)]
pub enum Call {
    /// A kernel.
    Launch {
        /// What is launched.
        kernel: Kernel,
        /// As in [`Launch`].
        grid: [u32; 3],
        /// As in [`Launch`].
        block: [u32; 3],
        /// As in [`Launch`].
        shared_bytes: u32,
        /// Its integer arguments in order, mostly sizes.
        numbers: Vec<i64>,
    },
    /// Matrix products by the library.
    Product(Gemm),
    /// Sets this many bytes to 0.
    Clear(usize),
}

impl Listing {
    /// A memory for listing: leases have addresses, but no memory behind them.
    pub fn memory() -> Memory {
        Memory::device(Rc::new(Addresses {
            next: Cell::new(memory::GRANULARITY_BYTES),
        }))
    }

    /// A listing for a rank of a group, or for a run without one (rank 0), in a memory like [`Listing::memory`]'s.
    pub fn of_rank(rank: usize, memory: &Memory) -> Listing {
        Listing {
            calls: Rc::default(),
            operation: Rc::default(),
            memory: memory.clone(),
            rank,
        }
    }

    /// The calls since the last call of this, in order.
    pub fn take(&self) -> Vec<Listed> {
        self.calls.take()
    }

    fn list(&self, call: Call) -> Result {
        let (operation, cost) = self.operation.get();
        self.operation.set((operation, Cost::default()));
        self.calls.borrow_mut().push(Listed {
            place: self.memory.place(),
            operation,
            cost,
            call,
        });
        Ok(())
    }
}

impl Queues for Listing {
    fn rank(&self) -> usize {
        self.rank
    }
}

impl Driver for Listing {
    fn begin_operation(&self, operation: &Operation) {
        self.operation.set((operation.name(), operation.cost()));
    }

    unsafe fn launch(&self, launch: &Launch) -> Result {
        let whole = |argument: &Argument| match *argument {
            Argument::Size(value) => Some(value as i64),
            Argument::Int(value) => Some(value.into()),
            Argument::Pointer(_) | Argument::Float(_) => None,
        };
        self.list(Call::Launch {
            kernel: launch.kernel,
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            numbers: launch.arguments.iter().filter_map(whole).collect(),
        })
    }

    unsafe fn gemm(&self, gemm: &Gemm, _workspace: Workspace) -> Result {
        self.list(Call::Product(*gemm))
    }

    unsafe fn copy_to_device(&self, _to: *mut u8, _bytes: &[u8]) -> Result {
        Ok(())
    }

    unsafe fn copy_to_host(&self, bytes: &mut [u8], _from: *const u8) -> Result {
        bytes.fill(0);
        Ok(())
    }

    unsafe fn clear(&self, _to: *mut u8, bytes: usize) -> Result {
        self.list(Call::Clear(bytes))
    }

    unsafe fn start_copy(&self, _queue: Queue, _out: Out, _x: In) -> Result {
        Ok(())
    }

    unsafe fn start_disk(&self, _copy: DiskCopy) -> Result {
        Ok(())
    }

    unsafe fn start_exchange(&self, _exchange: Exchange) -> Result {
        Ok(())
    }

    unsafe fn start_read(&self, _from: *const u8, bytes: usize) -> Result<Reading> {
        Ok(Reading::done(vec![0; bytes]))
    }
}

/// Addresses that nobody may read or write, aligned like a device's. Page-locked memory has no memory either, because a
/// step only copies it.
struct Addresses {
    next: Cell<u64>,
}

impl Blocks for Addresses {
    fn device(&self) -> &'static str {
        "CUDA"
    }

    fn allocate(&self, _space: Space, bytes: u64) -> Result<NonNull<u8>, Refused> {
        let address = self.next.get();
        self.next.set(address + bytes);
        let pointer = std::ptr::without_provenance_mut(address as usize);
        Ok(NonNull::new(pointer).expect("addresses begin above 0"))
    }

    unsafe fn free(&self, _space: Space, _block: NonNull<u8>) {}

    unsafe fn fill(&self, _pointer: *mut u8, _value: u8, _bytes: u64) {}
}
