// Random numbers by counter, as in `crates/kernels/src/numerics/random.rs`: the same bits.
#pragma once

#include "kernel.cuh"

__device__ inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// A key that lies in device memory, low half first.
__device__ inline uint64_t read_key(const uint32_t *key) { return uint64_t(key[1]) << 32 | key[0]; }

// 32 random bits, a function of a key and an index.
__device__ inline uint32_t random_u32(uint64_t key, uint64_t index) {
    const uint32_t high = mix(uint32_t(index >> 32) ^ uint32_t(key >> 32));
    return mix(mix(uint32_t(index) ^ uint32_t(key)) ^ high);
}
