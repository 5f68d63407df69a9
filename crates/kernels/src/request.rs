//! Requests to a device, in a queue.

use crate::{DiskCopy, Exchange, Operation};
use memory::{In, Out};

/// A request of [`Kernels`](crate::Kernels) to a [`Backend`](crate::Backend), in a queue.
#[allow(
    clippy::large_enum_variant,
    reason = "it is handed on, thousands of times a step, and a box would allocate each time"
)]
pub enum Request<'a> {
    /// An operation, in [`Queue::Compute`](crate::Queue::Compute), or in [`Queue::Update`](crate::Queue::Update) if it may
    /// run beside the computation ([`Operation::runs_beside`]).
    Operation(Operation<'a>),
    /// A copy in [`Queue::Upload`](crate::Queue::Upload), whose `In` is pinned host memory, or in
    /// [`Queue::Download`](crate::Queue::Download), whose `Out` is. Both are contiguous and have as many bytes.
    Copy(Out<'a>, In<'a>),
    /// A copy between a file and pinned host memory, which is contiguous, in [`DiskCopy::queue`].
    Disk(DiskCopy<'a>),
    /// An exchange with other ranks, in [`Queue::Collective`](crate::Queue::Collective). The pieces are contiguous.
    /// Pieces that this rank sends to itself have the same sizes on both sides.
    Exchange(Exchange<'a>),
}

impl Request<'_> {
    /// Extends the lifetime of the request.
    ///
    /// # Safety
    /// As for [`Out::outliving`].
    pub unsafe fn outliving(self) -> Request<'static> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Request::Operation(operation) => Request::Operation(operation.outliving()),
                Request::Copy(out, x) => Request::Copy(out.outliving(), x.outliving()),
                Request::Disk(copy) => Request::Disk(copy.outliving()),
                Request::Exchange(exchange) => Request::Exchange(exchange.outliving()),
            }
        }
    }
}
