// Sums over the rows of a matrix, column by column, without atomics or scratch.
#pragma once

#include "pack.cuh"

// A block sums COLUMN_PACKS packs of columns. Its threads along y walk the rows, each every blockDim.y-th; their sums
// are then added pairwise. So the order of a sum depends on the number of rows alone.
//
// Few columns mean few blocks: 4096 columns occupy 128 multiprocessors, 1024 only 32.
constexpr int COLUMN_PACKS = 4;
constexpr int ROW_LANES_MAX = 128;

// First column of this thread's pack.
__device__ inline size_t column_pack() {
    return (size_t(blockIdx.x) * COLUMN_PACKS + threadIdx.x) * PACK;
}

// Threads whose threadIdx.y is 0 receive the sums over all rows of `term(row)`, a pack; blockDim is COLUMN_PACKS by a
// power of two.
template <typename Term> __device__ Pack column_sums(size_t rows, Term term) {
    Pack sums = {};
    for (size_t row = threadIdx.y; row < rows; row += blockDim.y) {
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
