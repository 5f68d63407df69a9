// Sums over the rows of a matrix, column by column, without atomics: parts of the rows, which `columns.cu` adds.
#pragma once

#include "pack.cuh"
#include "reduce.cuh"

// A block sums a warp's width of columns. Its threads along y walk the rows, each every blockDim.y-th; their sums are
// added pairwise within a warp, then warp by warp. So the order of a sum depends on the matrix's shape alone.
constexpr int COLUMN_PACKS = 4;
constexpr int ROW_LANES_MAX = 128;
static_assert(COLUMN_PACKS * PACK == WARP, "a warp has a lane for each of a block's columns");

// Rows that a thread asks for before it adds the first.
constexpr int ROWS_AHEAD = 4;

// First column of this thread's pack.
__device__ inline size_t column_pack() {
    return (size_t(blockIdx.x) * COLUMN_PACKS + threadIdx.x) * PACK;
}

__device__ inline int column_thread() { return threadIdx.y * COLUMN_PACKS + threadIdx.x; }

// The lanes of the first warp receive the sums over rows `start` to `end`, each that of one column; other warps, nothing.
// `term(wide, row)` is a thread's pack of a row; blockDim is COLUMN_PACKS by a power of two, at least a warp. `wide`:
// whether this thread's packs of all rows are.
template <typename Term> __device__ float column_sums(size_t start, size_t end, bool wide, Term term) {
    Pack sums = {};
    knowing(wide, [&](auto known_wide) {
        size_t row = start + threadIdx.y;
        for (; row + (ROWS_AHEAD - 1) * blockDim.y < end; row += ROWS_AHEAD * blockDim.y) {
            Pack terms[ROWS_AHEAD];
#pragma unroll
            for (int i = 0; i < ROWS_AHEAD; i++) {
                terms[i] = term(known_wide, row + i * blockDim.y);
            }
#pragma unroll
            for (int i = 0; i < ROWS_AHEAD; i++) {
                add(sums, terms[i]);
            }
        }
#pragma unroll 1
        for (; row < end; row += blockDim.y) {
            add(sums, term(known_wide, row));
        }
    });
#pragma unroll
    for (int distance = WARP / 2; distance >= COLUMN_PACKS; distance /= 2) {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            sums.at[i] += __shfl_down_sync(WHOLE_WARP, sums.at[i], distance);
        }
    }
    SHARED(float, of_warps, ROW_LANES_MAX * COLUMN_PACKS);
    const int warp = column_thread() / WARP, lane = column_thread() % WARP;
    if (lane < COLUMN_PACKS) {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            of_warps[warp * WARP + lane * PACK + i] = sums.at[i];
        }
    }
    __syncthreads();
    float sum = 0.0f;
    if (warp == 0) {
        for (int other = 0; other < int(blockDim.y) * COLUMN_PACKS / WARP; other++) {
            sum += of_warps[other * WARP + lane];
        }
    }
    return sum;
}

// Stores what `column_sums` gave, or adds it to what is there, at `place(column)` of each of `width` columns.
template <typename G, typename Place>
__device__ void store_column_sums(size_t width, float sum, int accumulate, Place place) {
    const size_t column = size_t(blockIdx.x) * WARP + column_thread();
    if (column_thread() < WARP && column < width) {
        G *const out = place(column);
        *out = narrow<G>(accumulate ? sum + widen(*out) : sum);
    }
}
