// Rows of experts: summed by token, and between their products the gated activation, weighed by the router.
#include "pack.cuh"
#include "reduce.cuh"

// First element of this thread's pack in the row of its block.
__device__ inline size_t pack_of_row() { return (size_t(blockIdx.y) * blockDim.x + threadIdx.x) * PACK; }

// A block adds up a piece of a token's rows in the order of its choices, then `init`: null, `out` or another tensor.
template <typename T>
__device__ void sum_rows(T *out, const T *rows, const int *slot_row, const T *init, size_t choices, size_t width) {
    const size_t token = blockIdx.x, first = pack_of_row();
    if (first >= width) {
        return;
    }
    const int *slots = slot_row + token * choices;
    knowing(are_wide(width, out, rows, init), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        Pack sum = {};
        for (size_t choice = 0; choice < choices; choice++) {
            add(sum, load<WIDE>(rows + size_t(slots[choice]) * width, first, width));
        }
        if (init != nullptr) {
            add(sum, load<WIDE>(init + token * width, first, width));
        }
        store<WIDE>(out + token * width, first, width, sum);
    });
}

// Where the weight of the block's row is: at its choice, or at the row itself.
__device__ inline size_t own_slot(const int *row_slot) {
    return row_slot != nullptr ? size_t(row_slot[blockIdx.x]) : size_t(blockIdx.x);
}

template <typename T>
__device__ void weighed_swiglu(T *act, const T *gate_up, const float *weights, const int *row_slot, size_t width) {
    const size_t first = pack_of_row();
    if (first >= width) {
        return;
    }
    const float weight = weights[own_slot(row_slot)];
    const T *gate = gate_up + size_t(blockIdx.x) * 2 * width, *up = gate + width;
    knowing(are_wide(width, act, gate_up), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        Pack g = load<WIDE>(gate, first, width);
        const Pack u = load<WIDE>(up, first, width);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            g.at[i] = weight * (g.at[i] / (1.0f + expf(-g.at[i])) * u.at[i]);
        }
        store<WIDE>(act + size_t(blockIdx.x) * width, first, width, g);
    });
}

// Gate and up become their own gradients. A block has a whole row, whose sum is the weight's gradient.
template <typename T>
__device__ void weighed_swiglu_backward(T *gate_up, float *dweights, const T *dact, const float *weights,
                                        const int *row_slot, size_t width) {
    const size_t slot = own_slot(row_slot);
    const float weight = weights[slot];
    T *gate = gate_up + size_t(blockIdx.x) * 2 * width, *up = gate + width;
    float sum = 0.0f;
    knowing(are_wide(width, gate_up, dact), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
            Pack g = load<WIDE>(gate, first, width), u = load<WIDE>(up, first, width);
            const Pack d = load<WIDE>(dact + size_t(blockIdx.x) * width, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const float sigmoid = 1.0f / (1.0f + expf(-g.at[i]));
                const float silu = g.at[i] * sigmoid, weighed = weight * d.at[i];
                sum += d.at[i] * (silu * u.at[i]);
                g.at[i] = weighed * u.at[i] * (sigmoid + silu * (1.0f - sigmoid));
                u.at[i] = weighed * silu;
            }
            store<WIDE>(gate, first, width, g);
            store<WIDE>(up, first, width, u);
        }
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        dweights[slot] = sum;
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void sum_rows_##name(T *out, const T *rows, const int *slot_row, const T *init,      \
                                               size_t choices, size_t width) {                                 \
        sum_rows(out, rows, slot_row, init, choices, width);                                                   \
    }                                                                                                          \
    EXPORT(sum_rows_##name);                                                                                   \
    extern "C" __global__ void weighed_swiglu_##name(T *act, const T *gate_up, const float *weights,           \
                                                     const int *row_slot, size_t width) {                      \
        weighed_swiglu(act, gate_up, weights, row_slot, width);                                                \
    }                                                                                                          \
    EXPORT(weighed_swiglu_##name);                                                                             \
    extern "C" __global__ void weighed_swiglu_backward_##name(                                                 \
        T *gate_up, float *dweights, const T *dact, const float *weights, const int *row_slot, size_t width) { \
        weighed_swiglu_backward(gate_up, dweights, dact, weights, row_slot, width);                            \
    }                                                                                                          \
    EXPORT(weighed_swiglu_backward_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
