// The gate on the output of attention (Qiu et al. 2025): x sigmoid(gate), a pack a thread.
#include "pack.cuh"
#include "sigmoid.cuh"

template <typename T> __device__ void sigmoid_gate(T *out, const T *x, const T *gate, size_t n) {
    const size_t first = flat_pack();
    if (first < n) {
        Pack values = load(x, first, n);
        const Pack gates = load(gate, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values.at[i] *= sigmoid(gates.at[i]);
        }
        store(out, first, n, values);
    }
}

template <typename T>
__device__ void sigmoid_gate_backward(T *dx, T *dgate, const T *dout, const T *x, const T *gate, size_t n) {
    const size_t first = flat_pack();
    if (first < n) {
        Pack values = load(x, first, n), gradients = load(dout, first, n);
        const Pack gates = load(gate, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float share = sigmoid(gates.at[i]), passed = gradients.at[i] * share;
            values.at[i] *= passed * (1.0f - share);
            gradients.at[i] = passed;
        }
        store(dx, first, n, gradients);
        store(dgate, first, n, values);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void sigmoid_gate_##name(T *out, const T *x, const T *gate, size_t n) {              \
        sigmoid_gate(out, x, gate, n);                                                                         \
    }                                                                                                          \
    EXPORT(sigmoid_gate_##name);                                                                               \
    extern "C" __global__ void sigmoid_gate_backward_##name(T *dx, T *dgate, const T *dout, const T *x,        \
                                                            const T *gate, size_t n) {                         \
        sigmoid_gate_backward(dx, dgate, dout, x, gate, n);                                                    \
    }                                                                                                          \
    EXPORT(sigmoid_gate_backward_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
