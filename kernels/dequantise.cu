// Matrices that are stored as codes become matrices of plain numbers.
#include "pack.cuh"
#include "quantise.cuh"
#include "unfused.cuh"

// Elements that share an `absmax`.
constexpr int NF4_BLOCK = 64;

__device__ const uint32_t NF4_VALUES[16] = {
    0xbf800000u, 0xbf3239b1u, 0xbf066b30u, 0xbeca32a0u, 0xbe91a24du, 0xbe3d353fu, 0xbdba7871u, 0x00000000u,
    0x3da2faffu, 0x3e24cae3u, 0x3e7c04ddu, 0x3ead033au, 0x3ee1a4b8u, 0x3f1007abu, 0x3f3913b3u, 0x3f800000u,
};

// The values of 8-bit codes, a pack for each thread.
template <typename T> __device__ void dequantise_bytes(T *out, const uint8_t *codes, const float *absmax, size_t n) {
    SHARED(float, values, CODES);
    for (int code = threadIdx.x; code < CODES; code += blockDim.x) {
        values[code] = __uint_as_float(SIGNED_VALUES[code]);
    }
    __syncthreads();
    const size_t first = flat_pack();
    if (first < n) {
        const Elements<uint8_t> found = load_elements(codes, first, n, uint8_t(SIGNED_ZERO));
        const Unfused scale = {absmax[first / BLOCK]};
        Pack pack;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float value = values[found.at[i]];
            pack.at[i] = (Unfused{value} * scale).value;
        }
        store(out, first, n, pack);
    }
}

// The values of 4-bit codes. A thread takes a pack of bytes: two packs of elements, which are of one block.
template <typename T>
__device__ void dequantise_nf4(T *out, const uint8_t *codes, const uint8_t *absmax_codes, const float *absmax,
                               const float *offset, size_t n) {
    SHARED(float, values, 16);
    if (threadIdx.x < 16) {
        values[threadIdx.x] = __uint_as_float(NF4_VALUES[threadIdx.x]);
    }
    __syncthreads();
    const size_t first_byte = flat_pack(), bytes = (n + 1) / 2;
    if (first_byte >= bytes) {
        return;
    }
    const Elements<uint8_t> found = load_elements(codes, first_byte, bytes, uint8_t(0));
    const size_t first = 2 * first_byte, block = first / NF4_BLOCK;
    const Unfused code_value = {__uint_as_float(SIGNED_VALUES[absmax_codes[block]])};
    const Unfused scale = code_value * Unfused{absmax[block / BLOCK]} + Unfused{*offset};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Pack pack;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const int byte = found.at[half * (PACK / 2) + i / 2];
            const float value = values[i % 2 == 0 ? byte >> 4 : byte & 15];
            pack.at[i] = (Unfused{value} * scale).value;
        }
        const size_t at = first + half * PACK;
        if (at < n) {
            store(out, at, n, pack);
        }
    }
}

#define OF_TYPE(T, name)                                                                                            \
    extern "C" __global__ void dequantise_bytes_##name(T *out, const uint8_t *codes, const float *absmax, size_t n) { \
        dequantise_bytes(out, codes, absmax, n);                                                                     \
    }                                                                                                               \
    EXPORT(dequantise_bytes_##name);                                                                                \
    extern "C" __global__ void dequantise_nf4_##name(T *out, const uint8_t *codes, const uint8_t *absmax_codes,     \
                                                     const float *absmax, const float *offset, size_t n) {          \
        dequantise_nf4(out, codes, absmax_codes, absmax, offset, n);                                                \
    }                                                                                                               \
    EXPORT(dequantise_nf4_##name)

OF_TYPE(float, f32);
OF_TYPE(bf16, bf16);
