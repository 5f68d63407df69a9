//! Splits the product for queries, keys and values for attention, and joins their gradients.

use super::extent::Extent;
use super::positions::position_arguments;
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{JoinQkv, SplitQkv, Turn};
use memory::DType;

pub(super) fn split_qkv<D: Driver>(cuda: &Cuda<D>, operation: SplitQkv) -> Result<(), KernelError> {
    let SplitQkv {
        q,
        k,
        v,
        qkv,
        kv_widths: [k_width, v_width],
        turn,
    } = operation;
    let kernel = kernel!("qkv", "split_qkv", qkv.dtype());
    let [tokens, width] = [qkv.dims()[0], qkv.dims()[1]];
    let widths = [width - k_width - v_width, k_width, v_width];
    let parts = [&q, &k, &v].map(Argument::optional);
    let tensors = [(&qkv).into(), parts[0], parts[1], parts[2]];
    launch(cuda, kernel, tokens, tensors, widths, turn)
}

pub(super) fn join_qkv<D: Driver>(cuda: &Cuda<D>, operation: JoinQkv) -> Result<(), KernelError> {
    let JoinQkv { qkv, q, k, v, turn } = operation;
    let kernel = kernel!("qkv", "join_qkv", qkv.dtype());
    let tensors = [(&qkv).into(), (&q).into(), (&k).into(), (&v).into()];
    let widths = [q.dims()[1], k.dims()[1], v.dims()[1]];
    launch(cuda, kernel, q.dims()[0], tensors, widths, turn)
}

fn launch<D: Driver>(
    cuda: &Cuda<D>,
    kernel: Kernel,
    tokens: usize,
    [qkv, q, k, v]: [Argument; 4],
    [q_width, k_width, v_width]: [usize; 3],
    turn: Option<Turn>,
) -> Result<(), KernelError> {
    let (table, half) = match &turn {
        Some(turn) => (turn.table.dims()[1], turn.table.dims()[2]),
        None => (0, 0),
    };
    let [positions, seq] = match &turn {
        Some(turn) => position_arguments(turn.positions),
        None => [Argument::NULL, 1.into()],
    };
    let arguments = [
        qkv,
        q,
        k,
        v,
        Argument::Int(q_width as i32),
        Argument::Int(k_width as i32),
        Argument::Int(v_width as i32),
        turn.as_ref()
            .map_or(Argument::NULL, |turn| (&turn.table).into()),
        table.into(),
        positions,
        seq,
        Argument::Int(half as i32),
    ];
    // One pack of pairs per thread if pairs are turned, otherwise one pack.
    let turned = q_width + k_width;
    let elements = if turn.is_some() { turned / 2 } else { turned };
    cuda.launch(kernel, Extent::rows(tokens, elements + v_width), &arguments)
}
