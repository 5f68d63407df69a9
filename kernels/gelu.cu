// Gaussian error linear unit (Hendrycks and Gimpel 2016), in its form with a tanh. With `FINDS` a block writes the largest
// magnitude of what it stores into its element of `parts`.
#include "magnitude.cuh"

// sqrt(8 / pi), twice the factor in the tanh: 1 + tanh(u) is 2 sigmoid(2 u).
constexpr float FACTOR = 1.5957691f;
// The weight of the cube.
constexpr float CUBE = 0.044715f;

// The share of `x` that passes.
__device__ inline float gate(float x) { return 1.0f / (1.0f + expf(-FACTOR * (x + CUBE * x * x * x))); }

template <bool FINDS, typename T> __device__ void gelu(T *act, const T *x, size_t n, int *parts) {
    const size_t first = flat_pack();
    int largest = 0;
    if (first < n) {
        Pack values = load(x, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values.at[i] *= gate(values.at[i]);
        }
        store_finding<FINDS>(largest, act, first, n, values);
    }
    store_largest<FINDS>(parts, largest);
}

// `x` becomes its own gradient.
template <bool FINDS, typename T> __device__ void gelu_backward(T *x, const T *dact, size_t n, int *parts) {
    const size_t first = flat_pack();
    int largest = 0;
    if (first < n) {
        Pack values = load(x, first, n);
        const Pack gradients = load(dact, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float value = values.at[i], share = gate(value);
            const float slope = FACTOR * (1.0f + 3.0f * CUBE * value * value);
            values.at[i] = gradients.at[i] * share * (1.0f + value * (1.0f - share) * slope);
        }
        store_finding<FINDS>(largest, x, first, n, values);
    }
    store_largest<FINDS>(parts, largest);
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void gelu_##name(T *act, const T *x, size_t n) {                                     \
        gelu<false>(act, x, n, nullptr);                                                                       \
    }                                                                                                          \
    EXPORT(gelu_##name);                                                                                       \
    extern "C" __global__ void gelu_largest_##name(T *act, const T *x, size_t n, int *parts) {                 \
        gelu<true>(act, x, n, parts);                                                                          \
    }                                                                                                          \
    EXPORT(gelu_largest_##name);                                                                               \
    extern "C" __global__ void gelu_backward_##name(T *x, const T *dact, size_t n) {                           \
        gelu_backward<false>(x, dact, n, nullptr);                                                             \
    }                                                                                                          \
    EXPORT(gelu_backward_##name);                                                                              \
    extern "C" __global__ void gelu_backward_largest_##name(T *x, const T *dact, size_t n, int *parts) {       \
        gelu_backward<true>(x, dact, n, parts);                                                                \
    }                                                                                                          \
    EXPORT(gelu_backward_largest_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
