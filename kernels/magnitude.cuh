// Largest magnitudes: those of parts, which `abs_max_of_parts` brings together.
#pragma once

#include "pack.cuh"
#include "reduce.cuh"

struct Greatest {
    __device__ int operator()(int a, int b) const { return a > b ? a : b; }
};

// The bits of a magnitude, as an integer that is the larger the larger the magnitude; NaN is above infinity.
__device__ inline int magnitude(float x) { return int(__float_as_uint(x) & 0x7fffffffu); }

// The largest magnitude of a pack.
__device__ inline int largest_of(const Pack &values) {
    int largest = 0;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        largest = Greatest()(largest, magnitude(values.at[i]));
    }
    return largest;
}

// Stores a pack. With `FINDS`, `largest` becomes the largest of itself and of the magnitudes that are stored, as the tensor holds them.
template <bool FINDS, bool WIDE = false, typename T>
__device__ void store_finding(int &largest, T *x, size_t first, size_t n, const Pack &values) {
    store<WIDE>(x, first, n, values);
    if constexpr (FINDS) {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const int rounded = magnitude(widen(narrow<T>(values.at[i])));
            largest = Greatest()(largest, WIDE || first + i < n ? rounded : 0);
        }
    }
}

// Writes the largest magnitude of all threads of a block into the block's element of `parts`. Blocks are along x and y, and so are threads.
template <bool FINDS = true> __device__ void store_largest(int *parts, int largest) {
    if constexpr (FINDS) {
        const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
        largest = block_reduce(largest, 0, Greatest(), thread, blockDim.x * blockDim.y);
        if (thread == 0) {
            parts[size_t(blockIdx.x) * gridDim.y + blockIdx.y] = largest;
        }
    }
}
