// Sums of rows, one row after the other.
#include "pack.cuh"

// Adds, and rounds as if the sum were stored: whoever goes on from what is stored has the same bits.
template <typename T> __device__ void add_rounded(Pack &sums, const Pack &terms) {
    add(sums, terms);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        sums.at[i] = widen(narrow<T>(sums.at[i]));
    }
}

template <typename T>
__device__ void sum_in_order(T *out, const T *x, size_t rows, size_t width, int accumulate) {
    const size_t first = flat_pack();
    if (first >= width) {
        return;
    }
    knowing(are_wide(width, out, x), [&](auto known_wide) {
        Pack sums = load<known_wide>(accumulate ? out : x, first, width);
#pragma unroll 4
        for (size_t row = accumulate ? 0 : 1; row < rows; row++) {
            add_rounded<T>(sums, load<known_wide>(x + row * width, first, width));
        }
        store(out, first, width, sums);
    });
}

#define OF_ONE_TYPE(T, name)                                                                                 \
    extern "C" __global__ void sum_in_order_##name(T *out, const T *x, size_t rows, size_t width,            \
                                                   int accumulate) {                                         \
        sum_in_order(out, x, rows, width, accumulate);                                                       \
    }                                                                                                        \
    EXPORT(sum_in_order_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
