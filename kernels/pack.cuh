// Eight neighbouring elements at a time, in 16-byte accesses where the tensor's alignment allows.
#pragma once

#include "kernel.cuh"

constexpr int PACK = 8;

// Eight elements, widened.
struct Pack {
    float at[PACK];
};

// First element of this thread's pack in a flat tensor, by blocks and threads along x.
__device__ inline size_t flat_pack() {
    return (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
}

// Whether the pack at `first`, a multiple of PACK, of `n` elements can be accessed 16 bytes at a time.
template <typename T> __device__ bool is_wide(const T *x, size_t first, size_t n) {
    return first + PACK <= n && reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

// Elements `first` to `first + PACK` of `n`; those beyond the end count as `missing`.
template <typename T> __device__ Pack load(const T *x, size_t first, size_t n, float missing = 0.0f) {
    Pack pack;
    if (is_wide(x, first, n)) {
        alignas(16) T values[PACK];
        require_alignment(x + first, 16);
#pragma unroll
        for (size_t part = 0; part < sizeof(values) / 16; part++) {
            reinterpret_cast<uint4 *>(values)[part] = reinterpret_cast<const uint4 *>(x + first)[part];
        }
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            pack.at[i] = widen(values[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            pack.at[i] = first + i < n ? widen(x[first + i]) : missing;
        }
    }
    return pack;
}

// Rounds a pack into elements `first` to `first + PACK` of `n`; those beyond the end are left out.
template <typename T> __device__ void store(T *x, size_t first, size_t n, const Pack &pack) {
    if (is_wide(x, first, n)) {
        alignas(16) T values[PACK];
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values[i] = narrow<T>(pack.at[i]);
        }
        require_alignment(x + first, 16);
#pragma unroll
        for (size_t part = 0; part < sizeof(values) / 16; part++) {
            reinterpret_cast<uint4 *>(x + first)[part] = reinterpret_cast<const uint4 *>(values)[part];
        }
    } else {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            if (first + i < n) {
                x[first + i] = narrow<T>(pack.at[i]);
            }
        }
    }
}

// Stores a pack, or adds it to what is there: rounded once either way.
template <typename T>
__device__ void store_or_add(T *x, size_t first, size_t n, Pack pack, int accumulate) {
    if (accumulate) {
        const Pack earlier = load(x, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            pack.at[i] += earlier.at[i];
        }
    }
    store(x, first, n, pack);
}
