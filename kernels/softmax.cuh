// The largest element of a row and the sum of exponentials below it, in one pass (Milakov and Gimelshein 2018).
#pragma once

#include "cap.cuh"
#include "pack.cuh"
#include "reduce.cuh"

struct Exponentials {
    float largest;
    // Of exp(x - largest).
    float sum;
};

// Takes COUNT packs more of `n` elements, the first at `first`, `stride` apart. `cap` is applied to each element first.
template <int COUNT, bool WIDE, typename Cap, typename T>
__device__ void take(Exponentials &taken, const T *x, size_t first, size_t stride, size_t n, Cap cap) {
    Pack values[COUNT];
#pragma unroll
    for (int ahead = 0; ahead < COUNT; ahead++) {
        const size_t at = first + ahead * stride;
        values[ahead] = load<WIDE>(x, at, n, -INFINITY);
        if constexpr (Cap::CHANGES) {
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                values[ahead].at[i] = WIDE || at + i < n ? cap(values[ahead].at[i]) : -INFINITY;
            }
        }
    }
    const float before = taken.largest;
#pragma unroll
    for (int ahead = 0; ahead < COUNT; ahead++) {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            taken.largest = fmaxf(taken.largest, values[ahead].at[i]);
        }
    }
    taken.sum *= expf(before - taken.largest);
#pragma unroll
    for (int ahead = 0; ahead < COUNT; ahead++) {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            taken.sum += expf(values[ahead].at[i] - taken.largest);
        }
    }
}

// Of `n` elements, by all threads of a block; every thread receives the result. A thread asks for AHEAD packs before it
// uses the first; `WIDE` where the caller knows that all packs are.
template <int AHEAD = 1, bool WIDE = false, typename T, typename Cap = Uncapped>
__device__ Exponentials exponentials(const T *x, size_t n, Cap cap = Cap()) {
    // Not infinity, whose difference from itself is no number: a thread without elements has this and no sum.
    Exponentials taken = {-FLT_MAX, 0.0f};
    const size_t stride = blockDim.x * PACK;
    size_t first = threadIdx.x * PACK;
    if constexpr (AHEAD > 1) {
        for (; first + (AHEAD - 1) * stride < n; first += AHEAD * stride) {
            take<AHEAD, WIDE>(taken, x, first, stride, n, cap);
        }
    }
    for (; first < n; first += stride) {
        take<1, WIDE>(taken, x, first, stride, n, cap);
    }
    const float of_block = block_largest(taken.largest);
    return {of_block, block_sum(taken.sum * expf(taken.largest - of_block))};
}
