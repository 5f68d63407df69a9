// Gated feed-forward activation (Shazeer 2020).
#include "pack.cuh"

template <typename T> __device__ void swiglu(T *act, const T *gate, const T *up, size_t n) {
    const size_t first = flat_pack();
    if (first >= n) {
        return;
    }
    Pack g = load(gate, first, n);
    const Pack u = load(up, first, n);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        g.at[i] = g.at[i] / (1.0f + expf(-g.at[i])) * u.at[i];
    }
    store(act, first, n, g);
}

// Gate and up become their own gradients.
template <typename T> __device__ void swiglu_backward(T *gate, T *up, const T *dact, size_t n) {
    const size_t first = flat_pack();
    if (first >= n) {
        return;
    }
    Pack g = load(gate, first, n), u = load(up, first, n);
    const Pack d = load(dact, first, n);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        const float sigmoid = 1.0f / (1.0f + expf(-g.at[i]));
        const float silu = g.at[i] * sigmoid;
        g.at[i] = d.at[i] * u.at[i] * (sigmoid + silu * (1.0f - sigmoid));
        u.at[i] = d.at[i] * silu;
    }
    store(gate, first, n, g);
    store(up, first, n, u);
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void swiglu_##name(T *act, const T *gate, const T *up, size_t n) {                   \
        swiglu(act, gate, up, n);                                                                              \
    }                                                                                                          \
    EXPORT(swiglu_##name);                                                                                     \
    extern "C" __global__ void swiglu_backward_##name(T *gate, T *up, const T *dact, size_t n) {               \
        swiglu_backward(gate, up, dact, n);                                                                    \
    }                                                                                                          \
    EXPORT(swiglu_backward_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
