// Dropout by counter, as `Dropout` in `crates/kernels/src/`: the same elements on every device.
#pragma once

#include "pack.cuh"
#include "random.cuh"

struct Dropout {
    // Random numbers below this drop their element; 0 leaves every element as it is.
    size_t threshold;
    // In device memory; null where nothing is dropped.
    const uint32_t *key;
    float kept_scale;

    // Drops elements of a pack, whose first has this index, and scales the others.
    __device__ void apply(Pack &values, size_t first) const {
        if (threshold == 0) {
            return;
        }
        const uint64_t stream = read_key(key);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values.at[i] = random_u32(stream, first + i) >= threshold ? values.at[i] * kept_scale : 0.0f;
        }
    }
};
