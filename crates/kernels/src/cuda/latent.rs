//! Latent attention: the rotary embedding of the last columns of heads, and keys and values from one latent a token.

use super::extent::Extent;
use super::positions::position_arguments;
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{ExpandKeys, ExpandKeysBackward, RotaryTail};
use memory::{DType, Out};

pub(super) fn rotary_tail<D: Driver>(
    cuda: &Cuda<D>,
    operation: RotaryTail,
) -> Result<(), KernelError> {
    let RotaryTail {
        x,
        head_dim,
        table,
        positions,
        are_neighbours,
        inverse,
    } = operation;
    let kernel = kernel!("latent", "rotary_tail", x.dtype());
    let [tokens, width] = [x.dims()[0], x.dims()[1]];
    let (table_rows, half) = (table.dims()[1], table.dims()[2]);
    let heads = width / head_dim;
    let [positions, seq] = position_arguments(positions);
    let sign = if inverse { -1.0 } else { 1.0 };
    let arguments = [
        (&x).into(),
        (&table).into(),
        table_rows.into(),
        positions,
        seq,
        Argument::Int(heads as i32),
        Argument::Int(head_dim as i32),
        Argument::Int(half as i32),
        Argument::Int(i32::from(are_neighbours)),
        sign.into(),
    ];
    cuda.launch(kernel, Extent::rows(tokens, heads * half), &arguments)
}

/// Heads, and the widths of one: columns without a position, those with one, and those of a value.
fn widths(heads: usize, of_kv: usize, own: usize, turned: usize) -> [Argument; 4] {
    [heads, own, turned, of_kv - own].map(|number| Argument::Int(number as i32))
}

pub(super) fn expand_keys<D: Driver>(
    cuda: &Cuda<D>,
    operation: ExpandKeys,
) -> Result<(), KernelError> {
    let ExpandKeys {
        k,
        v,
        kv,
        k_rotary,
        heads,
    } = operation;
    let kernel = kernel!("latent", "expand_keys", kv.dtype());
    let (of_kv, turned) = (kv.dims()[1] / heads, k_rotary.dims()[1]);
    let of_head = |out: &Out| out.dims()[1] / heads;
    let own = match (&k, &v) {
        (Some(k), _) => of_head(k) - turned,
        (None, Some(v)) => of_kv - of_head(v),
        (None, None) => unreachable!("the check before asks for one"),
    };
    let tensors = [
        Argument::optional(&k),
        Argument::optional(&v),
        (&kv).into(),
        (&k_rotary).into(),
    ];
    let arguments = [tensors, widths(heads, of_kv, own, turned)].concat();
    let [tokens, width] = [kv.dims()[0], kv.dims()[1]];
    cuda.launch(kernel, Extent::rows(tokens, width), &arguments)
}

pub(super) fn expand_keys_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: ExpandKeysBackward,
) -> Result<(), KernelError> {
    let ExpandKeysBackward {
        dkv,
        dk_rotary,
        dk,
        dv,
        heads,
    } = operation;
    let kernel = kernel!("latent", "expand_keys_backward", dkv.dtype());
    let (of_kv, turned) = (dkv.dims()[1] / heads, dk_rotary.dims()[1]);
    let own = of_kv - dv.dims()[1] / heads;
    let tensors = [
        (&dkv).into(),
        (&dk_rotary).into(),
        (&dk).into(),
        (&dv).into(),
    ];
    let arguments = [tensors, widths(heads, of_kv, own, turned)].concat();
    let [tokens, width] = [dkv.dims()[0], dkv.dims()[1]];
    cuda.launch(kernel, Extent::rows(tokens, width), &arguments)
}
