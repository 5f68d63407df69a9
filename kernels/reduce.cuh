// Reductions over a warp and over a block, in an order that depends on nothing but the block's size.
#pragma once

#include "kernel.cuh"

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int WARP = 32;
constexpr int WARPS_MAX = 32;

struct Sum {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};

// NaN is passed over.
struct Largest {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Every lane receives the same bits: both partners of an exchange combine the same two values.
template <typename T, typename Combine> __device__ T warp_reduce(T x, Combine combine) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        x = combine(x, __shfl_xor_sync(WHOLE_WARP, x, distance));
    }
    return x;
}

// Every thread of a block of whole warps receives the result. Threads are along x, or the caller numbers them.
template <typename T, typename Combine>
__device__ T block_reduce(T x, T neutral, Combine combine, unsigned thread = threadIdx.x, unsigned threads = blockDim.x) {
    SHARED(T, parts, WARPS_MAX);
    const int warp = thread / WARP, lane = thread % WARP;
    x = warp_reduce(x, combine);
    // Whoever still reads the parts of an earlier reduction comes first.
    __syncthreads();
    if (lane == 0) {
        parts[warp] = x;
    }
    __syncthreads();
    x = neutral;
    if (lane < int(threads) / WARP) {
        x = parts[lane];
    }
    return warp_reduce(x, combine);
}

template <typename T> __device__ T block_sum(T x) { return block_reduce(x, T(0), Sum()); }

// What a thread of a single block adds up of many sums; `block_sum` adds up the threads'.
__device__ inline double sum_of_grains(const double *grains, size_t count) {
    // So many are loaded before the first is added: one block alone waits long for each.
    constexpr int AHEAD = 8;
    double sum = 0.0;
    size_t grain = threadIdx.x;
    for (; grain + (AHEAD - 1) * blockDim.x < count; grain += AHEAD * blockDim.x) {
        double next[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            next[i] = grains[grain + i * blockDim.x];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            sum += next[i];
        }
    }
    for (; grain < count; grain += blockDim.x) {
        sum += grains[grain];
    }
    return sum;
}

// The row that this thread works on. Threads along x share a row: a block's, or lanes of a warp, a power of two of them,
// where rows are narrow; then a block has as many rows as threads along y.
__device__ inline size_t own_row() { return size_t(blockIdx.x) * blockDim.y + threadIdx.y; }

// Every lane of a row, or of the warp where a row has more, receives the same sum.
template <typename T> __device__ T lanes_sum(T x) {
#pragma unroll
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
        if (distance < blockDim.x) {
            x += __shfl_xor_sync(WHOLE_WARP, x, distance);
        }
    }
    return x;
}

// Every thread of a row receives its `COUNT` sums. All threads of the block take part, with rows or without, and pass 0
// and 1 as `turn` in turns: then a barrier is enough, since whoever still reads the parts of one turn has not come to
// the barrier of the next.
template <int COUNT> __device__ void row_sums(float (&sums)[COUNT], int turn) {
    SHARED(float, parts, 2 * COUNT * WARPS_MAX);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        sums[i] = lanes_sum(sums[i]);
    }
    if (blockDim.x <= WARP) {
        return;
    }
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, place = turn * COUNT * WARPS_MAX;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (lane == 0) {
            parts[place + i * WARPS_MAX + warp] = sums[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float part = 0.0f;
        if (lane < int(blockDim.x) / WARP) {
            part = parts[place + i * WARPS_MAX + lane];
        }
        sums[i] = warp_reduce(part, Sum());
    }
}

__device__ inline float block_largest(float x) { return block_reduce(x, -FLT_MAX, Largest()); }
