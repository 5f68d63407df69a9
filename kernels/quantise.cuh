// Block-wise dynamic quantisation to 8 bits, as in `crates/kernels/src/numerics/quantise/`: the same codes, the same `absmax`.
#pragma once

#include "quantise_map.cuh"
#include "reduce.cuh"

// Values that share one `absmax`: a warp's, a pack for each lane.
constexpr int BLOCK = 256;
static_assert(BLOCK == WARP * PACK, "a warp works on a block");

// A map of codes to values, and back, in shared memory: lanes look up different entries, one a value either way.
template <bool SIGNED> struct Map {
    static constexpr int ZERO = SIGNED ? SIGNED_ZERO : UNSIGNED_ZERO;
    static constexpr int BUCKETS = SIGNED ? SIGNED_BUCKETS : UNSIGNED_BUCKETS;
    static constexpr int WORDS = SIGNED ? 2 * BUCKETS : BUCKETS;
    static constexpr int LOWEST = SIGNED ? SIGNED_LOWEST : UNSIGNED_LOWEST;
    static constexpr int MIDDLE = SIGNED ? SIGNED_MIDDLE : UNSIGNED_MIDDLE;
    static constexpr int FINE = SIGNED ? SIGNED_FINE_BITS : UNSIGNED_FINE_BITS, COARSE = FINE + 2;
    // What is taken from shifted bits, so that both kinds of buckets are counted from the lowest on.
    static constexpr int FINE_LESS = (MIDDLE >> FINE) - ((MIDDLE - LOWEST) >> COARSE), COARSE_LESS = LOWEST >> COARSE;

    SharedArray<float> values;
    SharedArray<uint32_t> words;

    // Fills the map from its tables; whoever reads it meets the others at a barrier first.
    __device__ void fill() const {
        for (int code = threadIdx.x; code < CODES; code += blockDim.x) {
            values[code] = __uint_as_float((SIGNED ? SIGNED_VALUES : UNSIGNED_VALUES)[code]);
        }
        for (int word = threadIdx.x; word < WORDS; word += blockDim.x) {
            words[word] = (SIGNED ? SIGNED_WORDS : UNSIGNED_WORDS)[word];
        }
    }

    // The code of a value in a block whose `absmax` has this inverse: of the entry nearest to their product, and of two
    // equally near ones the even. A value below zero never gets the code of zero or above, so that its sign survives.
    //
    // Bits of floats ascend as the floats do. Those of the product choose a bucket, and the bucket's word carries into the
    // code where the border between two lies in it. See quantise_map.cuh.
    __device__ uint8_t code_of(float value, float inverse) const {
        const uint32_t product = __float_as_uint(value * inverse);
        const int bits = larger(SIGNED ? product & 0x7fffffffu : product, LOWEST);
        const int bucket = smaller(larger((bits >> FINE) - FINE_LESS, (bits >> COARSE) - COARSE_LESS), BUCKETS - 1);
        const bool negative = SIGNED && value < 0.0f;
        const uint32_t word = words[negative ? bucket + BUCKETS : bucket];
        return uint8_t((word + uint32_t(negative ? -bits : bits)) >> 24);
    }

    __device__ static int larger(int a, int b) { return a > b ? a : b; }
    __device__ static int smaller(int a, int b) { return a < b ? a : b; }
};

// The `absmax` that a block with this largest magnitude is stored with: one whose inverse is finite.
__device__ inline float stored_absmax(float largest) { return largest == 0.0f ? 0.0f : fmaxf(largest, FLT_MIN); }

// Values `first` to `first + PACK` of `n`, from their codes; beyond the end, zero. `first` is below the end of a block
// that starts below `n`. `WIDE` as in `load_elements`.
template <bool WIDE, bool SIGNED>
__device__ Pack load_codes(const Map<SIGNED> &map, const uint8_t *codes, const float *absmax, size_t first, size_t n) {
    const Elements<uint8_t> found = load_elements<WIDE>(codes, first, n, uint8_t(Map<SIGNED>::ZERO));
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
template <bool WIDE, bool SIGNED>
__device__ void store_codes(const Map<SIGNED> &map, uint8_t *codes, float *absmax, size_t first, size_t n,
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
        found.at[i] = map.code_of(pack.at[i], inverse);
    }
    store_elements<WIDE>(codes, first, n, found);
    if (threadIdx.x % WARP == 0) {
        absmax[first / BLOCK] = scale;
    }
}
