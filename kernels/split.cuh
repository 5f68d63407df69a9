// bf16 weights of f32 masters: the weight, and what it leaves out. As in `crates/kernels/src/numerics/split.rs`: the same bits.
#pragma once

#include "kernel.cuh"

__device__ inline bool is_nan(float x) { return x != x; }

// The weight of a master: the nearest bf16, away from zero if two are equally near.
__device__ inline bf16 split_weight(float master) {
    const uint32_t bits = __float_as_uint(master);
    const uint32_t rounded = is_nan(master) ? bits | 0x400000u : bits + 0x8000u;
    return __ushort_as_bfloat16(uint16_t(rounded >> 16));
}

// What the weight leaves out of its master.
__device__ inline int16_t split_remainder(float master) {
    return is_nan(master) ? int16_t(0) : int16_t(__float_as_uint(master));
}

// The master that was split.
__device__ inline float join(bf16 weight, int16_t remainder) {
    return __uint_as_float((uint32_t(__bfloat16_as_ushort(weight)) << 16) + uint32_t(int32_t(remainder)));
}

// The nearest value of 24 bits, to even if two are equally near. NaN stays NaN.
__device__ inline float round_to_24_bits(float master) {
    const uint32_t bits = __float_as_uint(master);
    return is_nan(master) ? master : __uint_as_float((bits + 0x7fu + (bits >> 8 & 1)) & ~0xffu);
}

// Remainders as they are stored: whole, or the upper byte, beside a master of 24 bits.
struct Remainder {
    using Stored = int16_t;
    __device__ static float master(float exact) { return exact; }
    __device__ static Stored store(int16_t remainder) { return remainder; }
    __device__ static int16_t read(Stored stored) { return stored; }
};

struct RemainderByte {
    using Stored = uint8_t;
    __device__ static float master(float exact) { return round_to_24_bits(exact); }
    __device__ static Stored store(int16_t remainder) { return Stored(uint16_t(remainder) >> 8); }
    __device__ static int16_t read(Stored stored) { return int16_t(uint16_t(stored) << 8); }
};

// Rounds to one of the two bf16 around a value, to the nearer with the greater probability: `random` has 16 uniformly
// distributed bits. NaN stays NaN, infinity infinity.
__device__ inline bf16 round_stochastically(float value, uint32_t random) {
    const uint32_t bits = __float_as_uint(value);
    const uint32_t added = (bits & 0x7f800000u) != 0x7f800000u ? random : 0;
    const uint32_t quiet = is_nan(value) ? 0x40u : 0;
    return __ushort_as_bfloat16(uint16_t((bits + added) >> 16 | quiet));
}
