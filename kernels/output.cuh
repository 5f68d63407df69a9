// What a kernel makes for a product: values, values whose largest magnitude is found on the way, or codes of FP8.
#pragma once

#include "codes.cuh"

// A tensor of values. With `FINDS` a block writes the largest magnitude of its part into its element of `parts`.
template <bool FINDS, typename T> struct Values {
    T *to;
    int *parts;
    int largest = 0;

    // Stores a pack of the `n` elements that begin at `start`.
    template <bool WIDE> __device__ void store(size_t start, size_t first, size_t n, const Pack &values) {
        store_finding<FINDS, WIDE>(largest, to + start, first, n, values);
    }

    // All threads of a block call this at its end.
    __device__ void end() const { store_largest<FINDS>(parts, largest); }
};

// Codes, e4m3, of what a tensor of T would hold, whose largest magnitude is known.
template <typename T> struct Codes {
    uint8_t *to;
    float factor;
    int converts;

    __device__ Codes(uint8_t *to, const float *largest, int converts) : to(to), converts(converts) {
        float scale;
        factor_and_scale<E4m3>(largest[0], factor, scale);
    }

    template <bool WIDE> __device__ void store(size_t start, size_t first, size_t n, Pack values) const {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values.at[i] = widen(narrow<T>(values.at[i]));
        }
        Elements<uint8_t> made;
        *reinterpret_cast<uint2 *>(made.at) = codes_of<E4m3>(values, factor, converts);
        store_elements<WIDE>(to + start, first, n, made);
    }

    __device__ void end() const {}
};
