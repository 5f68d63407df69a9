//! Kernels of flash attention in bf16 for Hopper: `flash_forward_sm90.cu` and `flash_backward_sm90.cu`.

use super::{Pass, Passes};
use crate::AttentionShape;
use crate::cuda::{Kernel, kernel};

/// Threads of a group. One copies for all, the others multiply.
const GROUP: usize = 128;

/// Bytes of the barriers of two stages.
const BARRIERS: usize = 2 * 2 * 8;

/// Narrower heads are left to the kernels for all GPUs: products of groups would mostly multiply zeros.
const NARROWEST: usize = 33;

/// How the blocks of a pass work: `Sizes` in the sources.
struct Blocks {
    /// Queries, or keys, that a block keeps.
    rows: usize,
    /// Rows of a tile that it goes over.
    tile: usize,
    /// Groups that multiply.
    groups: usize,
}

/// The kernels for heads padded to these widths, of keys and of values.
struct Kernels {
    widths: [usize; 2],
    forward: Blocks,
    query_gradients: Blocks,
    key_gradients: Blocks,
}

const fn blocks(rows: usize, tile: usize, groups: usize) -> Blocks {
    Blocks { rows, tile, groups }
}

const KERNELS: [Kernels; 4] = [
    Kernels {
        widths: [64, 64],
        forward: blocks(192, 112, 3),
        query_gradients: blocks(128, 128, 2),
        key_gradients: blocks(128, 64, 2),
    },
    Kernels {
        widths: [128, 128],
        forward: blocks(128, 128, 2),
        query_gradients: blocks(128, 128, 2),
        key_gradients: blocks(128, 64, 2),
    },
    Kernels {
        widths: [192, 128],
        forward: blocks(128, 112, 2),
        query_gradients: blocks(128, 64, 2),
        key_gradients: blocks(64, 64, 2),
    },
    Kernels {
        widths: [256, 256],
        forward: blocks(128, 80, 2),
        query_gradients: blocks(128, 64, 2),
        key_gradients: blocks(64, 64, 2),
    },
];

/// A kernel by its name and the width of keys.
macro_rules! kernel_of_width {
    ($source:literal, $name:literal, $width:expr) => {
        kernel!(
            $source,
            match $width {
                64 => concat!($name, "_64_bf16"),
                128 => concat!($name, "_128_bf16"),
                192 => concat!($name, "_192_bf16"),
                _ => concat!($name, "_256_bf16"),
            }
        )
    };
}

impl Blocks {
    fn pass(&self, kernel: Kernel, shared_bytes: usize) -> Pass {
        Pass {
            kernel,
            rows: self.rows,
            threads: GROUP * (1 + self.groups),
            shared_bytes,
        }
    }
}

impl Kernels {
    fn passes(&self) -> Passes {
        let [qk, v] = self.widths;
        // Bytes of a row of queries or keys, and of one of values or their gradients.
        let (own, of_values) = (2 * qk, 2 * v);
        let Kernels {
            forward,
            query_gradients,
            key_gradients,
            ..
        } = self;
        Passes {
            forward: forward.pass(
                kernel_of_width!("flash_forward_sm90", "flash_forward_sm90", qk),
                forward.rows * own + 2 * forward.tile * (own + of_values) + 2 * BARRIERS + 8,
            ),
            query_gradients: query_gradients.pass(
                kernel_of_width!("flash_backward_sm90", "flash_backward_queries_sm90", qk),
                232_448,
            ),
            key_gradients: key_gradients.pass(
                kernel_of_width!("flash_backward_sm90", "flash_backward_keys_sm90", qk),
                232_448,
            ),
        }
    }
}

/// The passes for a shape; none for heads that only the kernels for all GPUs take.
pub(super) fn passes(shape: AttentionShape) -> Option<Passes> {
    let [qk, v] = shape.head_dims();
    let fits = |kernels: &&Kernels| qk <= kernels.widths[0] && v <= kernels.widths[1];
    let found = KERNELS.iter().find(fits).filter(|_| qk.max(v) >= NARROWEST);
    found.map(Kernels::passes)
}
