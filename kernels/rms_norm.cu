// Root-mean-square normalisation (Zhang and Sennrich 2019), by the weight or, with `PLUS_ONE`, by 1 + weight.
#include "norm_backward.cuh"
#include "output.cuh"
#include "row.cuh"

// A warp normalises a row, or several narrow ones; a row of more than 1024 elements is a block's. `y` is left out
// if it is null, and only where nothing is found.
template <bool PLUS_ONE, typename Output, typename T>
__device__ void rms_norm(Output y, float *rstd, const T *x, const T *weight, size_t rows, size_t width, float eps) {
    const size_t row = own_row();
    const bool exists = row < rows;
    // Threads of a warp stay together, whether or not they have a row.
    const size_t start = exists ? row * width : 0, n = exists ? width : 0;
    knowing(are_wide(width, y.to, x, weight), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        const RowPacks<WIDE, T> own(x + start, n);
        float squares[1] = {};
        own.each([&](size_t, const Pack &values) {
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                squares[0] += values.at[i] * values.at[i];
            }
        });
        row_sums(squares, 0);
        const float scale = 1.0f / sqrtf(squares[0] / float(width) + eps);
        if (rstd != nullptr && threadIdx.x == 0 && exists) {
            rstd[row] = scale;
        }
        if (y.to == nullptr) {
            return;
        }
        own.each([&](size_t first, Pack values) {
            const Pack factors = load<WIDE>(weight, first, n);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                values.at[i] = values.at[i] * scale * norm_factor<PLUS_ONE>(factors.at[i]);
            }
            y.template store<WIDE>(start, first, n, values);
        });
    });
    y.end();
}

#define BACKWARD(T, norm, plus_one, form, name, threads, blocks)                                                                   \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                      \
        norm##_##form##_##name(T *dx, float *parts, const T *dy, const T *x, const T *weight, const float *rstd,       \
                               size_t rows, size_t part_rows, size_t width, int accumulate) {                          \
        norm_##form<NormRow<false, plus_one>>(                                                                         \
            NormBackward<T>{dx, parts, dy, x, weight, nullptr, rstd, rows, part_rows, width, accumulate});             \
    }                                                                                                                  \
    EXPORT(norm##_##form##_##name)

#define OF_ONE_TYPE(T, norm, plus_one, name)                                                                           \
    extern "C" __global__ void __launch_bounds__(HELD_ROW_THREADS)                                                     \
        norm##_##name(T *y, float *rstd, const T *x, const T *weight, size_t rows, size_t width, float eps) {          \
        rms_norm<plus_one>(Values<false, T>{y, nullptr}, rstd, x, weight, rows, width, eps);                           \
    }                                                                                                                  \
    EXPORT(norm##_##name);                                                                                             \
    extern "C" __global__ void __launch_bounds__(HELD_ROW_THREADS)                                                     \
        norm##_largest_##name(T *y, float *rstd, const T *x, const T *weight, size_t rows, size_t width, float eps,    \
                              int *parts) {                                                                            \
        rms_norm<plus_one>(Values<true, T>{y, parts}, rstd, x, weight, rows, width, eps);                              \
    }                                                                                                                  \
    EXPORT(norm##_largest_##name);                                                                                     \
    extern "C" __global__ void __launch_bounds__(HELD_ROW_THREADS)                                                     \
        norm##_codes_##name(uint8_t *y, float *rstd, const T *x, const T *weight, size_t rows, size_t width,           \
                            float eps, const float *largest, int converts) {                                           \
        rms_norm<plus_one>(Codes<T>(y, largest, converts), rstd, x, weight, rows, width, eps);                         \
    }                                                                                                                  \
    EXPORT(norm##_codes_##name);                                                                                       \
    BACKWARD(T, norm, plus_one, backward, name, ROW_THREADS_MAX, sizeof(T) == 2 ? 2 : 1);                              \
    BACKWARD(T, norm, plus_one, backward_wide, name, HELD_THREADS_MAX, sizeof(T) == 2 ? 2 : 1);                        \
    BACKWARD(T, norm, plus_one, backward_widest, name, ROW_THREADS_MAX, 1)

OF_ONE_TYPE(float, rms_norm, false, f32);
OF_ONE_TYPE(bf16, rms_norm, false, bf16);
OF_ONE_TYPE(float, rms_norm_plus_one, true, f32);
OF_ONE_TYPE(bf16, rms_norm_plus_one, true, bf16);
