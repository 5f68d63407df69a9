// The largest element of a row and the sum of exponentials below it, in one pass (Milakov and Gimelshein 2018).
#pragma once

#include "pack.cuh"
#include "reduce.cuh"

struct Exponentials {
    float largest;
    // Of exp(x - largest).
    float sum;
};

// Of `n` elements, by all threads of a block; every thread receives the result.
template <typename T> __device__ Exponentials exponentials(const T *x, size_t n) {
    // Not infinity, whose difference from itself is no number: a thread without elements has this and no sum.
    float largest = -FLT_MAX, sum = 0.0f;
    for (size_t first = threadIdx.x * PACK; first < n; first += blockDim.x * PACK) {
        const Pack values = load(x, first, n, -INFINITY);
        const float before = largest;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            largest = fmaxf(largest, values.at[i]);
        }
        sum *= expf(before - largest);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            sum += expf(values.at[i] - largest);
        }
    }
    const float of_block = block_largest(largest);
    return {of_block, block_sum(sum * expf(largest - of_block))};
}
