//! The gated delta rule (Yang et al. 2025), a chunk of tokens at a time.

use super::elementwise::bias_backward;
use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, arguments, int, kernel};
use crate::Result;
use crate::operation::{BiasBackward, DELTA_CHUNK, DeltaShape, GatedDelta, GatedDeltaBackward};
use memory::In;

/// Tokens of a chunk, value columns of a block, and its warps: as in `gated_delta.cu`.
const CHUNK: usize = DELTA_CHUNK;
const VALUE_TILE: usize = 32;
const DELTA_WARPS: usize = 8;

/// Distances between rows in shared memory: of scores, and of value columns of a tile, and of a narrow one.
const SCORES: usize = CHUNK + 1;
const TILE: usize = VALUE_TILE + 1;
const NARROW_TILE: usize = 5;

/// The arguments that all kernels of the rule share: a layer's inputs and sizes.
fn layer(
    [mixed, b, a, a_log, dt_bias]: [&In; 5],
    documents: &Option<In>,
    shape: DeltaShape,
) -> [Argument; 13] {
    let DeltaShape {
        seq,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        ..
    } = shape;
    arguments![
        mixed,
        b,
        b.strides()[0],
        a,
        a.strides()[0],
        a_log,
        dt_bias,
        documents,
        seq,
        int(key_heads),
        int(value_heads),
        int(key_dim),
        int(value_dim)
    ]
}

/// Blocks of a tile of each value head's columns, with so much shared memory.
fn tiles_of_heads(shape: DeltaShape, floats: usize) -> Extent {
    let grid = [
        shape.batch * shape.value_heads,
        shape.value_dim.div_ceil(VALUE_TILE),
        1,
    ];
    Extent {
        shared_bytes: floats * size_of::<f32>(),
        ..Extent::new(grid, [DELTA_WARPS * WARP, 1, 1])
    }
}

pub(super) fn gated_delta<D: Driver>(cuda: &Cuda<D>, op: GatedDelta) -> Result {
    let width = op.shape.key_dim;
    let layer = layer(
        [&op.mixed, &op.b, &op.a, &op.a_log, &op.dt_bias],
        &op.documents,
        op.shape,
    );
    let arguments = [&arguments![&op.out, &op.states][..], &layer].concat();
    let floats =
        width * VALUE_TILE + CHUNK * (width + 1 + SCORES + TILE) + DELTA_WARPS * (width + CHUNK);
    let kernel = kernel!("gated_delta", "gated_delta", op.mixed.dtype());
    cuda.launch(kernel, tiles_of_heads(op.shape, floats), &arguments)
}

/// The f32 elements of scratch of a backward pass: the gradients of states, and parts of those of `a_log` and `dt_bias`.
pub(crate) fn backward_scratch(shape: DeltaShape) -> usize {
    let parts = shape.batch * shape.chunks() * shape.value_heads;
    shape.states().iter().product::<usize>() + 2 * parts
}

pub(super) fn gated_delta_backward<D: Driver>(cuda: &Cuda<D>, op: GatedDeltaBackward) -> Result {
    let (shape, width, dtype) = (op.shape, op.shape.key_dim, op.mixed.dtype());
    let layer = layer(
        [&op.mixed, &op.b, &op.a, &op.a_log, &op.dt_bias],
        &op.documents,
        shape,
    );
    let parts = shape.batch * shape.chunks();
    let (dstates, of_gates) = op.scratch.split_at(shape.states().iter().product());
    let (a_log_parts, dt_bias_parts) = of_gates.split_at(parts * shape.value_heads);
    let floats = width * VALUE_TILE + CHUNK * (width + 1 + SCORES + 2 * TILE) + DELTA_WARPS * width;
    let arguments = [&arguments![&op.dmixed, &dstates, &op.dout][..], &layer].concat();
    let kernel = kernel!("gated_delta", "gated_delta_states", dtype);
    cuda.launch(kernel, tiles_of_heads(shape, floats), &arguments)?;
    let floats = CHUNK * (2 * (width + 1) + SCORES + 4 * NARROW_TILE) + 2 * width * NARROW_TILE;
    let extent = Extent {
        shared_bytes: floats * size_of::<f32>(),
        ..Extent::new([parts, shape.key_heads, 1], [DELTA_WARPS * WARP, 1, 1])
    };
    let into = arguments![
        &op.dmixed,
        &op.db,
        op.db.strides()[0],
        &op.da,
        op.da.strides()[0],
        &a_log_parts,
        &dt_bias_parts,
        &op.dout,
        &op.states,
        &dstates
    ];
    let kernel = kernel!("gated_delta", "gated_delta_gradients", dtype);
    cuda.launch(kernel, extent, &[&into[..], &layer].concat())?;
    let sums = [
        (a_log_parts, op.da_log, op.da_log_init),
        (dt_bias_parts, op.ddt_bias, op.ddt_bias_init),
    ];
    for (of_chunks, out, init) in sums {
        let dy = of_chunks.into_in().reshape([parts, shape.value_heads]);
        bias_backward(
            cuda,
            BiasBackward {
                out: out.into(),
                dy,
                init,
            },
        )?;
    }
    Ok(())
}
