//! The number of blocks and threads of a launch. It depends only on shapes, so results do too.

use crate::{KernelError, Result};

/// Elements that a thread works on at a time: `PACK` in `pack.cuh`.
pub(super) const PACK: usize = 8;

pub(super) const WARP: usize = 32;

/// Threads of a block that works on a piece of a flat tensor.
const FLAT_THREADS: usize = 256;

/// Most threads of a block that works on a row.
pub(super) const ROW_THREADS_MAX: usize = 512;

/// Packs of a row that a thread holds, and most threads of a block of such rows: as in `row.cuh`.
const ROW_PACKS: usize = 4;
const HELD_ROW_THREADS: usize = 256;

/// Threads of a block whose rows are narrow: as in `norm_backward.cuh`.
const NARROW_THREADS: usize = 256;

/// Packs of columns that a block sums, and most threads that share their rows: as in `columns.cuh`.
const COLUMN_PACKS: usize = 4;
const ROW_LANES_MAX: usize = 128;

/// Blocks of a launch along y and z.
const BLOCKS_MAX: usize = 65_535;

/// Blocks and threads of a launch, and the dynamic shared memory of each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) grid: [usize; 3],
    pub(super) block: [usize; 3],
    pub(super) shared_bytes: usize,
}

impl Extent {
    /// Blocks without dynamic shared memory.
    pub(super) fn new(grid: [usize; 3], block: [usize; 3]) -> Extent {
        Extent {
            grid,
            block,
            shared_bytes: 0,
        }
    }

    /// One pack per thread.
    pub(super) fn flat(elements: usize) -> Extent {
        Extent::new(
            [elements.div_ceil(FLAT_THREADS * PACK), 1, 1],
            [FLAT_THREADS, 1, 1],
        )
    }

    /// One row per block, and one pack per thread up to the most threads of a block.
    pub(super) fn rows(rows: usize, width: usize) -> Extent {
        let threads = width.div_ceil(PACK).next_multiple_of(WARP);
        Extent::new([rows, 1, 1], [threads.clamp(WARP, ROW_THREADS_MAX), 1, 1])
    }

    /// One row per block, or several if they are narrow. A lane has one pack; a row has a power of two of lanes.
    pub(super) fn narrow_rows(rows: usize, width: usize) -> Extent {
        if width > WARP * PACK {
            return Extent::rows(rows, width);
        }
        Extent::lanes(rows, width.div_ceil(PACK).next_power_of_two())
    }

    /// One row per block, or several if they are a warp's or narrow. A thread holds [`ROW_PACKS`] packs of a row.
    pub(super) fn held_rows(rows: usize, width: usize) -> Extent {
        let threads = width.div_ceil(PACK * ROW_PACKS);
        if threads <= WARP {
            return Extent::lanes(rows, threads.next_power_of_two());
        }
        let threads = threads.next_multiple_of(WARP).min(HELD_ROW_THREADS);
        Extent::new([rows, 1, 1], [threads, 1, 1])
    }

    /// `lanes` lanes of a warp, a power of two, for each of `rows` rows.
    pub(super) fn lanes(rows: usize, lanes: usize) -> Extent {
        let at_a_time = NARROW_THREADS / lanes;
        Extent::new([rows.div_ceil(at_a_time), 1, 1], [lanes, at_a_time, 1])
    }

    /// Blocks that share the columns of `Extent::columns`.
    pub(super) fn column_blocks(width: usize) -> usize {
        width.div_ceil(COLUMN_PACKS * PACK)
    }

    /// Sums over `rows` rows in `parts` parts, for `column_sums` of `columns.cuh`.
    pub(super) fn columns(rows: usize, width: usize, parts: usize) -> Extent {
        let lanes = rows.next_power_of_two();
        let lanes = lanes.clamp(WARP / COLUMN_PACKS, ROW_LANES_MAX);
        let grid = [Extent::column_blocks(width), parts, 1];
        Extent::new(grid, [COLUMN_PACKS, lanes, 1])
    }

    /// Blocks of `threads` threads. Each block works on `rows` rows, with one pack of columns per thread.
    pub(super) fn rows_by_columns(rows: usize, width: usize, threads: usize) -> Extent {
        Extent::new([rows, width.div_ceil(threads * PACK), 1], [threads, 1, 1])
    }

    pub(super) fn blocks(&self) -> usize {
        self.grid.iter().product()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }

    /// Grid and block of the launch; an error if they exceed its limits.
    pub(super) fn checked(&self, operation: &'static str) -> Result<([u32; 3], [u32; 3])> {
        let [x, y, z] = self.grid;
        if x > i32::MAX as usize || y > BLOCKS_MAX || z > BLOCKS_MAX {
            return Err(KernelError::too_large(
                operation,
                format!("{x} x {y} x {z} blocks are more than a launch may have"),
            ));
        }
        Ok((
            self.grid.map(|blocks| blocks as u32),
            self.block.map(|threads| threads as u32),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_cover_their_tensors_with_whole_warps() {
        for (rows, width) in [
            (1, 1),
            (1, 48),
            (3, 20_000),
            (400, 131),
            (3000, 20),
            (70, 128),
        ] {
            let by_columns = Extent::rows_by_columns(rows, width, 256);
            assert!(by_columns.grid[1] * 256 * PACK >= width);
            let columns = Extent::columns(rows, width, 1);
            assert!(columns.grid[0] * COLUMN_PACKS * PACK >= width);
            assert!(columns.block[1].is_power_of_two());
            let flat = Extent::flat(rows * width);
            assert!(flat.grid[0] * flat.block[0] * PACK >= rows * width);
            let whole = Extent::rows(rows, width);
            let [narrow, held] = [
                Extent::narrow_rows(rows, width),
                Extent::held_rows(rows, width),
            ];
            for extent in [narrow, held] {
                assert!(extent.grid[0] * extent.block[1] >= rows);
                assert!(extent.block[0].is_power_of_two() || extent.block[1] == 1);
            }
            for extent in [columns, flat, whole, narrow, held, by_columns] {
                let threads: usize = extent.block.iter().product();
                assert!(
                    threads.is_multiple_of(WARP) && threads <= 1024,
                    "{extent:?}"
                );
            }
        }
    }

    #[test]
    fn too_many_blocks_are_refused() {
        let error = Extent::new([1, BLOCKS_MAX + 1, 1], [WARP, 1, 1]);
        assert_eq!(error.checked("copy").unwrap_err().operation, "copy");
        assert!(Extent::rows(1 << 31, 8).checked("rms_norm").is_err());
    }
}
