// Layer normalisation (Ba, Kiros and Hinton 2016).
#include "columns.cuh"
#include "reduce.cuh"

// A block normalises one row, or a warp a narrow one. It is read three times, from the first-level cache but for the
// first: the variance is summed after the mean is known, since of squares and squared sums little would be left where a
// mean is large.
template <typename T>
__device__ void layer_norm(T *y, float *means, float *rstds, const T *x, const T *weight, const T *bias, size_t rows,
                           size_t width, float eps) {
    const size_t row = own_row();
    if (row >= rows) {
        return;
    }
    const T *own = x + row * width;
    float sum = 0.0f, squares = 0.0f;
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        const Pack values = load(own, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            sum += values.at[i];
        }
    }
    const float mean = row_sum(sum) / float(width);
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        const Pack values = load(own, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float centred = first + i < width ? values.at[i] - mean : 0.0f;
            squares += centred * centred;
        }
    }
    const float rstd = 1.0f / sqrtf(row_sum(squares) / float(width) + eps);
    if (means != nullptr && threadIdx.x == 0) {
        means[row] = mean;
    }
    if (rstds != nullptr && threadIdx.x == 0) {
        rstds[row] = rstd;
    }
    if (y == nullptr) {
        return;
    }
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        Pack values = load(own, first, width);
        const Pack weights = load(weight, first, width), biases = load(bias, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values.at[i] = (values.at[i] - mean) * rstd * weights.at[i] + biases.at[i];
        }
        store(y + row * width, first, width, values);
    }
}

// Gradient of the input; rows as in `layer_norm`.
template <typename T>
__device__ void layer_norm_backward(T *dx, const T *dy, const T *x, const T *weight, const float *means,
                                    const float *rstds, size_t rows, size_t width, int accumulate) {
    const size_t row = own_row(), start = row * width;
    if (row >= rows) {
        return;
    }
    const float mean = means[row], rstd = rstds[row];
    float sum = 0.0f, dot = 0.0f;
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        const Pack gradients = load(dy + start, first, width), values = load(x + start, first, width);
        const Pack weights = load(weight, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float weighted = gradients.at[i] * weights.at[i];
            sum += weighted;
            dot += weighted * (values.at[i] - mean);
        }
    }
    const float shift = row_sum(sum) / float(width);
    const float slope = row_sum(dot) * rstd * rstd / float(width);
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        Pack gradients = load(dy + start, first, width);
        const Pack values = load(x + start, first, width), weights = load(weight, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float weighted = gradients.at[i] * weights.at[i];
            gradients.at[i] = (weighted - shift - (values.at[i] - mean) * slope) * rstd;
        }
        store_or_add(dx + start, first, width, gradients, accumulate);
    }
}

// Parts of the weight's gradient; those of the bias are `bias_backward`'s in `elementwise.cu`.
template <typename T>
__device__ void layer_norm_dweight(float *parts, const T *dy, const T *x, const float *means, const float *rstds,
                                   size_t rows, size_t part_rows, size_t width) {
    const size_t first = column_pack();
    const bool wide = first < width && are_wide(width, dy, x);
    const Pack sums = column_sums(rows, part_rows, wide, [&](auto known_wide, size_t row) {
        Pack terms = load<known_wide>(dy + row * width, first, width);
        const Pack values = load<known_wide>(x + row * width, first, width);
        const float mean = means[row], rstd = rstds[row];
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            terms.at[i] *= (values.at[i] - mean) * rstd;
        }
        return terms;
    });
    store_part(parts, first, width, sums);
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void layer_norm_##name(T *y, float *mean, float *rstd, const T *x, const T *weight,  \
                                                 const T *bias, size_t rows, size_t width, float eps) {        \
        layer_norm(y, mean, rstd, x, weight, bias, rows, width, eps);                                          \
    }                                                                                                          \
    EXPORT(layer_norm_##name);                                                                                 \
    extern "C" __global__ void layer_norm_backward_##name(T *dx, const T *dy, const T *x, const T *weight,     \
                                                          const float *mean, const float *rstd, size_t rows,   \
                                                          size_t width, int accumulate) {                      \
        layer_norm_backward(dx, dy, x, weight, mean, rstd, rows, width, accumulate);                           \
    }                                                                                                          \
    EXPORT(layer_norm_backward_##name);                                                                        \
    extern "C" __global__ void __launch_bounds__(COLUMN_PACKS *ROW_LANES_MAX)                                  \
        layer_norm_dweight_##name(float *parts, const T *dy, const T *x, const float *mean, const float *rstd, \
                                  size_t rows, size_t part_rows, size_t width) {                               \
        layer_norm_dweight(parts, dy, x, mean, rstd, rows, part_rows, width);                                  \
    }                                                                                                          \
    EXPORT(layer_norm_dweight_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
