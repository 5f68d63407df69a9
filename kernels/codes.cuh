// Values as codes of FP8: the bits of `numerics/fp8.rs`.
#pragma once

#include "magnitude.cuh"
#include "unfused.cuh"

// Sign, four bits of exponent, three of fraction.
struct E4m3 {
    static constexpr uint32_t LARGEST = 0x43e00000u, SMALLEST_NORMAL = 0x3c800000u, REBIAS = 120 << 3;
    static constexpr uint32_t ALIGNER = 0x46800000u;
    static constexpr int DROPPED = 20, EXPONENT = 8;
};

// Sign, five bits of exponent, two of fraction.
struct E5m2 {
    static constexpr uint32_t LARGEST = 0x47600000u, SMALLEST_NORMAL = 0x38800000u, REBIAS = 112 << 2;
    static constexpr uint32_t ALIGNER = 0x43000000u;
    static constexpr int DROPPED = 21, EXPONENT = 15;
};

template <typename F> __device__ uint8_t code_of(float value) {
    const uint32_t given = __float_as_uint(value), bits = given & 0x7fffffffu, sign = given >> 24 & 0x80u;
    const uint32_t size = bits < F::LARGEST ? bits : F::LARGEST;
    uint32_t code;
    if (size >= F::SMALLEST_NORMAL) {
        const uint32_t is_odd = size >> F::DROPPED & 1u;
        code = ((size + ((1u << (F::DROPPED - 1)) - 1u) + is_odd) >> F::DROPPED) - F::REBIAS;
    } else {
        // The sum is a multiple of the smallest value.
        const Unfused sum = Unfused{__uint_as_float(size)} + Unfused{__uint_as_float(F::ALIGNER)};
        code = __float_as_uint(sum.value) - F::ALIGNER;
    }
    return uint8_t(bits > 0x7f800000u ? 0x7fu : code | sign);
}

// Four codes by the instruction that architectures from 8.9 on have, of `values` from a lower byte to a higher.
#if __CUDA_ARCH__ >= 890
template <typename F> __device__ uint32_t converted(const float *values) {
    uint16_t pairs[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (F::EXPONENT == E4m3::EXPONENT) {
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pairs[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
        } else {
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pairs[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
        }
    }
    return uint32_t(pairs[1]) << 16 | pairs[0];
}
#endif

// Codes of a pack's values times a factor. With `converts` by the instruction, where there is one: the same codes.
template <typename F> __device__ uint2 codes_of(const Pack &pack, float factor, [[maybe_unused]] int converts) {
    float values[PACK];
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        values[i] = (Unfused{pack.at[i]} * Unfused{factor}).value;
    }
#if __CUDA_ARCH__ >= 890
    if (converts) {
        return {converted<F>(values), converted<F>(values + 4)};
    }
#endif
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        words[i / 4] |= uint32_t(code_of<F>(values[i])) << (8 * (i % 4));
    }
    return {words[0], words[1]};
}

// What values are multiplied by, a power of two, and the scale of their codes; both NaN for what is not finite.
template <typename F> __device__ void factor_and_scale(float largest, float &factor, float &scale) {
    const int bits = magnitude(largest);
    const int above = (bits & 0x007fffff) > 0x00600000;
    int room = F::EXPONENT - ((bits >> 23) - 127) - above;
    room = room < -62 ? -62 : room > 62 ? 62 : room;
    if (bits == 0) {
        room = 0;
    }
    const bool finite = bits < 0x7f800000;
    factor = finite ? __uint_as_float(uint32_t(127 + room) << 23) : NAN;
    scale = finite ? __uint_as_float(uint32_t(127 - room) << 23) : NAN;
}
