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

// Every thread of a block of whole warps along x receives the result.
template <typename T, typename Combine> __device__ T block_reduce(T x, T neutral, Combine combine) {
    SHARED(T, parts, WARPS_MAX);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    x = warp_reduce(x, combine);
    // Whoever still reads the parts of an earlier reduction comes first.
    __syncthreads();
    if (lane == 0) {
        parts[warp] = x;
    }
    __syncthreads();
    x = neutral;
    if (lane < int(blockDim.x) / WARP) {
        x = parts[lane];
    }
    return warp_reduce(x, combine);
}

template <typename T> __device__ T block_sum(T x) { return block_reduce(x, T(0), Sum()); }

// The row that this thread works on, where a block has blockDim.y: one, or as many narrow ones as it has warps.
__device__ inline size_t own_row() { return size_t(blockIdx.x) * blockDim.y + threadIdx.y; }

// Every thread of a row receives the sum.
template <typename T> __device__ T row_sum(T x) { return blockDim.y == 1 ? block_sum(x) : warp_reduce(x, Sum()); }

__device__ inline float block_largest(float x) { return block_reduce(x, -FLT_MAX, Largest()); }
