//! Kernels of flash attention in bf16 for Hopper: `flash_forward_sm90.cu` and `flash_backward_sm90.cu`.

use super::{Pass, Passes};
use crate::AttentionShape;
use crate::cuda::{Kernel, kernel};
use memory::DType;

/// Threads of a group. One copies for all, the others multiply.
const GROUP: usize = 128;

/// The narrowest heads that these kernels take. Of narrower ones, products of groups would mostly multiply zeros.
const NARROWEST: usize = 33;

/// How the blocks of a pass work: `Sizes` in the sources.
struct Blocks {
    /// Queries, or keys, that a block keeps.
    rows: usize,
    /// Rows of a tile that it goes over.
    tile: usize,
    /// Tiles in shared memory: of keys or queries, and of values or `dout`.
    stages: [usize; 2],
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

const fn blocks(rows: usize, tile: usize, stages: [usize; 2], groups: usize) -> Blocks {
    Blocks {
        rows,
        tile,
        stages,
        groups,
    }
}

const KERNELS: [Kernels; 4] = [
    Kernels {
        widths: [64, 64],
        forward: blocks(192, 112, [2, 2], 3),
        query_gradients: blocks(128, 128, [3, 3], 2),
        key_gradients: blocks(128, 96, [3, 3], 2),
    },
    Kernels {
        widths: [128, 128],
        forward: blocks(128, 128, [2, 2], 2),
        query_gradients: blocks(128, 128, [2, 2], 2),
        key_gradients: blocks(128, 64, [3, 3], 2),
    },
    Kernels {
        widths: [192, 128],
        forward: blocks(128, 112, [2, 2], 2),
        query_gradients: blocks(128, 64, [3, 3], 2),
        key_gradients: blocks(64, 64, [3, 3], 2),
    },
    Kernels {
        widths: [256, 256],
        forward: blocks(128, 80, [2, 2], 2),
        query_gradients: blocks(128, 64, [2, 1], 2),
        key_gradients: blocks(64, 64, [2, 2], 2),
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
    /// The pass of a kernel. In shared memory a block keeps rows of `kept` bytes, and stages of rows of `staged` bytes, with barriers.
    fn pass(&self, kernel: Kernel, kept: usize, staged: [usize; 2]) -> Pass {
        /// Two of a stage, of 8 bytes each; and that of the rows that are kept, as a chunk with room for a sink.
        const BARRIERS: usize = 2 * 8;
        let stages = self.stages.iter().zip(staged);
        let stages = stages.map(|(count, bytes)| count * (self.tile * bytes + BARRIERS));
        Pass {
            kernel,
            rows: self.rows,
            threads: GROUP * (1 + self.groups),
            shared_bytes: self.rows * kept + stages.sum::<usize>() + 16,
        }
    }
}

impl Kernels {
    fn passes(&self) -> Passes {
        // Bytes of a row of queries or keys, and of one of values or `dout`.
        let [width, _] = self.widths;
        let [own, of_values] = self.widths.map(|width| 2 * width);
        let both = own + of_values;
        let mut key_gradients = self.key_gradients.pass(
            kernel_of_width!("flash_backward_sm90", "flash_backward_keys_sm90", width),
            both,
            [own, of_values],
        );
        // A stage also holds three numbers of each query, and two of all of them, in whole chunks.
        let known = (12 * self.key_gradients.tile + 8).next_multiple_of(16);
        key_gradients.shared_bytes += self.key_gradients.stages[0] * known;
        Passes {
            forward: self.forward.pass(
                kernel_of_width!("flash_forward_sm90", "flash_forward_sm90", width),
                own,
                [own, of_values],
            ),
            query_gradients: self.query_gradients.pass(
                kernel_of_width!("flash_backward_sm90", "flash_backward_queries_sm90", width),
                both,
                [own, of_values],
            ),
            key_gradients,
        }
    }
}

/// The passes for a shape; none for heads, and for caps on scores, that only the kernels for all GPUs take.
pub(super) fn passes(shape: AttentionShape) -> Option<Passes> {
    if shape.cap.is_some() {
        return None;
    }
    let [qk, v] = shape.head_dims();
    let fits = |kernels: &&Kernels| qk <= kernels.widths[0] && v <= kernels.widths[1];
    let found = KERNELS.iter().find(fits).filter(|_| qk.max(v) >= NARROWEST);
    found.map(Kernels::passes)
}

/// Whether there are kernels for Hopper of flash attention of a shape and a type.
pub fn flash_has_sm90(shape: AttentionShape, dtype: DType) -> bool {
    dtype == DType::BF16 && passes(shape).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Positive;

    #[test]
    fn capped_scores_have_no_kernels_for_hopper() {
        let plain = AttentionShape::new([1, 100], [2, 1], 128);
        let cap = Some(Positive::new(50.0));
        let capped = AttentionShape { cap, ..plain };
        let found = [plain, capped].map(|shape| flash_has_sm90(shape, DType::BF16));
        assert_eq!(found, [true, false]);
    }
}
