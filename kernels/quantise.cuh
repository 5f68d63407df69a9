// Block-wise dynamic quantisation to 8 bits, as in `crates/kernels/src/numerics/quantise/`: the same codes, the same `absmax`.
#pragma once

#include "quantise_map.cuh"
#include "reduce.cuh"

// Values that share one `absmax`: a warp's, a pack for each lane.
constexpr int BLOCK = 256;
static_assert(BLOCK == WARP * PACK, "a warp works on a block");

// A map of codes to values, and back, in shared memory: lanes look up different entries.
//
// Thresholds are in the order of a search tree, level by level (Eytzinger), so that lanes that go different ways read
// neighbouring words; sorted, they would all be in the same few banks.
struct Map {
    SharedArray<float> values, thresholds;
    int zero;
};

// Fills a map from its tables; whoever reads it meets the others at a barrier first.
__device__ inline void fill_map(const Map &map, const uint32_t *values, const uint32_t *thresholds) {
    for (int code = threadIdx.x; code < CODES; code += blockDim.x) {
        map.values[code] = __uint_as_float(values[code]);
        map.thresholds[code] = __uint_as_float(thresholds[code]);
    }
}

// The code of the entry nearest to `x`; of two equally near ones, the even code.
__device__ inline int nearest_code(const Map &map, float x) {
    // Of the first levels every threshold is read, once for all that a thread looks up.
    const bool upper = x > map.thresholds[1];
    const bool second = x > (upper ? map.thresholds[3] : map.thresholds[2]);
    const float lower_half = second ? map.thresholds[5] : map.thresholds[4];
    const float upper_half = second ? map.thresholds[7] : map.thresholds[6];
    int node = 8 + 4 * upper + 2 * second + (x > (upper ? upper_half : lower_half));
#pragma unroll
    for (int level = 3; level < 8; level++) {
        const float threshold = map.thresholds[node];
        node = 2 * node + (x > threshold);
    }
    return node - CODES;
}

// The code of a value in a block whose `absmax` has this inverse. A value below zero never gets the code of zero or
// above, so that its sign survives.
__device__ inline uint8_t code_of(const Map &map, float value, float inverse) {
    const int nearest = nearest_code(map, value * inverse);
    return value < 0.0f && nearest >= map.zero ? map.zero - 1 : nearest;
}

// The `absmax` that a block with this largest magnitude is stored with: one whose inverse is finite.
__device__ inline float stored_absmax(float largest) { return largest == 0.0f ? 0.0f : fmaxf(largest, FLT_MIN); }

// Values `first` to `first + PACK` of `n`, from their codes; beyond the end, zero. `first` is below the end of a block
// that starts below `n`.
__device__ inline Pack load_codes(const Map &map, const uint8_t *codes, const float *absmax, size_t first, size_t n) {
    const Elements<uint8_t> found = load_elements(codes, first, n, uint8_t(map.zero));
    const float scale = absmax[first / BLOCK];
    Pack pack;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        const float value = map.values[found.at[i]];
        pack.at[i] = value * scale;
    }
    return pack;
}

// Quantises a block of values, a pack for each lane of a warp; those beyond `n` are zero.
__device__ inline void store_codes(const Map &map, uint8_t *codes, float *absmax, size_t first, size_t n,
                                   const Pack &pack) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        largest = fmaxf(largest, fabsf(pack.at[i]));
    }
    const float scale = stored_absmax(warp_reduce(largest, Largest()));
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    Elements<uint8_t> found;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        found.at[i] = code_of(map, pack.at[i], inverse);
    }
    store_elements(codes, first, n, found);
    if (threadIdx.x % WARP == 0) {
        absmax[first / BLOCK] = scale;
    }
}
