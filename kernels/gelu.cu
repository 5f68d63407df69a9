// Gaussian error linear unit (Hendrycks and Gimpel 2016), in its form with a tanh.
#include "gate.cuh"
#include "output.cuh"

template <typename Output, typename T> __device__ void gelu(Output act, const T *x, size_t n) {
    const size_t first = flat_pack();
    if (first < n) {
        Pack values = load(x, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values.at[i] *= gelu_share(values.at[i]);
        }
        act.template store<false>(0, first, n, values);
    }
    act.end();
}

// `x` becomes its own gradient.
template <typename Output, typename T> __device__ void gelu_backward(Output x, const T *dact, size_t n) {
    const size_t first = flat_pack();
    if (first < n) {
        Pack values = load(x.to, first, n);
        const Pack gradients = load(dact, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float value = values.at[i], share = gelu_share(value);
            values.at[i] = gradients.at[i] * share * gelu_slope(value, share);
        }
        x.template store<false>(0, first, n, values);
    }
    x.end();
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void gelu_##name(T *act, const T *x, size_t n) {                                     \
        gelu(Values<false, T>{act, nullptr}, x, n);                                                                       \
    }                                                                                                          \
    EXPORT(gelu_##name);                                                                                       \
    extern "C" __global__ void gelu_largest_##name(T *act, const T *x, size_t n, int *parts) {                 \
        gelu(Values<true, T>{act, parts}, x, n);                                                                          \
    }                                                                                                          \
    EXPORT(gelu_largest_##name);                                                                               \
    extern "C" __global__ void gelu_codes_##name(uint8_t *act, const T *x, size_t n, const float *largest,     \
                                                 int converts) {                                               \
        gelu(Codes<T>(act, largest, converts), x, n);                                                          \
    }                                                                                                          \
    EXPORT(gelu_codes_##name);                                                                                 \
    extern "C" __global__ void gelu_backward_##name(T *x, const T *dact, size_t n) {                           \
        gelu_backward(Values<false, T>{x, nullptr}, dact, n);                                                             \
    }                                                                                                          \
    EXPORT(gelu_backward_##name);                                                                              \
    extern "C" __global__ void gelu_backward_largest_##name(T *x, const T *dact, size_t n, int *parts) {       \
        gelu_backward(Values<true, T>{x, parts}, dact, n);                                                                \
    }                                                                                                          \
    EXPORT(gelu_backward_largest_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
