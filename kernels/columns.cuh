// Sums over the rows of a matrix, column by column, without atomics: parts of the rows, which `columns.cu` adds.
#pragma once

#include "pack.cuh"
#include "reduce.cuh"

// A block sums COLUMN_PACKS packs of columns over `part_rows` rows, the blockIdx.y-th so many: few columns alone would
// be few blocks. Its threads along y walk the rows, each every blockDim.y-th; their sums are then added pairwise. So the
// order of a sum depends on the matrix's shape alone.
constexpr int COLUMN_PACKS = 4;
constexpr int ROW_LANES_MAX = 128;

// First column of this thread's pack.
__device__ inline size_t column_pack() {
    return (size_t(blockIdx.x) * COLUMN_PACKS + threadIdx.x) * PACK;
}

// Threads whose threadIdx.y is 0 receive the sums over their part's rows of `term(wide, row)`, a pack; blockDim is
// COLUMN_PACKS by a power of two, at least a warp. `wide`: whether this thread's packs of all rows are.
template <typename Term> __device__ Pack column_sums(size_t rows, size_t part_rows, bool wide, Term term) {
    const size_t start = blockIdx.y * part_rows, end = start + part_rows < rows ? start + part_rows : rows;
    Pack sums = {};
    knowing(wide, [&](auto known_wide) {
        size_t row = start + threadIdx.y;
        // Two rows are loaded before the first is added; a part has no more for a thread unless the matrix is long.
        for (; row + blockDim.y < end; row += 2 * blockDim.y) {
            const Pack terms = term(known_wide, row), next = term(known_wide, row + blockDim.y);
            add(sums, terms);
            add(sums, next);
        }
        if (row < end) {
            add(sums, term(known_wide, row));
        }
    });
    SHARED(float, parts, ROW_LANES_MAX * COLUMN_PACKS * PACK);
    const int stride = COLUMN_PACKS * PACK, own = threadIdx.y * stride + threadIdx.x;
    // Element i of a pack lies i * COLUMN_PACKS on, so that neighbouring threads access neighbouring banks.
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        parts[own + i * COLUMN_PACKS] = sums.at[i];
    }
    // Down to the lanes of a warp, which exchange theirs.
    for (int lanes = blockDim.y / 2; lanes >= WARP / COLUMN_PACKS; lanes /= 2) {
        __syncthreads();
        if (int(threadIdx.y) < lanes) {
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                sums.at[i] += parts[own + lanes * stride + i * COLUMN_PACKS];
                parts[own + i * COLUMN_PACKS] = sums.at[i];
            }
        }
    }
#pragma unroll
    for (int distance = WARP / 2; distance >= COLUMN_PACKS; distance /= 2) {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            sums.at[i] += __shfl_down_sync(WHOLE_WARP, sums.at[i], distance);
        }
    }
    return sums;
}

// Stores a part's sums in `[parts, width]`.
__device__ inline void store_part(float *parts, size_t first, size_t width, const Pack &sums) {
    if (threadIdx.y == 0 && first < width) {
        store(parts + blockIdx.y * width, first, width, sums);
    }
}
