//! The operations on the processor, f32 and bf16.
//!
//! Work is split into parts of fixed size, so results do not depend on the number of threads. Loops have explicit lanes
//! for the vectoriser, and are compiled for several instruction sets.

mod adafactor;
mod adamw;
pub(crate) mod attention;
mod cache;
mod cross_entropy;
mod delta_cache;
mod dequantise;
mod dispatch;
mod dropout;
mod elementwise;
mod embedding;
mod experts;
pub(crate) mod flash;
mod fp8;
mod gate;
pub(crate) mod gated_delta;
mod gated_norm;
mod gelu;
mod gemm;
mod latent;
mod layer_norm;
mod matmul;
mod muon;
mod norm;
mod policy;
mod positions;
mod preference;
mod products;
mod qkv;
mod quantise;
mod rms_norm;
mod rotary;
mod router;
mod short_convolution;
mod sigmoid_gate;
mod simd;
mod sinks;
mod states;
mod sum_in_order;
mod swiglu;

use crate::families::families;
use crate::workers::Workers;
use crate::workspace::lease_workspace;
use crate::{
    Backend, Event, Init, Kernels, Operation, Queue, Queues, Reading, Request, Result, Target,
};
use collectives::Group;
use memory::{Buffer, DType, Element, In, Memory, Out, OutOfMemory};
use std::cell::{RefCell, RefMut};
use std::sync::Arc;

pub use products::Instructions;

/// Calls the function of an operation.
macro_rules! compute {
    (
        [$cpu:ident $operation:ident]
        [$($file:ident: $($name:ident $function:ident),+;)+]
        [$($of:ident: $($product:ident $multiply:ident),+;)+]
    ) => {
        match $operation {
            $($(Operation::$name(op) => $file::$function(op),)+)+
            $($(Operation::$product(op) => $of::$multiply($cpu, op),)+)+
        }
    };
}

/// Kernels on the processor, in the current rayon pool.
pub struct Cpu {
    workspace: Option<RefCell<Buffer>>,
    /// The instructions for products with bf16.
    instructions: Instructions,
    /// One thread per queue of copies and exchanges. Operations run in the calling thread.
    workers: Workers,
}

impl Cpu {
    /// Leases the workspace for matrix products whose narrowest type is `dtype`.
    ///
    /// # Errors
    /// [`OutOfMemory`] if a limit refuses the workspace.
    pub fn new(memory: &Memory, dtype: DType) -> Result<Kernels<Cpu>, OutOfMemory> {
        Cpu::with(memory, dtype, None)
    }

    /// As [`Cpu::new`], for a rank of a group that exchanges pieces.
    ///
    /// # Errors
    /// As for [`Cpu::new`].
    pub fn in_group(
        memory: &Memory,
        dtype: DType,
        group: Arc<dyn Group>,
    ) -> Result<Kernels<Cpu>, OutOfMemory> {
        Cpu::with(memory, dtype, Some(group))
    }

    /// Runs an operation, already checked, in this thread.
    fn compute(&self, operation: Operation) {
        families!(compute! self operation)
    }

    /// The workspace for a product's packed operands, which it needs if one of its types is not f32.
    fn packing(&self, types: &[DType]) -> Option<RefMut<'_, [f32]>> {
        let workspace = self.workspace.as_ref()?;
        let is_packed = types.iter().any(|dtype| *dtype != DType::F32);
        is_packed.then(|| RefMut::map(workspace.borrow_mut(), |all| all.view_mut().slice_mut()))
    }

    fn with(
        memory: &Memory,
        dtype: DType,
        group: Option<Arc<dyn Group>>,
    ) -> Result<Kernels<Cpu>, OutOfMemory> {
        Ok(Kernels::new(Cpu {
            workspace: lease_workspace(memory, Target::Cpu, dtype)?.map(RefCell::new),
            instructions: Instructions::best(),
            workers: Workers::new(Box::new(|_, _| {}), group),
        }))
    }
}

impl Kernels<Cpu> {
    /// The same kernels with other instructions for products with bf16. The processor must have them
    /// ([`Instructions::are_here`]). [`Cpu::new`] takes the best.
    ///
    /// # Panics
    /// If this processor does not have them.
    pub fn multiplying_by(self, instructions: Instructions) -> Kernels<Cpu> {
        assert!(
            instructions.are_here(),
            "this processor does not have {instructions:?}"
        );
        Kernels::new(Cpu {
            instructions,
            ..self.backend
        })
    }

    /// The instructions that multiply bf16.
    pub fn instructions(&self) -> Instructions {
        self.backend.instructions
    }
}

/// Upper limit for the packing buffers that the GEMM library allocates outside the ledger, for `threads` threads. It is
/// the only allocation of an operation on the CPU, and a test checks the limit.
pub fn untracked_bytes_max(threads: usize) -> u64 {
    gemm::packing_bytes_max(threads)
}

impl Backend for Cpu {
    fn target(&self) -> Target {
        Target::Cpu
    }

    fn runs_ahead(&self) -> bool {
        false
    }

    fn widens(&self) -> bool {
        self.workspace.is_some()
    }

    unsafe fn ask(&self, queue: Queue, request: Request) -> Result {
        // SAFETY: the caller's promise.
        unsafe {
            match request {
                Request::Operation(operation) => self.compute(operation),
                Request::Copy(out, x) => self.workers.copy(queue, out, x)?,
                Request::Disk(copy) => self.workers.disk(copy)?,
                Request::Exchange(exchange) => self.workers.exchange(exchange)?,
            }
        }
        Ok(())
    }

    unsafe fn write(&self, out: Out, bytes: &[u8]) -> Result {
        assert!(!out.pointer().is_null(), "a shape has no data");
        // SAFETY: the view covers as many bytes as `bytes`, which the borrow checker keeps apart from it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.pointer(), bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, bytes: &mut [u8], x: In) -> Result {
        assert!(!x.pointer().is_null(), "a shape has no data");
        self.workers.check()?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(x.pointer(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn start_reading(&self, x: In) -> Result<Reading> {
        let mut bytes = vec![0; x.bytes()];
        // SAFETY: the caller's promise, and there are as many bytes.
        unsafe { self.read(&mut bytes, x)? };
        Ok(Reading::done(bytes))
    }
}

impl Queues for Cpu {
    fn rank(&self) -> usize {
        self.workers.rank()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.workers.record(queue)
    }

    fn wait(&self, queue: Queue, event: Event, _reason: &'static str) -> Result {
        match queue {
            Queue::Compute | Queue::Update => self.workers.finish(event),
            _ => self.workers.wait(queue, event),
        }
    }

    fn finish(&self, event: Event) -> Result {
        self.workers.finish(event)
    }
}

fn overwrites(init: &Init) -> bool {
    matches!(init, Init::Overwrite)
}

/// A pointer into an output that several tasks write in disjoint places.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: the code that makes one ensures that no two tasks touch the same element.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The pointer moved by `offset` elements. It is a method so that a closure captures the whole wrapper.
    fn at(self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }
}

/// A pointer into a contiguous output.
fn shared<T: Element>(out: Out) -> Shared<T> {
    Shared(out.slice_mut().as_mut_ptr())
}

/// Some elements of an output.
///
/// # Safety
/// They lie in the output, and no other task touches them.
#[inline(always)]
unsafe fn part<'a, T>(out: Shared<T>, first: usize, elements: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(out.at(first), elements) }
}
