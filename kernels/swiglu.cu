// Gated feed-forward activation (Shazeer 2020), by a function of `gate.cuh`. A row of `gate_up` has the `width` elements of
// gate, then those of up. A block works on a piece of a row, a pack a thread.
#include "gate.cuh"
#include "output.cuh"

// First element of this thread's pack within its row.
__device__ inline size_t pack_of_row() {
    return (size_t(blockIdx.y) * blockDim.x + threadIdx.x) * PACK;
}

template <typename Function, typename Output, typename T>
__device__ void gated(Function function, Output act, const T *gate_up, size_t width) {
    const size_t first = pack_of_row();
    if (first < width) {
        const T *gate = gate_up + size_t(blockIdx.x) * 2 * width, *up = gate + width;
        knowing(are_wide(width, act.to, gate_up), [&](auto wide) {
            constexpr bool WIDE = decltype(wide)();
            Pack g = load<WIDE>(gate, first, width);
            const Pack u = load<WIDE>(up, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                g.at[i] = function.act(g.at[i], u.at[i]);
            }
            act.template store<WIDE>(size_t(blockIdx.x) * width, first, width, g);
        });
    }
    act.end();
}

// Gate and up become their own gradients.
template <typename Function, typename Output, typename T>
__device__ void gated_backward(Function function, Output gate_up, const T *dact, size_t width) {
    const size_t first = pack_of_row();
    if (first < width) {
        const size_t gate = size_t(blockIdx.x) * 2 * width, up = gate + width;
        knowing(are_wide(width, gate_up.to, dact), [&](auto wide) {
            constexpr bool WIDE = decltype(wide)();
            Pack g = load<WIDE>(gate_up.to + gate, first, width), u = load<WIDE>(gate_up.to + up, first, width);
            const Pack d = load<WIDE>(dact + size_t(blockIdx.x) * width, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const Gated of = function.gated(g.at[i], u.at[i]);
                g.at[i] = d.at[i] * of.factor * of.slope;
                u.at[i] = d.at[i] * of.passed * of.factor_slope;
            }
            gate_up.template store<WIDE>(gate, first, width, g);
            gate_up.template store<WIDE>(up, first, width, u);
        });
    }
    gate_up.end();
}

// `alpha` and `limit` are those of ClampedSwish.
#define OF_ONE_FUNCTION(Function, gated_name, T, name)                                                         \
    extern "C" __global__ void gated_name##_##name(T *act, const T *gate_up, size_t width, float alpha,        \
                                                   float limit) {                                              \
        gated(Function(alpha, limit), Values<false, T>{act, nullptr}, gate_up, width);                         \
    }                                                                                                          \
    EXPORT(gated_name##_##name);                                                                               \
    extern "C" __global__ void gated_name##_largest_##name(T *act, const T *gate_up, size_t width,             \
                                                           float alpha, float limit, int *parts) {             \
        gated(Function(alpha, limit), Values<true, T>{act, parts}, gate_up, width);                            \
    }                                                                                                          \
    EXPORT(gated_name##_largest_##name);                                                                       \
    extern "C" __global__ void gated_name##_codes_##name(uint8_t *act, const T *gate_up, size_t width,         \
                                                         float alpha, float limit, const float *largest,       \
                                                         int converts) {                                       \
        gated(Function(alpha, limit), Codes<T>(act, largest, converts), gate_up, width);                       \
    }                                                                                                          \
    EXPORT(gated_name##_codes_##name);                                                                         \
    extern "C" __global__ void gated_name##_backward_##name(T *gate_up, const T *dact, size_t width,           \
                                                            float alpha, float limit) {                        \
        gated_backward(Function(alpha, limit), Values<false, T>{gate_up, nullptr}, dact, width);               \
    }                                                                                                          \
    EXPORT(gated_name##_backward_##name);                                                                      \
    extern "C" __global__ void gated_name##_backward_largest_##name(T *gate_up, const T *dact, size_t width,   \
                                                                    float alpha, float limit, int *parts) {    \
        gated_backward(Function(alpha, limit), Values<true, T>{gate_up, parts}, dact, width);                  \
    }                                                                                                          \
    EXPORT(gated_name##_backward_largest_##name)

#define OF_ONE_TYPE(T, name)                           \
    OF_ONE_FUNCTION(Silu, swiglu, T, name);            \
    OF_ONE_FUNCTION(GeluTanh, geglu, T, name);         \
    OF_ONE_FUNCTION(ClampedSwish, clamped, T, name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
