//! Splits the product for queries, keys and values for attention, and joins their gradients.

use super::extent::Extent;
use super::fp8::launch_finding_largest;
use super::positions::position_arguments;
use super::{Argument, Cuda, Driver, arguments, int, kernel, kernels};
use crate::Result;
use crate::operation::{JoinQkv, SplitQkv, Turn};

pub(super) fn split_qkv<D: Driver>(cuda: &Cuda<D>, op: SplitQkv) -> Result {
    let [k_width, v_width] = op.kv_widths;
    let kernel = kernel!("qkv", "split_qkv", op.qkv.dtype());
    let [tokens, width] = [op.qkv.dims()[0], op.qkv.dims()[1]];
    let widths = [width - k_width - v_width, k_width, v_width];
    let tensors = arguments![&op.qkv, &op.q, &op.k, &op.v];
    let (extent, arguments) = launched(tokens, tensors, widths, op.turn);
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn join_qkv<D: Driver>(cuda: &Cuda<D>, op: JoinQkv) -> Result {
    let kernels = kernels!("qkv", "join_qkv", op.qkv.dtype(), "_largest");
    let tensors = arguments![&op.qkv, &op.q, &op.k, &op.v];
    let widths = [op.q.dims()[1], op.k.dims()[1], op.v.dims()[1]];
    let (extent, arguments) = launched(op.q.dims()[0], tensors, widths, op.turn);
    launch_finding_largest(cuda, kernels, (extent, &arguments), op.largest)
}

/// Blocks and arguments of both ways.
fn launched(
    tokens: usize,
    [qkv, q, k, v]: [Argument; 4],
    [q_width, k_width, v_width]: [usize; 3],
    turn: Option<Turn>,
) -> (Extent, [Argument; 14]) {
    // One pack of pairs per thread where pairs are turned, otherwise one pack.
    let mut elements = q_width + k_width + v_width;
    let [q_table, k_table, table_rows, positions, seq, head_dim, half] = match &turn {
        Some(turn) => {
            let (q_table, k_table) = (turn.of_queries().table, turn.table);
            let [positions, seq] = position_arguments(turn.positions);
            let [table_rows, half] = [k_table.dims()[1], k_table.dims()[2]];
            elements -= (q_width + k_width) / turn.head_dim * half;
            arguments! {
                &q_table, &k_table, table_rows, positions, seq, int(turn.head_dim), int(half),
            }
        }
        None => arguments! {
            Argument::NULL, Argument::NULL, 0, Argument::NULL, 1, int(0), int(0),
        },
    };
    let arguments = arguments! {
        qkv, q, k, v, int(q_width), int(k_width), int(v_width), q_table, k_table, table_rows,
        positions, seq, head_dim, half,
    };
    (Extent::rows(tokens, elements), arguments)
}
