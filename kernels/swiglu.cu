// Gated feed-forward activation (Shazeer 2020). A row of `gate_up` has the `width` elements of gate, then those of up. A
// block works on a piece of a row, a pack a thread.
#include "output.cuh"

// First element of this thread's pack within its row.
__device__ inline size_t pack_of_row() {
    return (size_t(blockIdx.y) * blockDim.x + threadIdx.x) * PACK;
}

template <typename Output, typename T> __device__ void swiglu(Output act, const T *gate_up, size_t width) {
    const size_t first = pack_of_row();
    if (first < width) {
        const T *gate = gate_up + size_t(blockIdx.x) * 2 * width, *up = gate + width;
        knowing(are_wide(width, act.to, gate_up), [&](auto wide) {
            constexpr bool WIDE = decltype(wide)();
            Pack g = load<WIDE>(gate, first, width);
            const Pack u = load<WIDE>(up, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                g.at[i] = g.at[i] / (1.0f + expf(-g.at[i])) * u.at[i];
            }
            act.template store<WIDE>(size_t(blockIdx.x) * width, first, width, g);
        });
    }
    act.end();
}

// Gate and up become their own gradients.
template <typename Output, typename T> __device__ void swiglu_backward(Output gate_up, const T *dact, size_t width) {
    const size_t first = pack_of_row();
    if (first < width) {
        const size_t gate = size_t(blockIdx.x) * 2 * width, up = gate + width;
        knowing(are_wide(width, gate_up.to, dact), [&](auto wide) {
            constexpr bool WIDE = decltype(wide)();
            Pack g = load<WIDE>(gate_up.to + gate, first, width), u = load<WIDE>(gate_up.to + up, first, width);
            const Pack d = load<WIDE>(dact + size_t(blockIdx.x) * width, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const float sigmoid = 1.0f / (1.0f + expf(-g.at[i]));
                const float silu = g.at[i] * sigmoid;
                g.at[i] = d.at[i] * u.at[i] * (sigmoid + silu * (1.0f - sigmoid));
                u.at[i] = d.at[i] * silu;
            }
            gate_up.template store<WIDE>(gate, first, width, g);
            gate_up.template store<WIDE>(up, first, width, u);
        });
    }
    gate_up.end();
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void swiglu_##name(T *act, const T *gate_up, size_t width) {                         \
        swiglu(Values<false, T>{act, nullptr}, gate_up, width);                                                \
    }                                                                                                          \
    EXPORT(swiglu_##name);                                                                                     \
    extern "C" __global__ void swiglu_largest_##name(T *act, const T *gate_up, size_t width, int *parts) {     \
        swiglu(Values<true, T>{act, parts}, gate_up, width);                                                   \
    }                                                                                                          \
    EXPORT(swiglu_largest_##name);                                                                             \
    extern "C" __global__ void swiglu_codes_##name(uint8_t *act, const T *gate_up, size_t width,               \
                                                   const float *largest, int converts) {                       \
        swiglu(Codes<T>(act, largest, converts), gate_up, width);                                              \
    }                                                                                                          \
    EXPORT(swiglu_codes_##name);                                                                               \
    extern "C" __global__ void swiglu_backward_##name(T *gate_up, const T *dact, size_t width) {               \
        swiglu_backward(Values<false, T>{gate_up, nullptr}, dact, width);                                      \
    }                                                                                                          \
    EXPORT(swiglu_backward_##name);                                                                            \
    extern "C" __global__ void swiglu_backward_largest_##name(T *gate_up, const T *dact, size_t width,         \
                                                              int *parts) {                                    \
        swiglu_backward(Values<true, T>{gate_up, parts}, dact, width);                                         \
    }                                                                                                          \
    EXPORT(swiglu_backward_largest_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
