//! Latent attention (DeepSeek-V2, 2024).

use super::extent::Extent;
use super::positions::position_arguments;
use super::{Cuda, Driver, arguments, int, kernel};
use crate::Result;
use crate::operation::{ExpandKeys, ExpandKeysBackward, RotaryTail};

pub(super) fn rotary_tail<D: Driver>(cuda: &Cuda<D>, op: RotaryTail) -> Result {
    let kernel = kernel!("latent", "rotary_tail", op.x.dtype());
    let (tokens, heads) = (op.x.dims()[0], op.x.dims()[1] / op.head_dim);
    let (table_rows, half) = (op.table.dims()[1], op.table.dims()[2]);
    let [positions, seq] = position_arguments(op.positions);
    let sign = if op.inverse { -1.0 } else { 1.0 };
    let arguments = arguments! {
        &op.x, &op.table, table_rows, positions, seq, int(heads), int(op.head_dim), int(half),
        op.are_neighbours, sign,
    };
    // One pack of pairs per thread.
    cuda.launch(kernel, Extent::rows(tokens, heads * half), &arguments)
}

pub(super) fn expand_keys<D: Driver>(cuda: &Cuda<D>, op: ExpandKeys) -> Result {
    let kernel = kernel!("latent", "expand_keys", op.kv.dtype());
    let (tokens, width, turned) = (op.kv.dims()[0], op.kv.dims()[1], op.k_rotary.dims()[1]);
    let both = width / op.heads;
    let unturned = match (&op.k, &op.v) {
        (Some(k), _) => k.dims()[1] / op.heads - turned,
        (None, Some(v)) => both - v.dims()[1] / op.heads,
        (None, None) => unreachable!("the check asks for one of them"),
    };
    let arguments = arguments! {
        &op.k, &op.v, &op.kv, &op.k_rotary, int(op.heads), int(unturned), int(turned),
        int(both - unturned),
    };
    let extent = Extent::rows(tokens, width + op.heads * turned);
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn expand_keys_backward<D: Driver>(cuda: &Cuda<D>, op: ExpandKeysBackward) -> Result {
    let kernel = kernel!("latent", "expand_keys_backward", op.dk.dtype());
    let (tokens, width, turned) = (op.dkv.dims()[0], op.dkv.dims()[1], op.dk_rotary.dims()[1]);
    let unturned = op.dk.dims()[1] / op.heads - turned;
    let arguments = arguments! {
        &op.dkv, &op.dk_rotary, &op.dk, &op.dv, int(op.heads), int(unturned), int(turned),
        int(width / op.heads - unturned),
    };
    cuda.launch(kernel, Extent::rows(tokens, width + turned), &arguments)
}
