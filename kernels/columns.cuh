// Sums over the rows of a matrix, column by column, without atomics: parts of the rows, which `columns.cu` adds.
#pragma once

#include "pack.cuh"

// A block sums COLUMN_PACKS packs of columns over `part_rows` rows, the blockIdx.y-th so many: few columns alone would
// be few blocks. Its threads along y walk the rows, each every blockDim.y-th; their sums are then added pairwise. So the
// order of a sum depends on the matrix's shape alone.
constexpr int COLUMN_PACKS = 4;
constexpr int ROW_LANES_MAX = 128;

// First column of this thread's pack.
__device__ inline size_t column_pack() {
    return (size_t(blockIdx.x) * COLUMN_PACKS + threadIdx.x) * PACK;
}

// Threads whose threadIdx.y is 0 receive the sums over their part's rows of `term(row)`, a pack; blockDim is COLUMN_PACKS
// by a power of two.
template <typename Term> __device__ Pack column_sums(size_t rows, size_t part_rows, Term term) {
    const size_t start = blockIdx.y * part_rows, end = start + part_rows < rows ? start + part_rows : rows;
    Pack sums = {};
    // Several rows are loaded before the first is added.
#pragma unroll 4
    for (size_t row = start + threadIdx.y; row < end; row += blockDim.y) {
        const Pack terms = term(row);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            sums.at[i] += terms.at[i];
        }
    }
    SHARED(float, parts, ROW_LANES_MAX * COLUMN_PACKS * PACK);
    const int stride = COLUMN_PACKS * PACK, own = threadIdx.y * stride + threadIdx.x;
    // Element i of a pack lies i * COLUMN_PACKS on, so that neighbouring threads access neighbouring banks.
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        parts[own + i * COLUMN_PACKS] = sums.at[i];
    }
    for (int lanes = blockDim.y / 2; lanes > 0; lanes /= 2) {
        __syncthreads();
        if (int(threadIdx.y) < lanes) {
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                sums.at[i] += parts[own + lanes * stride + i * COLUMN_PACKS];
                parts[own + i * COLUMN_PACKS] = sums.at[i];
            }
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
