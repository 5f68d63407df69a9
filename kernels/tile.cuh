// Matrices in shared memory, and a warp's products with them: bf16 on tensor cores, f32 with ordinary multiply-adds.
//
// A warp's sums are tiles of 16 rows by 8 columns, of which each lane has the four elements that tensor cores give it,
// whatever the type: see `lane_row` and `lane_column`.
#pragma once

#include "mma.cuh"
#include "reduce.cuh"

// Rows of D elements in chunks. A chunk of padding makes their number odd: eight rows' chunks, which is what one phase
// of a load reads, lie in different banks.
template <typename T, int D> struct Tile {
    static constexpr int PER_CHUNK = sizeof(Chunk) / sizeof(T);
    static constexpr int CHUNKS = D / PER_CHUNK;
    static constexpr int PITCH = CHUNKS + 1;
    static_assert(CHUNKS % 2 == 0, "two chunks of bf16 are a step of a product");

    SharedElements<Chunk> chunks;
    int first;

    __device__ int at(int row, int chunk) const { return first + row * PITCH + chunk; }
    // The tile after this one of `rows` rows.
    __device__ Tile next(int rows) const { return {chunks, first + rows * PITCH}; }
};

// Of the element `i` of a lane's four, in a tile of sums.
__device__ inline int lane_row(int i) { return threadIdx.x % WARP / 4 + i / 2 * 8; }
__device__ inline int lane_column(int i) { return threadIdx.x % 4 * 2 + i % 2; }

// Combines the values of the four lanes that share rows of a tile of sums; every one of them receives the result.
template <typename Combine> __device__ float row_reduce(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return combine(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

// Rows of one head in a tensor of tokens by heads.
template <typename T> struct HeadRows {
    T *first;
    // From a row to the next, in elements: those of a token, which are fewer than 2^32.
    unsigned stride;
    // Elements of a row.
    int width;

    __device__ T *row(unsigned row) const { return first + size_t(row) * stride; }
    // Whether rows are whole chunks, where chunks can be accessed.
    __device__ bool in_chunks() const {
        constexpr int per_chunk = sizeof(Chunk) / sizeof(T);
        return width % per_chunk == 0 && reinterpret_cast<uintptr_t>(first) % sizeof(Chunk) == 0;
    }
};

// The chunk of which the first `count` elements are given; the others are zero.
template <typename T> __device__ Chunk partial_chunk(const T *elements, int count) {
    alignas(16) T values[sizeof(Chunk) / sizeof(T)];
#pragma unroll
    for (int i = 0; i < int(sizeof(Chunk) / sizeof(T)); i++) {
        values[i] = i < count ? elements[i] : narrow<T>(0.0f);
    }
    return *reinterpret_cast<const Chunk *>(values);
}

// Copies `count` rows from row `first` on, and zeros where the tile is wider or has more rows. Complete after
// `wait_for_copies` and a barrier.
template <int ROWS, int THREADS, typename T, int D>
__device__ void copy_rows(Tile<T, D> tile, HeadRows<const T> rows, int first, int count) {
    typedef Tile<T, D> Of;
    // A thread copies the same chunk of rows that lie so far apart: a number of copies that the compiler knows.
    constexpr int STEP = THREADS / Of::CHUNKS;
    static_assert(THREADS % Of::CHUNKS == 0 && ROWS % STEP == 0, "every thread has as many chunks as the others");
    const int own = threadIdx.x / Of::CHUNKS, chunk = threadIdx.x % Of::CHUNKS, element = chunk * Of::PER_CHUNK;
    // So are those of some tokens.
    const unsigned stride = STEP * rows.stride, offset = own * rows.stride + element;
    const T *from = rows.row(first) + offset;
    const int to = tile.at(own, chunk), given = rows.width - element, left = count - own;
    if (rows.in_chunks()) {
        const int existing = given > 0 ? left : 0;
#pragma unroll
        for (int row = 0; row < ROWS; row += STEP, from += stride) {
            copy_async(tile.chunks, to + row * Of::PITCH, reinterpret_cast<const Chunk *>(from), row < existing);
        }
    } else {
#pragma unroll 1
        for (int row = 0; row < ROWS; row += STEP, from += stride) {
            tile.chunks[to + row * Of::PITCH] = partial_chunk(from, row < left ? given : 0);
        }
    }
}

// The same of the `count` rows that `table` lists from an entry on.
template <int ROWS, int THREADS, typename T, int D>
__device__ void copy_listed_rows(Tile<T, D> tile, HeadRows<const T> rows, const int *table, unsigned entry, int count) {
    typedef Tile<T, D> Of;
    constexpr int STEP = THREADS / Of::CHUNKS;
    static_assert(THREADS % Of::CHUNKS == 0 && ROWS % STEP == 0, "every thread has as many chunks as the others");
    const int own = threadIdx.x / Of::CHUNKS, chunk = threadIdx.x % Of::CHUNKS, element = chunk * Of::PER_CHUNK;
    const int to = tile.at(own, chunk), given = rows.width - element, left = count - own;
    entry += own;
    if (rows.in_chunks()) {
        const int existing = given > 0 ? left : 0;
        // All of a thread's entries are on their way before it waits for the first.
        unsigned listed[ROWS / STEP];
#pragma unroll
        for (int row = 0; row < ROWS; row += STEP) {
            listed[row / STEP] = row < existing ? table[entry + row] : 0;
        }
#pragma unroll
        for (int row = 0; row < ROWS; row += STEP) {
            const T *from = rows.row(listed[row / STEP]) + element;
            copy_async(tile.chunks, to + row * Of::PITCH, reinterpret_cast<const Chunk *>(from), row < existing);
        }
    } else {
#pragma unroll 1
        for (int row = 0; row < ROWS; row += STEP) {
            const T *from = rows.row(row < left ? table[entry + row] : 0) + element;
            tile.chunks[to + row * Of::PITCH] = partial_chunk(from, row < left ? given : 0);
        }
    }
}

// Stores the first `width` of a row's elements that this lane has in tiles of sums; `half` 0 is the upper row.
template <int N, typename T>
__device__ void store_row(T *row, int width, const float (&sums)[N][4], int half, float factor) {
    struct alignas(2 * sizeof(T)) Pair {
        T left, right;
    };
    const bool in_pairs = width % 2 == 0 && reinterpret_cast<uintptr_t>(row) % sizeof(Pair) == 0;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int column = 8 * n + lane_column(0);
        const Pair pair = {narrow<T>(sums[n][2 * half] * factor), narrow<T>(sums[n][2 * half + 1] * factor)};
        if (in_pairs && column < width) {
            *reinterpret_cast<Pair *>(row + column) = pair;
        } else if (column < width) {
            row[column] = pair.left;
            if (column + 1 < width) {
                row[column + 1] = pair.right;
            }
        }
    }
}

// sums [16 F, 8 N] += a [16 F rows from `row`, D] b [8 N, D]^T. What is loaded of b serves all F of a warp's sixteens
// of rows.
template <int F, int N, int D>
__device__ void add_product(float (&sums)[F][N][4], Tile<bf16, D> a, int row, Tile<bf16, D> b) {
    const int lane = threadIdx.x % WARP;
    // Where a lane starts, apart from what the loops add to it: loads take a number that is known as part of the
    // instruction.
    const int of_a = a.at(row + lane % 16, lane / 16), of_b = b.at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left[F][4];
#pragma unroll
        for (int f = 0; f < F; f++) {
            load_matrices<false>(left[f], a.chunks, of_a + 16 * f * a.PITCH + 2 * k);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t right[4];
            load_matrices<false>(right, b.chunks, of_b + 8 * n * b.PITCH + 2 * k);
#pragma unroll
            for (int f = 0; f < F; f++) {
                multiply_16x8x16(sums[f][n], left[f], {right[0], right[1]});
                multiply_16x8x16(sums[f][n + 1], left[f], {right[2], right[3]});
            }
        }
    }
}

__device__ inline uint32_t bf16_pair(float lower, float upper) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lower, upper);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// sums [16 F, 8 C] += weights [16 F, 8 N] b [8 N, 8 C columns from 8 `eight` on]; weights are rounded to bf16.
template <int F, int N, int C, int D>
__device__ void add_weighted(float (&sums)[F][C][4], const float (&weights)[F][N][4], Tile<bf16, D> b, int eight) {
    const int lane = threadIdx.x % WARP, of_b = b.at(lane % 16, eight + lane / 16);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t left[F][4];
#pragma unroll
        for (int f = 0; f < F; f++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&eight)[4] = weights[f][k + i / 2];
                left[f][i] = bf16_pair(eight[i % 2 * 2], eight[i % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int c = 0; c < C; c += 2) {
            uint32_t right[4];
            load_matrices<true>(right, b.chunks, of_b + 8 * k * b.PITCH + c);
#pragma unroll
            for (int f = 0; f < F; f++) {
                multiply_16x8x16(sums[f][c], left[f], {right[0], right[1]});
                multiply_16x8x16(sums[f][c + 1], left[f], {right[2], right[3]});
            }
        }
    }
}

template <int D> __device__ float4 floats(Tile<float, D> tile, int row, int chunk) {
    const Chunk values = tile.chunks[tile.at(row, chunk)];
    return *reinterpret_cast<const float4 *>(&values);
}

__device__ inline float dot(float sum, float4 a, float4 b) {
    return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// As for bf16, of one sixteen of rows.
template <int N, int D>
__device__ void add_product(float (&sums)[1][N][4], Tile<float, D> a, int row, Tile<float, D> b) {
#pragma unroll 2
    for (int chunk = 0; chunk < D / 4; chunk++) {
        const float4 upper = floats(a, row + lane_row(0), chunk), lower = floats(a, row + lane_row(2), chunk);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float4 left = floats(b, 8 * n + lane_column(0), chunk);
            const float4 right = floats(b, 8 * n + lane_column(1), chunk);
            sums[0][n][0] = dot(sums[0][n][0], upper, left);
            sums[0][n][1] = dot(sums[0][n][1], upper, right);
            sums[0][n][2] = dot(sums[0][n][2], lower, left);
            sums[0][n][3] = dot(sums[0][n][3], lower, right);
        }
    }
}

// As for bf16, of one sixteen of rows; nothing is rounded.
template <int N, int C, int D>
__device__ void add_weighted(float (&sums)[1][C][4], const float (&weights)[1][N][4], Tile<float, D> b, int eight) {
    const int lane = threadIdx.x % WARP, part = lane_column(0) / 4;
    const bool is_second_pair = lane_column(0) % 4 != 0;
#pragma unroll
    for (int n = 0; n < N; n++) {
        // Lane by lane of the four that have these weights, in code as long as one.
#pragma unroll 1
        for (int of = 0; of < 4; of++) {
            const int owner = lane / 4 * 4 + of;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float upper = __shfl_sync(WHOLE_WARP, weights[0][n][i], owner);
                const float lower = __shfl_sync(WHOLE_WARP, weights[0][n][2 + i], owner);
                const int row = 8 * n + 2 * of + i;
#pragma unroll
                for (int c = 0; c < C; c++) {
                    const float4 four = floats(b, row, 2 * (eight + c) + part);
                    const float left = is_second_pair ? four.z : four.x, right = is_second_pair ? four.w : four.y;
                    sums[0][c][0] += upper * left;
                    sums[0][c][1] += upper * right;
                    sums[0][c][2] += lower * left;
                    sums[0][c][3] += lower * right;
                }
            }
        }
    }
}
