//! Latent attention (DeepSeek-V2, 2024).

use super::extent::Extent;
use super::positions::position_arguments;
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{ExpandKeys, ExpandKeysBackward, RotaryTail};
use memory::DType;

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
    let (tokens, heads) = (x.dims()[0], x.dims()[1] / head_dim);
    let (table_rows, half) = (table.dims()[1], table.dims()[2]);
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
        are_neighbours.into(),
        sign.into(),
    ];
    // One pack of pairs per thread.
    cuda.launch(kernel, Extent::rows(tokens, heads * half), &arguments)
}

/// The heads, and the columns of each: of keys without a position, of keys with one, and of values.
fn columns(heads: usize, [both, turned, unturned]: [usize; 3]) -> [Argument; 4] {
    let numbers = [heads, unturned, turned, both - unturned];
    numbers.map(|number| Argument::Int(number as i32))
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
    let (tokens, width, turned) = (kv.dims()[0], kv.dims()[1], k_rotary.dims()[1]);
    let both = width / heads;
    let unturned = match (&k, &v) {
        (Some(k), _) => k.dims()[1] / heads - turned,
        (None, Some(v)) => both - v.dims()[1] / heads,
        (None, None) => unreachable!("the check asks for one of them"),
    };
    let [heads_argument, unturned, turned_argument, value] =
        columns(heads, [both, turned, unturned]);
    let arguments = [
        Argument::optional(&k),
        Argument::optional(&v),
        (&kv).into(),
        (&k_rotary).into(),
        heads_argument,
        unturned,
        turned_argument,
        value,
    ];
    let extent = Extent::rows(tokens, width + heads * turned);
    cuda.launch(kernel, extent, &arguments)
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
    let kernel = kernel!("latent", "expand_keys_backward", dk.dtype());
    let (tokens, width, turned) = (dkv.dims()[0], dkv.dims()[1], dk_rotary.dims()[1]);
    let unturned = dk.dims()[1] / heads - turned;
    let [heads, unturned, turned_argument, value] =
        columns(heads, [width / heads, turned, unturned]);
    let arguments = [
        (&dkv).into(),
        (&dk_rotary).into(),
        (&dk).into(),
        (&dv).into(),
        heads,
        unturned,
        turned_argument,
        value,
    ];
    cuda.launch(kernel, Extent::rows(tokens, width + turned), &arguments)
}
