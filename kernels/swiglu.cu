// Gated feed-forward activation (Shazeer 2020). A row of `gate_up` has the `width` elements of gate, then those of up. A
// block works on a piece of a row, a pack a thread. With `FINDS` it writes the largest magnitude of what it stores into its element of
// `parts`.
#include "magnitude.cuh"

// First element of this thread's pack within its row.
__device__ inline size_t pack_of_row() {
    return (size_t(blockIdx.y) * blockDim.x + threadIdx.x) * PACK;
}

template <bool FINDS, typename T>
__device__ void swiglu(T *act, const T *gate_up, size_t width, int *parts) {
    const size_t first = pack_of_row();
    int largest = 0;
    if (first < width) {
        const T *gate = gate_up + size_t(blockIdx.x) * 2 * width, *up = gate + width;
        knowing(are_wide(width, act, gate_up), [&](auto wide) {
            constexpr bool WIDE = decltype(wide)();
            Pack g = load<WIDE>(gate, first, width);
            const Pack u = load<WIDE>(up, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                g.at[i] = g.at[i] / (1.0f + expf(-g.at[i])) * u.at[i];
            }
            store_finding<FINDS, WIDE>(largest, act + size_t(blockIdx.x) * width, first, width, g);
        });
    }
    store_largest<FINDS>(parts, largest);
}

// Gate and up become their own gradients.
template <bool FINDS, typename T>
__device__ void swiglu_backward(T *gate_up, const T *dact, size_t width, int *parts) {
    const size_t first = pack_of_row();
    int largest = 0;
    if (first < width) {
        T *gate = gate_up + size_t(blockIdx.x) * 2 * width, *up = gate + width;
        knowing(are_wide(width, gate_up, dact), [&](auto wide) {
            constexpr bool WIDE = decltype(wide)();
            Pack g = load<WIDE>(gate, first, width), u = load<WIDE>(up, first, width);
            const Pack d = load<WIDE>(dact + size_t(blockIdx.x) * width, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const float sigmoid = 1.0f / (1.0f + expf(-g.at[i]));
                const float silu = g.at[i] * sigmoid;
                g.at[i] = d.at[i] * u.at[i] * (sigmoid + silu * (1.0f - sigmoid));
                u.at[i] = d.at[i] * silu;
            }
            store_finding<FINDS, WIDE>(largest, gate, first, width, g);
            store_finding<FINDS, WIDE>(largest, up, first, width, u);
        });
    }
    store_largest<FINDS>(parts, largest);
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void swiglu_##name(T *act, const T *gate_up, size_t width) {                         \
        swiglu<false>(act, gate_up, width, nullptr);                                                           \
    }                                                                                                          \
    EXPORT(swiglu_##name);                                                                                     \
    extern "C" __global__ void swiglu_largest_##name(T *act, const T *gate_up, size_t width, int *parts) {     \
        swiglu<true>(act, gate_up, width, parts);                                                              \
    }                                                                                                          \
    EXPORT(swiglu_largest_##name);                                                                             \
    extern "C" __global__ void swiglu_backward_##name(T *gate_up, const T *dact, size_t width) {               \
        swiglu_backward<false>(gate_up, dact, width, nullptr);                                                 \
    }                                                                                                          \
    EXPORT(swiglu_backward_##name);                                                                            \
    extern "C" __global__ void swiglu_backward_largest_##name(T *gate_up, const T *dact, size_t width,         \
                                                              int *parts) {                                    \
        swiglu_backward<true>(gate_up, dact, width, parts);                                                    \
    }                                                                                                          \
    EXPORT(swiglu_backward_largest_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
