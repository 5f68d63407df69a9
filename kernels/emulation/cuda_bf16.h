// What kernels use of NVIDIA's header of this name, for a machine without it: bf16 and its conversions.
// `scripts/check-cuda-sources` compares the two bit by bit.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef EMULATION
struct float2 {
    float x, y;
};
#endif

struct __nv_bfloat16 {
    uint16_t bits;
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }

inline float __bfloat162float(__nv_bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float widened;
    std::memcpy(&widened, &bits, sizeof(widened));
    return widened;
}

// Rounds to nearest, ties to even; every NaN becomes the same.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    if (x != x) {
        return {0x7fff};
    }
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
    return {__bfloat162float(pair.x), __bfloat162float(pair.y)};
}
