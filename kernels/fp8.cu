// Tensors as codes of FP8 with one scale each: the bits of `numerics/fp8.rs`.
#include "codes.cuh"

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

// Codes that a thread makes at a time: 16 bytes.
constexpr int CODES = 2 * PACK;

// Codes of sixteen values times a factor.
template <typename F> __device__ uint4 codes_of(const Pack (&packs)[2], float factor, int converts) {
    const uint2 low = codes_of<F>(packs[0], factor, converts), high = codes_of<F>(packs[1], factor, converts);
    return {low.x, low.y, high.x, high.y};
}

// Codes of the sixteen elements from `first` on. Calls `look` with each pack of them.
template <typename F, typename T, typename Look>
__device__ void quantise_codes(uint8_t *codes, const T *x, float factor, size_t first, size_t n, int converts, Look look) {
    knowing(first + CODES <= n && are_wide(CODES, codes) && are_wide(CODES, x), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        const Pack packs[2] = {load<WIDE>(x, first, n), load<WIDE>(x, first + PACK, n)};
        const uint4 made = codes_of<F>(packs, factor, converts);
        if constexpr (WIDE) {
            require_alignment(codes + first, 16);
            *reinterpret_cast<uint4 *>(codes + first) = made;
        } else {
            const uint32_t words[4] = {made.x, made.y, made.z, made.w};
#pragma unroll
            for (int i = 0; i < CODES; i++) {
                if (first + i < n) {
                    codes[first + i] = uint8_t(words[i / 4] >> (8 * (i % 4)));
                }
            }
        }
        look(packs);
    });
}

template <typename F, typename T>
__device__ void quantise(uint8_t *codes, float *scale, const T *x, const float *largest, size_t n, int converts) {
    float factor, inverse;
    factor_and_scale<F>(largest[0], factor, inverse);
    const size_t first = 2 * flat_pack();
    if (first == 0) {
        scale[0] = inverse;
    }
    if (first < n) {
        quantise_codes<F>(codes, x, factor, first, n, converts, [](const Pack (&)[2]) {});
    }
}

// The bits of the largest magnitude whose code is zero, half the smallest value, which is a tie. Zero if the scale is NaN.
template <typename F> __device__ uint32_t largest_underflow(float scale) {
    const float half = __uint_as_float(F::SMALLEST_NORMAL - (uint32_t(24 - F::DROPPED) << 23));
    const int bits = magnitude((Unfused{half} * Unfused{scale}).value);
    return bits < 0x7f800000 ? bits : 0;
}

// As `quantise`; each block makes a part, and adds how many elements underflow to a row of `underflows`.
template <typename F, typename T>
__device__ void quantise_counting(uint8_t *codes, float *scale, float *underflows, const T *x, const float *largest, size_t n,
                                  size_t part, size_t stride, int converts) {
    float factor, inverse;
    factor_and_scale<F>(largest[0], factor, inverse);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        scale[0] = inverse;
    }
    const size_t start = blockIdx.x * part;
    const size_t end = n < start + part ? n : start + part;
    const uint32_t zeroed = largest_underflow<F>(inverse);
    int count = 0;
    for (size_t first = start + threadIdx.x * CODES; first < end; first += blockDim.x * CODES) {
        quantise_codes<F>(codes, x, factor, first, end, converts, [&](const Pack (&packs)[2]) {
#pragma unroll
            for (int i = 0; i < CODES; i++) {
                // Minus one, zero wraps to the largest number, and is not counted.
                count += uint32_t(magnitude(packs[i / PACK].at[i % PACK])) - 1 < zeroed;
            }
        });
    }
    count = block_sum(count);
    if (threadIdx.x == 0 && count > 0) {
        underflows[blockIdx.x * stride] += float(count);
    }
}

// Rows and columns of what a block of 256 threads transposes. A thread has four rows of sixteen columns.
constexpr int SIDE = 128;
constexpr int ACROSS = SIDE / CODES;

// Words of four codes, one below the other, of sixteen neighbouring columns. Rows of 128 bytes, whose 16-byte pieces change places from
// sixteen columns to the next, so that neither side meets a bank twice.
__device__ inline int place_in_tile(int column, int piece) { return column * ACROSS + (piece ^ column / CODES % ACROSS); }

// The transpose of four words of four bytes: word i has byte i of each.
__device__ inline void transpose_bytes(uint32_t (&words)[4]) {
    const uint32_t low[2] = {__byte_perm(words[0], words[1], 0x5140), __byte_perm(words[2], words[3], 0x5140)};
    const uint32_t high[2] = {__byte_perm(words[0], words[1], 0x7362), __byte_perm(words[2], words[3], 0x7362)};
    words[0] = __byte_perm(low[0], low[1], 0x5410);
    words[1] = __byte_perm(low[0], low[1], 0x7632);
    words[2] = __byte_perm(high[0], high[1], 0x5410);
    words[3] = __byte_perm(high[0], high[1], 0x7632);
}

// Writes a block's codes into the transpose `out [columns, width]`: `codes_at(row, column)` gives those of sixteen columns, in bounds or not. `out` begins
// at a multiple of 16 bytes, as all leases and parameters do.
// `columns` and `width` are multiples of 16.
template <typename CodesAt> __device__ void transpose_tile(uint8_t *out, size_t columns, size_t width, CodesAt codes_at) {
    SHARED(uint32_t, tile, SIDE *SIDE / 4);
    const size_t first_row = size_t(blockIdx.x) * SIDE, first_column = size_t(blockIdx.y) * SIDE;
    const int line = threadIdx.x / ACROSS, piece = threadIdx.x % ACROSS;
    uint4 found[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        found[i] = codes_at(first_row + 4 * line + i, first_column + CODES * piece);
    }
    uint32_t words[4][4] = {{found[0].x, found[1].x, found[2].x, found[3].x},
                            {found[0].y, found[1].y, found[2].y, found[3].y},
                            {found[0].z, found[1].z, found[2].z, found[3].z},
                            {found[0].w, found[1].w, found[2].w, found[3].w}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        transpose_bytes(words[i]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            tile[4 * place_in_tile(CODES * piece + 4 * i + j, line / 4) + line % 4] = words[i][j];
        }
    }
    __syncthreads();
#pragma unroll
    for (int own = line; own < SIDE; own += 256 / ACROSS) {
        const size_t row = first_column + own, column = first_row + CODES * piece;
        if (row < columns && column < width) {
            const int first = 4 * place_in_tile(own, piece);
            const uint4 made = {tile[first], tile[first + 1], tile[first + 2], tile[first + 3]};
            require_alignment(out + row * width + column, 16);
            *reinterpret_cast<uint4 *>(out + row * width + column) = made;
        }
    }
}

// `out [columns, width]` of `x [rows, columns]`; all sizes but `rows` are multiples of 16, and rows up to `width` are zeros.
extern "C" __global__ void __launch_bounds__(256) transpose_codes(uint8_t *out, const uint8_t *x, size_t rows, size_t columns, size_t width) {
    transpose_tile(out, columns, width, [&](size_t row, size_t column) {
        uint4 found = {0, 0, 0, 0};
        if (row < rows && column < columns) {
            require_alignment(x + row * columns + column, 16);
            found = *reinterpret_cast<const uint4 *>(x + row * columns + column);
        }
        return found;
    });
}
EXPORT(transpose_codes);

// As `quantise`, but `codes [columns, width]` are the transpose, as `transpose_codes` makes it.
template <typename F, typename T>
__device__ void quantise_transposed(uint8_t *codes, float *scale, const T *x, const float *largest, size_t rows,
                                    size_t columns, size_t width, int converts) {
    float factor, inverse;
    factor_and_scale<F>(largest[0], factor, inverse);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        scale[0] = inverse;
    }
    const bool is_wide = are_wide(columns, x);
    transpose_tile(codes, columns, width, [&](size_t row, size_t column) {
        uint4 made = {0, 0, 0, 0};
        if (row < rows && column < columns) {
            const size_t first = row * columns + column;
            knowing(is_wide, [&](auto wide) {
                constexpr bool WIDE = decltype(wide)();
                const Pack packs[2] = {load<WIDE>(x, first, rows * columns), load<WIDE>(x, first + PACK, rows * columns)};
                made = codes_of<F>(packs, factor, converts);
            });
        }
        return made;
    });
}

#define QUANTISING(F, T, name)                                                                                      \
    extern "C" __global__ void quantise_##name(uint8_t *codes, float *scale, const T *x, const float *largest,      \
                                               size_t n, int converts) {                                            \
        quantise<F>(codes, scale, x, largest, n, converts);                                                         \
    }                                                                                                               \
    EXPORT(quantise_##name);                                                                                        \
    extern "C" __global__ void quantise_counting_##name(uint8_t *codes, float *scale, float *underflows, const T *x,     \
                                                        const float *largest, size_t n, size_t part,                \
                                                        size_t stride, int converts) {                              \
        quantise_counting<F>(codes, scale, underflows, x, largest, n, part, stride, converts);                      \
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
                                                               size_t width, int converts) {                        \
        quantise_transposed<E4m3>(codes, scale, x, largest, rows, columns, width, converts);                        \
    }                                                                                                               \
    EXPORT(quantise_transposed_e4m3_##name)

OF_TYPE(float, f32);
OF_TYPE(bf16, bf16);
