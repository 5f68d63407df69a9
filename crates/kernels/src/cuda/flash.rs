//! Attention that never stores the scores.

use super::{Cuda, Driver};
use crate::{AttentionShape, FlashOptions, KernelError, check};
use memory::{In, Out};

fn not_written() -> KernelError {
    KernelError {
        operation: "flash_attention",
        message: "not written for CUDA yet".into(),
    }
}

pub(super) fn flash_attention<D: Driver>(
    _cuda: &Cuda<D>,
    out: Option<Out>,
    lse: Option<Out>,
    scratch: Out,
    (q, k, v): (In, In, In),
    shape: AttentionShape,
    options: FlashOptions,
) -> Result<(), KernelError> {
    let target = crate::Target::Cuda;
    check::flash_attention(target, &out, &lse, &scratch, (&q, &k, &v), shape, &options)?;
    Err(not_written())
}

pub(super) fn flash_attention_backward<D: Driver>(
    _cuda: &Cuda<D>,
    (dq, dk, dv): (Out, Out, Out),
    scratch: Out,
    (dout, out, lse): (In, In, In),
    (q, k, v): (In, In, In),
    shape: AttentionShape,
    options: FlashOptions,
) -> Result<(), KernelError> {
    check::flash_attention_backward(
        crate::Target::Cuda,
        (&dq, &dk, &dv),
        &scratch,
        (&dout, &out, &lse),
        (&q, &k, &v),
        shape,
        &options,
    )?;
    Err(not_written())
}
