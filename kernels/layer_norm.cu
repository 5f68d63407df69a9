// Layer normalisation (Ba, Kiros and Hinton 2016).
#include "norm_backward.cuh"
#include "output.cuh"
#include "row.cuh"

// Rows as in `rms_norm`. The variance is summed after the mean is known, since of squares and squared sums little would be left
// where a mean is large. `y` as in `rms_norm`.
template <typename Output, typename T>
__device__ void layer_norm(Output y, float *means, float *rstds, const T *x, const T *weight, const T *bias, size_t rows,
                           size_t width, float eps) {
    const size_t row = own_row();
    const bool exists = row < rows;
    // Threads of a warp stay together, whether or not they have a row.
    const size_t start = exists ? row * width : 0, n = exists ? width : 0;
    knowing(are_wide(width, y.to, x, weight, bias), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        const RowPacks<WIDE, T> own(x + start, n);
        float sum[1] = {}, squares[1] = {};
        own.each([&](size_t, const Pack &values) {
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                sum[0] += values.at[i];
            }
        });
        row_sums(sum, 0);
        const float mean = sum[0] / float(width);
        own.each([&](size_t first, const Pack &values) {
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const float centred = WIDE || first + i < n ? values.at[i] - mean : 0.0f;
                squares[0] += centred * centred;
            }
        });
        row_sums(squares, 1);
        const float rstd = 1.0f / sqrtf(squares[0] / float(width) + eps);
        if (means != nullptr && threadIdx.x == 0 && exists) {
            means[row] = mean;
        }
        if (rstds != nullptr && threadIdx.x == 0 && exists) {
            rstds[row] = rstd;
        }
        if (y.to == nullptr) {
            return;
        }
        own.each([&](size_t first, Pack values) {
            const Pack factors = load<WIDE>(weight, first, n), shifts = load<WIDE>(bias, first, n);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                values.at[i] = (values.at[i] - mean) * rstd * factors.at[i] + shifts.at[i];
            }
            y.template store<WIDE>(start, first, n, values);
        });
    });
    y.end();
}

#define BACKWARD(T, form, name, threads, blocks)                                                                          \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                         \
        layer_##form##_##name(T *dx, float *parts, const T *dy, const T *x, const T *weight, const float *mean,   \
                              const float *rstd, size_t rows, size_t part_rows, size_t width, int accumulate) {   \
        form<NormRow<true>>(NormBackward<T>{dx, parts, dy, x, weight, mean, rstd, rows, part_rows, width, accumulate});    \
    }                                                                                                             \
    EXPORT(layer_##form##_##name)

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void __launch_bounds__(HELD_ROW_THREADS) layer_norm_##name(T *y, float *mean, float *rstd, const T *x, const T *weight,  \
                                                 const T *bias, size_t rows, size_t width, float eps) {        \
        layer_norm(Values<false, T>{y, nullptr}, mean, rstd, x, weight, bias, rows, width, eps);                          \
    }                                                                                                          \
    EXPORT(layer_norm_##name);                                                                                 \
    extern "C" __global__ void __launch_bounds__(HELD_ROW_THREADS) layer_norm_largest_##name(T *y, float *mean, float *rstd, const T *x,           \
                                                         const T *weight, const T *bias, size_t rows,          \
                                                         size_t width, float eps, int *parts) {                \
        layer_norm(Values<true, T>{y, parts}, mean, rstd, x, weight, bias, rows, width, eps);                             \
    }                                                                                                          \
    EXPORT(layer_norm_largest_##name);                                                                         \
    extern "C" __global__ void __launch_bounds__(HELD_ROW_THREADS) layer_norm_codes_##name(uint8_t *y, float *mean, float *rstd, const T *x,       \
                                                       const T *weight, const T *bias, size_t rows,            \
                                                       size_t width, float eps, const float *largest,          \
                                                       int converts) {                                         \
        layer_norm(Codes<T>(y, largest, converts), mean, rstd, x, weight, bias, rows, width, eps);             \
    }                                                                                                          \
    EXPORT(layer_norm_codes_##name);                                                                           \
    BACKWARD(T, norm_backward, name, ROW_THREADS_MAX, 1);                                                         \
    BACKWARD(T, norm_backward_wide, name, HELD_THREADS_MAX, 1);                                                   \
    BACKWARD(T, norm_backward_widest, name, ROW_THREADS_MAX, 1)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
