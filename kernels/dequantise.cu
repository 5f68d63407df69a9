// Matrices that are stored as codes become matrices of plain numbers.
#include "pack.cuh"
#include "quantise.cuh"
#include "unfused.cuh"

// Elements that share an `absmax`.
constexpr int NF4_BLOCK = 64;

// Elements that share a power of two.
constexpr int MXFP4_BLOCK = 32;

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

// The packs of bytes that a thread takes.
constexpr int ROUNDS = 4;

// The values of 4-bit codes. A pack of bytes is two packs of elements, which are of one block. A thread asks for several of its packs, and
// for what their scales are made of, before it uses the first.
template <typename T>
__device__ void dequantise_nf4(T *out, const uint8_t *codes, const uint8_t *absmax_codes, const float *absmax,
                               const float *offset, size_t n) {
    SHARED(float, values, 16);
    SHARED(float, absmax_values, CODES);
    for (int code = threadIdx.x; code < CODES; code += blockDim.x) {
        absmax_values[code] = __uint_as_float(SIGNED_VALUES[code]);
    }
    if (threadIdx.x < 16) {
        values[threadIdx.x] = __uint_as_float(NF4_VALUES[threadIdx.x]);
    }
    __syncthreads();
    const size_t bytes = (n + 1) / 2, stride = blockDim.x * PACK;
    const size_t begin = blockIdx.x * ROUNDS * stride + threadIdx.x * PACK;
    const bool whole = (size_t(blockIdx.x) + 1) * ROUNDS * stride <= n / 2 && are_wide(PACK, out, codes);
    knowing(whole, [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        Elements<uint8_t> found[ROUNDS];
        uint8_t scale_codes[ROUNDS];
        float scales[ROUNDS];
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const size_t first = begin + round * stride, block = 2 * first / NF4_BLOCK;
            if (WIDE || first < bytes) {
                found[round] = load_elements<WIDE>(codes, first, bytes, uint8_t(0));
                scale_codes[round] = absmax_codes[block];
                scales[round] = absmax[block / BLOCK];
            }
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const size_t first = begin + round * stride;
            if (!WIDE && first >= bytes) {
                return;
            }
            const float code_value = absmax_values[scale_codes[round]];
            const Unfused scale = Unfused{code_value} * Unfused{scales[round]} + Unfused{*offset};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Pack pack;
#pragma unroll
                for (int i = 0; i < PACK; i++) {
                    const int byte = found[round].at[half * (PACK / 2) + i / 2];
                    const float value = values[i % 2 == 0 ? byte >> 4 : byte & 15];
                    pack.at[i] = (Unfused{value} * scale).value;
                }
                const size_t at = 2 * first + half * PACK;
                if (WIDE || at < n) {
                    store<WIDE>(out, at, n, pack);
                }
            }
        }
    });
}

// Half of the power of two that a block's exponent stands for, 2^(exponent - 128): below f32's normal numbers for 0 and 1.
__device__ inline float half_power(uint8_t exponent) {
    return __uint_as_float(exponent > 1 ? uint32_t(exponent - 1) << 23 : uint32_t(1 << 21) << exponent);
}

// Twice the magnitudes of the codes 0 to 7, four bits each: 0, 1, 2, 3, 4, 6, 8, 12.
constexpr uint32_t MXFP4_DOUBLES = 0xC8643210u;

// The values of 4-bit codes of one bit of mantissa, which are exact. A thread has a pack of bytes: two packs of elements, of one block.
template <typename T>
__device__ void dequantise_mxfp4(T *out, const uint8_t *codes, const uint8_t *exponents, size_t n) {
    const size_t bytes = (n + 1) / 2, first = flat_pack();
    if (first >= bytes) {
        return;
    }
    const Elements<uint8_t> found = load_elements(codes, first, bytes, uint8_t(0));
    const float power = half_power(exponents[2 * first / MXFP4_BLOCK]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Pack pack;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const int byte = found.at[half * (PACK / 2) + i / 2];
            const int code = i % 2 == 0 ? byte & 15 : byte >> 4;
            const float magnitude = power * float(int(MXFP4_DOUBLES >> 4 * (code & 7) & 15));
            pack.at[i] = code & 8 ? -magnitude : magnitude;
        }
        const size_t at = 2 * first + half * PACK;
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
    EXPORT(dequantise_nf4_##name);                                                                                  \
    extern "C" __global__ void dequantise_mxfp4_##name(T *out, const uint8_t *codes, const uint8_t *exponents,      \
                                                       size_t n) {                                                  \
        dequantise_mxfp4(out, codes, exponents, n);                                                                 \
    }                                                                                                               \
    EXPORT(dequantise_mxfp4_##name)

OF_TYPE(float, f32);
OF_TYPE(bf16, bf16);
