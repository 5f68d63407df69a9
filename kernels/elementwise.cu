// Fill, copy, bias.
#include "columns.cuh"

template <typename T> __device__ void fill(T *out, size_t n, float value) {
    const size_t first = flat_pack();
    if (first < n) {
        Pack pack;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            pack.at[i] = value;
        }
        store(out, first, n, pack);
    }
}

template <typename O, typename I> __device__ void copy(O *out, const I *x, size_t n) {
    const size_t first = flat_pack();
    if (first < n) {
        store(out, first, n, load(x, first, n));
    }
}

// A block copies one row. Rows are so many elements apart.
template <typename O, typename I>
__device__ void copy_rows(O *out, size_t out_stride, const I *x, size_t x_stride, size_t width) {
    O *to = out + blockIdx.x * out_stride;
    const I *from = x + blockIdx.x * x_stride;
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        store(to, first, width, load(from, first, width));
    }
}

// A block works on one row, `stride` elements after the one before. The bias is up to three vectors; each has packs of its own.
template <typename T>
__device__ void add_bias(T *out, size_t stride, const T *first_bias, const T *second_bias, const T *third_bias,
                         int first_width, int second_width, int third_width) {
    const int seconds = packs_of(first_width), thirds = seconds + packs_of(second_width);
    const int end = thirds + packs_of(third_width);
    for (int pack = threadIdx.x; pack < end; pack += blockDim.x) {
        const T *bias = first_bias;
        int before = 0, column = 0, width = first_width;
        if (pack >= thirds) {
            bias = third_bias, before = thirds, column = first_width + second_width, width = third_width;
        } else if (pack >= seconds) {
            bias = second_bias, before = seconds, column = first_width, width = second_width;
        }
        T *const part = out + blockIdx.x * stride + column;
        const size_t first = size_t(pack - before) * PACK;
        store_or_add(part, first, width, load(bias, first, width), true);
    }
}

// Parts of the bias's gradient: of `part_rows` rows, the blockIdx.y-th so many. Few columns alone would be few blocks. Rows of
// dy are `stride` elements apart.
template <typename T>
__device__ void bias_backward(float *parts, const T *dy, size_t stride, size_t rows, size_t part_rows, size_t width) {
    const size_t first = column_pack(), start = blockIdx.y * part_rows;
    const size_t end = start + part_rows < rows ? start + part_rows : rows;
    const auto term = [&](auto known_wide, size_t row) { return load<known_wide>(dy + row * stride, first, width); };
    const bool wide = first < width && width % PACK == 0 && are_wide(stride, dy);
    const float sum = column_sums(start, end, wide, term);
    float *const part = parts + blockIdx.y * width;
    store_column_sums<float>(width, sum, false, [&](size_t column) { return part + column; });
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void fill_##name(T *out, size_t n, float value) { fill(out, n, value); }             \
    EXPORT(fill_##name);                                                                                       \
    extern "C" __global__ void __launch_bounds__(COLUMN_PACKS *ROW_LANES_MAX)                                  \
        bias_backward_##name(float *parts, const T *dy, size_t stride, size_t rows, size_t part_rows,          \
                             size_t width) {                                                                   \
        bias_backward(parts, dy, stride, rows, part_rows, width);                                              \
    }                                                                                                          \
    EXPORT(bias_backward_##name);                                                                              \
    extern "C" __global__ void add_bias_##name(T *out, size_t stride, const T *first_bias,                     \
                                               const T *second_bias, const T *third_bias, int first_width,     \
                                               int second_width, int third_width) {                            \
        add_bias(out, stride, first_bias, second_bias, third_bias, first_width, second_width, third_width);    \
    }                                                                                                          \
    EXPORT(add_bias_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);

#define OF_TWO_TYPES(O, I, name)                                                                               \
    extern "C" __global__ void copy_##name(O *out, const I *x, size_t n) { copy(out, x, n); }                  \
    EXPORT(copy_##name);                                                                                       \
    extern "C" __global__ void copy_rows_##name(O *out, size_t out_stride, const I *x, size_t x_stride,        \
                                                size_t width) {                                                \
        copy_rows(out, out_stride, x, x_stride, width);                                                        \
    }                                                                                                          \
    EXPORT(copy_rows_##name)

OF_TWO_TYPES(float, float, f32_f32);
OF_TWO_TYPES(float, bf16, f32_bf16);
OF_TWO_TYPES(bf16, float, bf16_f32);
OF_TWO_TYPES(bf16, bf16, bf16_bf16);
