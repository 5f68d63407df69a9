//! The gated delta rule (Yang et al. 2025), a chunk of tokens at a time.

use super::elementwise::bias_backward;
use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, arguments, int, kernel};
use crate::Result;
use crate::operation::{BiasBackward, DELTA_CHUNK, DeltaShape, GatedDelta, GatedDeltaBackward};
use memory::{DType, In};

/// Tokens of a chunk, queries at a time, value columns of a block, and its warps: as in `gated_delta.cu`.
const CHUNK: usize = DELTA_CHUNK;
const QUERIES: usize = 32;
const VALUE_TILE: usize = 32;
const DELTA_WARPS: usize = 8;

/// Distances between rows in shared memory: of keys and queries, of scores, of value columns of a tile, and of a narrow one.
const KEYS: usize = DeltaShape::KEY_DIM_MAX + 4;
const SCORES: usize = CHUNK + 4;
const TILE: usize = VALUE_TILE + 8;
const NARROW_TILE: usize = 16 + 4;

/// Elements of shared memory of a block that has a tile of values, and of one that has a chunk.
const OF_TILE: usize =
    CHUNK * (KEYS + SCORES + TILE) + DeltaShape::KEY_DIM_MAX * TILE + QUERIES * KEYS;
const OF_CHUNK: usize = CHUNK * (2 * KEYS + SCORES + 2 * NARROW_TILE);

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

/// Blocks of a tile of each value head's columns.
fn tiles_of_heads(shape: DeltaShape) -> Extent {
    let grid = [
        shape.batch * shape.value_heads,
        shape.value_dim.div_ceil(VALUE_TILE),
        1,
    ];
    blocks(grid, OF_TILE)
}

fn blocks(grid: [usize; 3], floats: usize) -> Extent {
    Extent {
        shared_bytes: floats * size_of::<f32>(),
        ..Extent::new(grid, [DELTA_WARPS * WARP, 1, 1])
    }
}

pub(super) fn gated_delta<D: Driver>(cuda: &Cuda<D>, op: GatedDelta) -> Result {
    let shape = op.shape;
    let segment = Segment {
        shape,
        dtype: op.mixed.dtype(),
        first: 0,
        chunks: shape.chunks(),
        layer: &layer(
            [&op.mixed, &op.b, &op.a, &op.a_log, &op.dt_bias],
            &op.documents,
            shape,
        ),
    };
    let from_zeros = (Argument::NULL, 0);
    let states = ((&op.states).into(), shape.state_interval);
    segment.go_through(cuda, (&op.out).into(), states, from_zeros)
}

/// Some neighbouring chunks, the same of every sequence.
struct Segment<'a> {
    shape: DeltaShape,
    dtype: DType,
    first: usize,
    chunks: usize,
    layer: &'a [Argument],
}

impl Segment<'_> {
    /// From the first chunk to the last: the output, and every `interval`-th state. `from` has the states in front, `distance` states
    /// from sequence to sequence.
    fn go_through<D: Driver>(
        &self,
        cuda: &Cuda<D>,
        out: Argument,
        (states, interval): (Argument, usize),
        (from, distance): (Argument, usize),
    ) -> Result {
        let kernel = kernel!("gated_delta", "gated_delta", self.dtype);
        let of = arguments![
            out,
            states,
            from,
            distance,
            self.first,
            self.chunks,
            interval
        ];
        let arguments = [&of[..], self.layer].concat();
        cuda.launch(kernel, tiles_of_heads(self.shape), &arguments)
    }

    /// From the last to the first: the gradients of values, of the states behind chunks, and of those between segments.
    fn go_back<D: Driver>(
        &self,
        cuda: &Cuda<D>,
        [dmixed, dstates, between, dout]: [Argument; 4],
    ) -> Result {
        let kernel = kernel!("gated_delta", "gated_delta_states", self.dtype);
        let of = arguments![dmixed, dstates, between, dout, self.first, self.chunks];
        let arguments = [&of[..], self.layer].concat();
        cuda.launch(kernel, tiles_of_heads(self.shape), &arguments)
    }

    /// Each chunk for itself: the gradients of queries, keys and gates.
    fn gradients<D: Driver>(
        &self,
        cuda: &Cuda<D>,
        into: &[Argument],
        [dout, states, dstates]: [Argument; 3],
    ) -> Result {
        let grid = [self.shape.batch * self.chunks, self.shape.key_heads, 1];
        let extent = blocks(grid, OF_CHUNK);
        let of = arguments![dout, states, dstates, self.first, self.chunks];
        let kernel = kernel!("gated_delta", "gated_delta_gradients", self.dtype);
        cuda.launch(kernel, extent, &[into, &of[..], self.layer].concat())
    }
}

/// Elements of the states of a chunk of every sequence.
fn states_of_chunk(shape: DeltaShape) -> usize {
    shape.batch * shape.value_heads * shape.key_dim * shape.value_dim
}

/// The chunks that a backward pass takes at a time: all if it has all states.
fn segment_chunks(shape: DeltaShape) -> usize {
    match shape.keeps_all_states() {
        true => shape.chunks(),
        false => shape.state_interval.min(shape.chunks()),
    }
}

/// The f32 elements of scratch of a backward pass: parts of the gradients of `a_log` and `dt_bias`, the gradients of a segment's states,
/// and if not all states are kept, a segment's states and the gradients of those between segments.
pub(crate) fn backward_scratch(shape: DeltaShape) -> usize {
    let parts = shape.batch * shape.chunks() * shape.value_heads;
    let chunks = match shape.keeps_all_states() {
        true => shape.chunks(),
        false => 2 * segment_chunks(shape) + 1,
    };
    2 * parts + chunks * states_of_chunk(shape)
}

pub(super) fn gated_delta_backward<D: Driver>(cuda: &Cuda<D>, op: GatedDeltaBackward) -> Result {
    let shape = op.shape;
    let layer = layer(
        [&op.mixed, &op.b, &op.a, &op.a_log, &op.dt_bias],
        &op.documents,
        shape,
    );
    let (chunks, parts) = (segment_chunks(shape), shape.batch * shape.chunks());
    let states_of_segment = chunks * states_of_chunk(shape);
    let (a_log_parts, rest) = op.scratch.split_at(parts * shape.value_heads);
    let (dt_bias_parts, rest) = rest.split_at(parts * shape.value_heads);
    let (dstates, rest) = rest.split_at(states_of_segment);
    let all_are_kept = shape.keeps_all_states();
    let (made_again, between) = rest.split_at(if all_are_kept { 0 } else { states_of_segment });
    let into = arguments! {
        &op.dmixed, &op.db, op.db.strides()[0], &op.da, op.da.strides()[0], &a_log_parts, &dt_bias_parts,
    };
    let [dmixed, of_states] = [&op.dmixed, &dstates].map(Argument::from);
    let dout = Argument::from(&op.dout);
    for number in (0..shape.chunks().div_ceil(chunks)).rev() {
        let first = number * chunks;
        let segment = Segment {
            shape,
            dtype: op.mixed.dtype(),
            first,
            chunks: chunks.min(shape.chunks() - first),
            layer: &layer,
        };
        let states: Argument = match all_are_kept {
            true => (&op.states).into(),
            false => {
                let kept = op.states.rows(number..op.states.dims()[0]);
                let from = ((&kept).into(), shape.kept_states());
                let made_again: Argument = (&made_again).into();
                segment.go_through(cuda, Argument::NULL, (made_again, 1), from)?;
                made_again
            }
        };
        segment.go_back(cuda, [dmixed, of_states, (&between).into(), dout])?;
        segment.gradients(cuda, &into, [dout, states, of_states])?;
    }
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
