// Products of experts: each has some of the rows, from one of `offsets` to the next, and a matrix of weights. Only the
// device knows how many rows an expert has. So a launch has as many blocks as there can be tiles of rows, and each block
// looks for its own; those that are left over do nothing.
//
// Every element of the output has one block, which adds up its products in one order.
#include "grouped.cuh"

// What a block computes of the output beside its rows, by two warps side by side and two below; how far products of bf16 go from one
// barrier to the next; and how many such stages shared memory holds: one is multiplied, the others are on their way. The
// launch code repeats these numbers.
constexpr int COLUMNS = 128, THREADS = 4 * WARP, DEPTH = 32, STAGES = 4;
// The same for f32.
constexpr int F32_DEPTH = 16;
// Sixteens of rows and eights of columns of a warp.
constexpr int SIXTEENS = ROWS / 2 / 16, EIGHTS = COLUMNS / 2 / 8;

// LONG rows of a factor at DEPTH places, in shared memory as they lie in global memory.
template <int LONG, bool BY_DEPTH> struct Held {
    static constexpr int LINES = BY_DEPTH ? DEPTH : LONG;
    typedef Tile<bf16, BY_DEPTH ? LONG : DEPTH> Of;
    static constexpr int CHUNKS = LINES * Of::PITCH;

    Of tile;

    __device__ void copy(const Factor<bf16, BY_DEPTH> &factor, int place) const {
        const int first = BY_DEPTH ? place : 0, count = factor.line_count(place);
        if (factor.table == nullptr) {
            copy_rows<LINES, THREADS>(tile, factor.lines(place), first, count);
        } else {
            copy_listed_rows<LINES, THREADS>(tile, factor.lines(place), factor.table, factor.entry + first, count);
        }
    }
    // The fragment of sixteen rows and sixteen places for the left side of a product.
    __device__ void load_left(uint32_t (&fragment)[4], int row, int place) const {
        const int lane = threadIdx.x % WARP;
        if constexpr (BY_DEPTH) {
            const int at = tile.at(place + lane / 16 * 8 + lane % 8, row / 8 + lane / 8 % 2);
            load_matrices<true>(fragment, tile.chunks, at);
        } else {
            load_matrices<false>(fragment, tile.chunks, tile.at(row + lane % 16, place / 8 + lane / 16));
        }
    }
    // Those of twice eight rows for the right side.
    __device__ void load_right(uint32_t (&fragments)[4], int row, int place) const {
        const int lane = threadIdx.x % WARP;
        if constexpr (BY_DEPTH) {
            load_matrices<true>(fragments, tile.chunks, tile.at(place + lane % 16, row / 8 + lane / 16));
        } else {
            const int at = tile.at(row + lane / 16 * 8 + lane % 8, place / 8 + lane / 8 % 2);
            load_matrices<false>(fragments, tile.chunks, at);
        }
    }
};

template <typename A, typename B>
__device__ void add_product(float (&sums)[SIXTEENS][EIGHTS][4], const A &a, int row, const B &b, int column) {
#pragma unroll
    for (int place = 0; place < DEPTH; place += 16) {
        uint32_t left[SIXTEENS][4];
#pragma unroll
        for (int f = 0; f < SIXTEENS; f++) {
            a.load_left(left[f], row + 16 * f, place);
        }
#pragma unroll
        for (int n = 0; n < EIGHTS; n += 2) {
            uint32_t right[4];
            b.load_right(right, column + 8 * n, place);
#pragma unroll
            for (int f = 0; f < SIXTEENS; f++) {
                multiply_16x8x16(sums[f][n], left[f], {right[0], right[1]});
                multiply_16x8x16(sums[f][n + 1], left[f], {right[2], right[3]});
            }
        }
    }
}

// Stores a warp's sums of rows from `row` and columns from `column` of the block's on.
template <typename O>
__device__ void store(const Output<O> &out, float (&sums)[SIXTEENS][EIGHTS][4], int row, int column) {
    const int width = out.columns - column;
#pragma unroll
    for (int f = 0; f < SIXTEENS; f++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = row + 16 * f + lane_row(2 * half);
            if (own >= out.rows) {
                continue;
            }
            O *to = out.row(own) + column;
            if (out.accumulate) {
#pragma unroll
                for (int n = 0; n < EIGHTS; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int at = 8 * n + lane_column(i);
                        sums[f][n][2 * half + i] += at < width ? widen(to[at]) : 0.0f;
                    }
                }
            }
            store_row(to, width, sums[f], half, 1.0f);
        }
    }
}

// `out = [out +] a b^T` on tensor cores. While a stage is multiplied, the next ones are on their way.
template <typename O, bool A_BY_DEPTH, bool B_BY_DEPTH>
__device__ void multiply(const Output<O> &out, const Factor<bf16, A_BY_DEPTH> &a, const Factor<bf16, B_BY_DEPTH> &b) {
    typedef Held<ROWS, A_BY_DEPTH> Left;
    typedef Held<COLUMNS, B_BY_DEPTH> Right;
    constexpr int STAGE = Left::CHUNKS + Right::CHUNKS;
    DYNAMIC_SHARED(Chunk, chunks);
    const int warp = threadIdx.x / WARP, row = warp / 2 * (ROWS / 2), column = warp % 2 * (COLUMNS / 2);
    float sums[SIXTEENS][EIGHTS][4] = {};
    const auto left = [&](int stage) { return Left{{chunks, stage * STAGE}}; };
    const auto right = [&](int stage) { return Right{{chunks, stage * STAGE + Left::CHUNKS}}; };
    const auto copy = [&](int stage, int place) {
        if (place < a.depth) {
            left(stage).copy(a, place);
            right(stage).copy(b, place);
        }
        // Also an empty one, so that a stage's group is always equally old when it is waited for.
        close_copy_group();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        copy(stage, stage * DEPTH);
    }
    int stage = 0;
    for (int place = 0; place < a.depth; place += DEPTH) {
        wait_for_copy_groups<STAGES - 2>();
        // The stage is there for all, and all are through with the one before, whose place the newest one takes.
        __syncthreads();
        copy(stage == 0 ? STAGES - 1 : stage - 1, place + (STAGES - 1) * DEPTH);
        add_product(sums, left(stage), row, right(stage), column);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_for_copies();
    store(out, sums, row, column);
}

// Copies LONG rows of a factor at F32_DEPTH places to `tile`, by depth, with zeros beyond its end. Neighbouring threads
// read neighbouring elements.
template <bool IS_LISTED, int LONG, bool BY_DEPTH>
__device__ void copy_f32_lines(SharedArray<float> tile, int pitch, const Factor<float, BY_DEPTH> &factor, int start) {
#pragma unroll (IS_LISTED ? 4 : 8)
    for (int i = threadIdx.x; i < LONG * F32_DEPTH; i += THREADS) {
        const int row = BY_DEPTH ? i % LONG : i / F32_DEPTH, place = BY_DEPTH ? i / LONG : i % F32_DEPTH;
        const bool exists = row < factor.count && start + place < factor.depth;
        tile[place * pitch + row] = exists ? factor.template at<IS_LISTED>(row, start + place) : 0.0f;
    }
}

template <int LONG, bool BY_DEPTH>
__device__ void copy_f32(SharedArray<float> tile, int pitch, const Factor<float, BY_DEPTH> &factor, int start) {
    if (factor.table == nullptr) {
        copy_f32_lines<false, LONG>(tile, pitch, factor, start);
    } else {
        copy_f32_lines<true, LONG>(tile, pitch, factor, start);
    }
}

// The same of f32, with ordinary multiply-adds. A lane has the elements that tensor cores would give it.
template <typename O, bool A_BY_DEPTH, bool B_BY_DEPTH>
__device__ void multiply(const Output<O> &out, const Factor<float, A_BY_DEPTH> &a, const Factor<float, B_BY_DEPTH> &b) {
    constexpr int A_PITCH = ROWS + 1, B_PITCH = COLUMNS + 1;
    SHARED(float, a_tile, F32_DEPTH * A_PITCH);
    SHARED(float, b_tile, F32_DEPTH * B_PITCH);
    const int warp = threadIdx.x / WARP, row = warp / 2 * (ROWS / 2), column = warp % 2 * (COLUMNS / 2);
    float sums[SIXTEENS][EIGHTS][4] = {};
    for (int start = 0; start < a.depth; start += F32_DEPTH) {
        copy_f32<ROWS>(a_tile, A_PITCH, a, start);
        copy_f32<COLUMNS>(b_tile, B_PITCH, b, start);
        __syncthreads();
#pragma unroll 2
        for (int place = 0; place < F32_DEPTH; place++) {
            float left[SIXTEENS][2];
#pragma unroll
            for (int f = 0; f < SIXTEENS; f++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    left[f][half] = a_tile[place * A_PITCH + row + 16 * f + lane_row(2 * half)];
                }
            }
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
                const int at = place * B_PITCH + column + 8 * n;
                const float right[2] = {b_tile[at + lane_column(0)], b_tile[at + lane_column(1)]};
#pragma unroll
                for (int f = 0; f < SIXTEENS; f++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        sums[f][n][i] += left[f][i / 2] * right[i % 2];
                    }
                }
            }
        }
        __syncthreads();
    }
    store(out, sums, row, column);
}

// `out [r, n] = x [r, m] weights_i^T`, with `weights [e, n, m]`, or BY_COLUMNS `[e, m, n]`. Blocks along x for tiles of
// rows, of which neighbours may read the same weights, and along y for tiles of columns.
template <typename T, bool BY_COLUMNS>
__device__ void grouped_matmul(T *out, ExpertRows<T> x, const T *weights, const int *offsets, int experts, size_t m,
                               size_t n) {
    const Rows rows = rows_of_tile(offsets, experts, int(blockIdx.x));
    if (rows.count <= 0) {
        return;
    }
    const size_t column = size_t(blockIdx.y) * COLUMNS;
    const T *own = weights + size_t(rows.expert) * m * n + (BY_COLUMNS ? column : column * m);
    const Output<T> part = {out + size_t(rows.first) * n + column, n, rows.count, int(n - column), 0};
    const auto a = x.template factor<false>(size_t(rows.first), m, 0, rows.count, int(m));
    const Factor<T, BY_COLUMNS> b = {own, unsigned(BY_COLUMNS ? n : m), part.columns, int(m), nullptr, 0};
    multiply(part, a, b);
}

// `out_i [n, m] = [out_i +] dy^T x` of each expert's rows; one without rows gets zeros, or keeps what it has. Blocks
// along x for tiles of columns, along y for tiles of rows, along z for experts.
template <typename G, typename T>
__device__ void grouped_gradient(G *out, ExpertRows<T> dy, ExpertRows<T> x, const int *offsets, size_t n, size_t m,
                                 int accumulate) {
    const size_t first = offsets[blockIdx.z], row = size_t(blockIdx.y) * ROWS, column = size_t(blockIdx.x) * COLUMNS;
    const int depth = offsets[blockIdx.z + 1] - int(first);
    if (depth <= 0 && accumulate) {
        return;
    }
    G *own = out + (size_t(blockIdx.z) * n + row) * m + column;
    const Output<G> part = {own, m, int(n - row), int(m - column), accumulate};
    const auto a = dy.template factor<true>(first, n, row, part.rows, depth);
    const auto b = x.template factor<true>(first, m, column, part.columns, depth);
    multiply(part, a, b);
}

#define PRODUCT(T, name, by_columns)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                      \
        name(T *out, const T *x, const int *row_token, const T *weights, const int *offsets, int experts,      \
             size_t m, size_t n) {                                                                             \
        grouped_matmul<T, by_columns>(out, {x, row_token}, weights, offsets, experts, m, n);                   \
    }                                                                                                          \
    EXPORT(name)

PRODUCT(float, grouped_matmul_f32, false);
PRODUCT(bf16, grouped_matmul_bf16, false);
PRODUCT(float, grouped_matmul_by_columns_f32, true);
PRODUCT(bf16, grouped_matmul_by_columns_bf16, true);

#define GRADIENT(G, T, name)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                      \
        grouped_gradient_##name(G *out, const T *dy, const int *dy_token, const T *x, const int *x_token,      \
                                const int *offsets, size_t n, size_t m, int accumulate) {                      \
        grouped_gradient<G, T>(out, {dy, dy_token}, {x, x_token}, offsets, n, m, accumulate);                  \
    }                                                                                                          \
    EXPORT(grouped_gradient_##name)

GRADIENT(float, float, f32_f32);
GRADIENT(float, bf16, f32_bf16);
GRADIENT(bf16, float, bf16_f32);
GRADIENT(bf16, bf16, bf16_bf16);
