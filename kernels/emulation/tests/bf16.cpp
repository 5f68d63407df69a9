// Writes what the bf16 conversions of whichever header is included give: all 2^16 values widened, and floats of every
// exponent, sign and rounding case rounded, one by one and in pairs.
#include <cuda_bf16.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

template <typename To, typename From> static To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

template <typename T> static void put(T value) { std::fwrite(&value, sizeof(value), 1, stdout); }

// NaN keeps its payload on one side only; that it is one is what counts.
static void put_float(float value) { put(value != value ? 0x7fc00000u : bits_as<uint32_t>(value)); }

int main() {
    for (uint32_t bits = 0; bits < 1u << 16; bits++) {
        put_float(__bfloat162float(bits_as<__nv_bfloat16>(uint16_t(bits))));
        put(__bfloat16_as_ushort(__ushort_as_bfloat16(uint16_t(bits))));
    }
    // The lower halves around a tie, and one of each bit.
    const uint32_t lower[] = {0, 1, 2, 0x4000, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xc000, 0xfffe, 0xffff};
    for (uint32_t upper = 0; upper < 1u << 16; upper++) {
        for (uint32_t half : lower) {
            const float value = bits_as<float>(upper << 16 | half);
            put(__float2bfloat16_rn(value));
            const __nv_bfloat162 pair = __floats2bfloat162_rn(value, 1.0f);
            put(pair);
            const float2 widened = __bfloat1622float2(pair);
            put_float(widened.x);
            put_float(widened.y);
        }
    }
}
