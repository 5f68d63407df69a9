// Random numbers by counter: the bits of `random_u32` in `crates/kernels/src/random.rs`.
#pragma once

#include "kernel.cuh"

__device__ inline uint32_t random_mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// 32 random bits of a key and an index.
__device__ inline uint32_t random_u32(uint64_t key, uint64_t index) {
    const uint32_t high = random_mix(uint32_t(index >> 32) ^ uint32_t(key >> 32));
    return random_mix(random_mix(uint32_t(index) ^ uint32_t(key)) ^ high);
}
