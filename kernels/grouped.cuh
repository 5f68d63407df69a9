// What both kinds of products of experts (`grouped_matmul.cu`, `grouped_matmul_sm90.cu`) know: where an expert's rows are, and the
// factors of a block's product.
#pragma once

#include "tile.cuh"

// Rows of the output that a block computes at a time. The launch code repeats it.
constexpr int ROWS = 128;

// A factor of a block's product: `count` rows of `depth` elements. In memory they lie row by row, or BY_DEPTH the other
// way round: all rows' elements at a place of the depth side by side.
template <typename T, bool BY_DEPTH> struct Factor {
    const T *first;
    // From one line in memory to the next, in elements.
    unsigned stride;
    int count, depth;
    // Which line each is, from an entry on; null: the first one, and those that follow it.
    const int *table;
    unsigned entry;

    template <bool IS_LISTED> __device__ T at(int row, int place) const {
        const int line = BY_DEPTH ? place : row, element = BY_DEPTH ? row : place;
        return first[size_t(IS_LISTED ? table[entry + line] : line) * stride + element];
    }
    // What is left from a place of the depth on, by lines in memory, and how many lines there are.
    __device__ HeadRows<const T> lines(int place) const {
        return {first + (BY_DEPTH ? 0 : place), stride, BY_DEPTH ? count : depth - place};
    }
    // Whether all of its lines are whole chunks, where chunks can be accessed.
    __device__ bool in_chunks() const {
        return stride % (sizeof(Chunk) / sizeof(T)) == 0 && lines(0).in_chunks();
    }
    __device__ int line_count(int place) const { return BY_DEPTH ? depth - place : count; }
};

// Rows that are grouped by expert, from `first` on: with a table the rows of `x` that it lists.
template <typename T> struct ExpertRows {
    const T *x;
    const int *table;

    template <bool BY_DEPTH>
    __device__ Factor<T, BY_DEPTH> factor(size_t first, size_t width, size_t column, int count, int depth) const {
        return {x + (table != nullptr ? 0 : first * width) + column, unsigned(width), count, depth, table, unsigned(first)};
    }
};

// The block's part of the output: rows and columns that exist, which may be more than it computes.
template <typename O> struct Output {
    O *first;
    size_t stride;
    int rows, columns, accumulate;

    __device__ O *row(int row) const { return first + size_t(row) * stride; }
};

// Rows of one expert.
struct Rows {
    int expert, first, count;
};

// The tile of rows number `tile`, counted through all experts; no rows if there are fewer tiles. Whole warps call it.
__device__ inline Rows rows_of_tile(const int *offsets, int experts, int tile) {
    const int lane = threadIdx.x % WARP;
    int before = 0;
    for (int start = 0; start < experts; start += WARP) {
        const int expert = start + lane;
        const int first = expert < experts ? offsets[expert] : 0, end = expert < experts ? offsets[expert + 1] : 0;
        const int tiles = (end - first + ROWS - 1) / ROWS;
        int through = before + tiles;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int other = __shfl_up_sync(WHOLE_WARP, through, distance);
            through += lane >= distance ? other - before : 0;
        }
        const unsigned beyond = __ballot_sync(WHOLE_WARP, through > tile);
        if (beyond != 0) {
            const int owner = __ffs(beyond) - 1;
            const int skipped = (tile - __shfl_sync(WHOLE_WARP, through - tiles, owner)) * ROWS;
            const int begin = __shfl_sync(WHOLE_WARP, first, owner) + skipped;
            return {start + owner, begin, __shfl_sync(WHOLE_WARP, end, owner) - begin};
        }
        before = __shfl_sync(WHOLE_WARP, through, WARP - 1);
    }
    return {0, 0, 0};
}
