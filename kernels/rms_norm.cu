// Root-mean-square normalisation (Zhang and Sennrich 2019).
#include "columns.cuh"
#include "reduce.cuh"

// A block normalises one row, which it reads twice: the second time from the first-level cache.
template <typename T>
__device__ void rms_norm(T *y, float *rstd, const T *x, const T *weight, size_t width, float eps) {
    const size_t row = blockIdx.x;
    const T *own = x + row * width;
    float squares = 0.0f;
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        const Pack values = load(own, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            squares += values.at[i] * values.at[i];
        }
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / float(width) + eps);
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

// Gradient of the input; a block works on one row.
template <typename T>
__device__ void rms_norm_backward(T *dx, const T *dy, const T *x, const T *weight, const float *rstd, size_t width,
                                  int accumulate) {
    const size_t row = blockIdx.x, start = row * width;
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
    const float correction = block_sum(dot) * scale * scale * scale / float(width);
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

// Gradient of the weight.
template <typename G, typename T>
__device__ void rms_norm_dweight(G *dweight, const T *dy, const T *x, const float *rstd, size_t rows, size_t width,
                                 int accumulate) {
    const size_t first = column_pack();
    const Pack sums = column_sums(rows, [&](size_t row) {
        Pack terms = load(dy + row * width, first, width);
        const Pack values = load(x + row * width, first, width);
        const float scale = rstd[row];
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            terms.at[i] *= values.at[i] * scale;
        }
        return terms;
    });
    if (threadIdx.y == 0 && first < width) {
        store_or_add(dweight, first, width, sums, accumulate);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void rms_norm_##name(T *y, float *rstd, const T *x, const T *weight, size_t width,   \
                                               float eps) {                                                    \
        rms_norm(y, rstd, x, weight, width, eps);                                                              \
    }                                                                                                          \
    EXPORT(rms_norm_##name);                                                                                   \
    extern "C" __global__ void rms_norm_backward_##name(T *dx, const T *dy, const T *x, const T *weight,       \
                                                        const float *rstd, size_t width, int accumulate) {     \
        rms_norm_backward(dx, dy, x, weight, rstd, width, accumulate);                                         \
    }                                                                                                          \
    EXPORT(rms_norm_backward_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);

#define DWEIGHT(G, T, name)                                                                                    \
    extern "C" __global__ void __launch_bounds__(COLUMN_PACKS *ROW_LANES_MAX)                                  \
        rms_norm_dweight_##name(G *dweight, const T *dy, const T *x, const float *rstd, size_t rows,           \
                                size_t width, int accumulate) {                                                \
        rms_norm_dweight(dweight, dy, x, rstd, rows, width, accumulate);                                       \
    }                                                                                                          \
    EXPORT(rms_norm_dweight_##name)

DWEIGHT(float, float, f32_f32);
DWEIGHT(float, bf16, f32_bf16);
DWEIGHT(bf16, float, bf16_f32);
DWEIGHT(bf16, bf16, bf16_bf16);
