// Tensors as codes of FP8 with one scale each: the bits of `numerics/fp8.rs`.
#include "magnitude.cuh"
#include "unfused.cuh"

// The largest magnitude of `part` elements for each block.
template <typename T> __device__ void abs_max_of_part(int *parts, const T *x, size_t n, size_t part) {
    const size_t start = blockIdx.x * part;
    const size_t count = part < n - start ? part : n - start;
    const T *own = x + start;
    int largest = 0;
    for (size_t first = threadIdx.x * PACK; first < count; first += blockDim.x * PACK) {
        largest = Greatest()(largest, largest_of(load(own, first, count)));
    }
    store_largest(parts, largest);
}

// One block. The bits of the largest magnitude.
extern "C" __global__ void __launch_bounds__(1024) abs_max_of_parts(int *out, const int *parts, size_t count) {
    int largest = 0;
    // A block alone waits long for each load, so several are under way.
#pragma unroll 8
    for (size_t part = threadIdx.x; part < count; part += blockDim.x) {
        largest = Greatest()(largest, parts[part]);
    }
    store_largest(out, largest);
}
EXPORT(abs_max_of_parts);

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

// Codes of the eight elements from `first` on, and how many elements that are not zero became zero.
template <typename F, typename T>
__device__ int quantise_pack(uint8_t *codes, const T *x, float factor, size_t first, size_t n) {
    const Pack values = load(x, first, n);
    Elements<uint8_t> made;
    int underflows = 0;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        made.at[i] = code_of<F>((Unfused{values.at[i]} * Unfused{factor}).value);
        underflows += (made.at[i] & 0x7f) == 0 && magnitude(values.at[i]) != 0;
    }
    store_elements(codes, first, n, made);
    return underflows;
}

template <typename F, typename T>
__device__ void quantise(uint8_t *codes, float *scale, const T *x, const float *largest, size_t n) {
    float factor, inverse;
    factor_and_scale<F>(largest[0], factor, inverse);
    const size_t first = flat_pack();
    if (first == 0) {
        scale[0] = inverse;
    }
    if (first < n) {
        quantise_pack<F>(codes, x, factor, first, n);
    }
}

// As `quantise`; each block makes a part, and adds how many elements underflow to a row of `underflows`.
template <typename F, typename T>
__device__ void quantise_counting(uint8_t *codes, float *scale, float *underflows, const T *x, const float *largest, size_t n,
                                  size_t part, size_t stride) {
    float factor, inverse;
    factor_and_scale<F>(largest[0], factor, inverse);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        scale[0] = inverse;
    }
    const size_t start = blockIdx.x * part;
    const size_t end = n < start + part ? n : start + part;
    int count = 0;
    for (size_t first = start + threadIdx.x * PACK; first < end; first += blockDim.x * PACK) {
        count += quantise_pack<F>(codes, x, factor, first, end);
    }
    count = block_sum(count);
    if (threadIdx.x == 0 && count > 0) {
        underflows[blockIdx.x * stride] += float(count);
    }
}

// Rows and columns of what a block transposes, and words of four codes in a row of it.
constexpr int SIDE = 64;
constexpr int WORDS = SIDE / 4;

// A word more in each row, so that words below one another lie in different banks.
constexpr int PITCH = WORDS + 1;

// Rows that a block of 256 threads goes over at a time.
constexpr int LINES = 256 / WORDS;

// Writes a block's codes, `words` of `[SIDE, SIDE]`, into the transpose `out [columns, width]`. `columns` and `width` are multiples of 16.
__device__ inline void store_transposed(uint8_t *out, SharedArray<uint32_t> words, size_t columns, size_t width) {
    const size_t first_row = size_t(blockIdx.x) * SIDE, first_column = size_t(blockIdx.y) * SIDE;
    const int line = threadIdx.x / WORDS, word = threadIdx.x % WORDS;
    for (int own = line; own < SIDE; own += LINES) {
        const size_t row = first_column + own, column = first_row + 4 * word;
        if (row < columns && column < width) {
            uint32_t made = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t from = words[(4 * word + i) * PITCH + own / 4];
                made |= (from >> (own % 4 * 8) & 0xffu) << (8 * i);
            }
            require_alignment(out + row * width + column, 4);
            *reinterpret_cast<uint32_t *>(out + row * width + column) = made;
        }
    }
}

// `out [columns, width]` of `x [rows, columns]`; all sizes but `rows` are multiples of 16, and rows up to `width` are zeros.
extern "C" __global__ void transpose_codes(uint8_t *out, const uint8_t *x, size_t rows, size_t columns, size_t width) {
    SHARED(uint32_t, words, SIDE * PITCH);
    const size_t first_row = size_t(blockIdx.x) * SIDE, first_column = size_t(blockIdx.y) * SIDE;
    const int line = threadIdx.x / WORDS, word = threadIdx.x % WORDS;
    for (int own = line; own < SIDE; own += LINES) {
        const size_t row = first_row + own, column = first_column + 4 * word;
        uint32_t found = 0;
        if (row < rows && column < columns) {
            require_alignment(x + row * columns + column, 4);
            found = *reinterpret_cast<const uint32_t *>(x + row * columns + column);
        }
        words[own * PITCH + word] = found;
    }
    __syncthreads();
    store_transposed(out, words, columns, width);
}
EXPORT(transpose_codes);

// As `quantise`, but `codes [columns, width]` are the transpose, as `transpose_codes` makes it.
template <typename F, typename T>
__device__ void quantise_transposed(uint8_t *codes, float *scale, const T *x, const float *largest, size_t rows,
                                    size_t columns, size_t width) {
    constexpr int PACKS = SIDE / PACK;
    SHARED(uint32_t, words, SIDE * PITCH);
    float factor, inverse;
    factor_and_scale<F>(largest[0], factor, inverse);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        scale[0] = inverse;
    }
    const size_t first_row = size_t(blockIdx.x) * SIDE, first_column = size_t(blockIdx.y) * SIDE;
    const int line = threadIdx.x / PACKS, pack = threadIdx.x % PACKS;
    for (int own = line; own < SIDE; own += 256 / PACKS) {
        const size_t row = first_row + own, column = first_column + PACK * pack;
        uint32_t made[2] = {0, 0};
        if (row < rows && column < columns) {
            const Pack values = load(x, row * columns + column, rows * columns);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const uint8_t code = code_of<F>((Unfused{values.at[i]} * Unfused{factor}).value);
                made[i / 4] |= uint32_t(code) << (8 * (i % 4));
            }
        }
        words[own * PITCH + 2 * pack] = made[0];
        words[own * PITCH + 2 * pack + 1] = made[1];
    }
    __syncthreads();
    store_transposed(codes, words, columns, width);
}

#define QUANTISING(F, T, name)                                                                                      \
    extern "C" __global__ void quantise_##name(uint8_t *codes, float *scale, const T *x, const float *largest,      \
                                               size_t n) {                                                          \
        quantise<F>(codes, scale, x, largest, n);                                                                   \
    }                                                                                                               \
    EXPORT(quantise_##name);                                                                                        \
    extern "C" __global__ void quantise_counting_##name(uint8_t *codes, float *scale, float *underflows, const T *x,     \
                                                        const float *largest, size_t n, size_t part,                \
                                                        size_t stride) {                                            \
        quantise_counting<F>(codes, scale, underflows, x, largest, n, part, stride);                                     \
    }                                                                                                               \
    EXPORT(quantise_counting_##name)

#define OF_TYPE(T, name)                                                                                            \
    extern "C" __global__ void abs_max_of_part_##name(int *parts, const T *x, size_t n, size_t part) {              \
        abs_max_of_part(parts, x, n, part);                                                                         \
    }                                                                                                               \
    EXPORT(abs_max_of_part_##name);                                                                                 \
    QUANTISING(E4m3, T, e4m3_##name);                                                                               \
    QUANTISING(E5m2, T, e5m2_##name);                                                                               \
    extern "C" __global__ void quantise_transposed_e4m3_##name(uint8_t *codes, float *scale, const T *x,            \
                                                               const float *largest, size_t rows, size_t columns,   \
                                                               size_t width) {                                      \
        quantise_transposed<E4m3>(codes, scale, x, largest, rows, columns, width);                                  \
    }                                                                                                               \
    EXPORT(quantise_transposed_e4m3_##name)

OF_TYPE(float, f32);
OF_TYPE(bf16, bf16);
