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

// The same of values as a tensor of type `T` holds them.
template <typename T> __device__ int largest_as(Pack values) {
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        values.at[i] = widen(narrow<T>(values.at[i]));
    }
    return largest_of(values);
}

// Writes the largest magnitude of all threads of a block.
__device__ inline void store_largest(int *part, int largest) {
    largest = block_reduce(largest, 0, Greatest());
    if (threadIdx.x == 0) {
        *part = largest;
    }
}
