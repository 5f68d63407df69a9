// Root-mean-square normalisation (Zhang and Sennrich 2019).
#include "columns.cuh"
#include "reduce.cuh"

// A block normalises one row, or a warp a narrow one. It is read twice: the second time from the first-level cache.
template <typename T>
__device__ void rms_norm(T *y, float *rstd, const T *x, const T *weight, size_t rows, size_t width, float eps) {
    const size_t row = own_row();
    if (row >= rows) {
        return;
    }
    const T *own = x + row * width;
    float squares = 0.0f;
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        const Pack values = load(own, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            squares += values.at[i] * values.at[i];
        }
    }
    const float scale = 1.0f / sqrtf(row_sum(squares) / float(width) + eps);
    if (rstd != nullptr && threadIdx.x == 0) {
        rstd[row] = scale;
    }
    if (y == nullptr) {
        return;
    }
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        Pack values = load(own, first, width);
        const Pack weights = load(weight, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values.at[i] = values.at[i] * scale * weights.at[i];
        }
        store(y + row * width, first, width, values);
    }
}

// Gradient of the input; rows as in `rms_norm`.
template <typename T>
__device__ void rms_norm_backward(T *dx, const T *dy, const T *x, const T *weight, const float *rstd, size_t rows,
                                  size_t width, int accumulate) {
    const size_t row = own_row(), start = row * width;
    if (row >= rows) {
        return;
    }
    float dot = 0.0f;
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        const Pack gradients = load(dy + start, first, width), values = load(x + start, first, width);
        const Pack weights = load(weight, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            dot += gradients.at[i] * weights.at[i] * values.at[i];
        }
    }
    const float scale = rstd[row];
    const float correction = row_sum(dot) * scale * scale * scale / float(width);
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        Pack gradients = load(dy + start, first, width);
        const Pack values = load(x + start, first, width), weights = load(weight, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            gradients.at[i] = gradients.at[i] * weights.at[i] * scale - values.at[i] * correction;
        }
        store_or_add(dx + start, first, width, gradients, accumulate);
    }
}

// Parts of the weight's gradient.
template <typename T>
__device__ void rms_norm_dweight(float *parts, const T *dy, const T *x, const float *rstd, size_t rows,
                                 size_t part_rows, size_t width) {
    const size_t first = column_pack();
    const bool wide = first < width && are_wide(width, dy, x);
    const Pack sums = column_sums(rows, part_rows, wide, [&](auto known_wide, size_t row) {
        Pack terms = load<known_wide>(dy + row * width, first, width);
        const Pack values = load<known_wide>(x + row * width, first, width);
        const float scale = rstd[row];
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            terms.at[i] *= values.at[i] * scale;
        }
        return terms;
    });
    store_part(parts, first, width, sums);
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void rms_norm_##name(T *y, float *rstd, const T *x, const T *weight, size_t rows,    \
                                               size_t width, float eps) {                                      \
        rms_norm(y, rstd, x, weight, rows, width, eps);                                                        \
    }                                                                                                          \
    EXPORT(rms_norm_##name);                                                                                   \
    extern "C" __global__ void rms_norm_backward_##name(T *dx, const T *dy, const T *x, const T *weight,       \
                                                        const float *rstd, size_t rows, size_t width,          \
                                                        int accumulate) {                                      \
        rms_norm_backward(dx, dy, x, weight, rstd, rows, width, accumulate);                                   \
    }                                                                                                          \
    EXPORT(rms_norm_backward_##name);                                                                          \
    extern "C" __global__ void __launch_bounds__(COLUMN_PACKS *ROW_LANES_MAX)                                  \
        rms_norm_dweight_##name(float *parts, const T *dy, const T *x, const float *rstd, size_t rows,         \
                                size_t part_rows, size_t width) {                                              \
        rms_norm_dweight(parts, dy, x, rstd, rows, part_rows, width);                                          \
    }                                                                                                          \
    EXPORT(rms_norm_dweight_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
