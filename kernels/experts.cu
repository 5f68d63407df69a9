// Rows of experts: summed by token, and between their products the gated activation, weighed by the router. Biases of experts
// are added on the way, and have their gradients here.
#include "columns.cuh"
#include "gate.cuh"

// First element of this thread's pack in the row of its block.
__device__ inline size_t pack_of_row() { return (size_t(blockIdx.y) * blockDim.x + threadIdx.x) * PACK; }

// A block adds up a piece of a token's rows in the order of its choices, then `init`: null, `out` or another tensor. With
// `BIASED` each row comes with the weight of its choice times `bias` of the choice's expert.
template <bool BIASED, typename T>
__device__ void sum_rows(T *out, const T *rows, const int *slot_row, const T *init, size_t choices, size_t width,
                         const T *bias, const int *ids, const float *weights) {
    const size_t token = blockIdx.x, first = pack_of_row();
    if (first >= width) {
        return;
    }
    const size_t slot = token * choices;
    const int *slots = slot_row + slot;
    knowing(are_wide(width, out, rows, init, bias), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        Pack sum = {};
        for (size_t choice = 0; choice < choices; choice++) {
            add(sum, load<WIDE>(rows + size_t(slots[choice]) * width, first, width));
            if constexpr (BIASED) {
                const float weight = weights[slot + choice];
                const Pack own = load<WIDE>(bias + ids[slot + choice] * width, first, width);
#pragma unroll
                for (int i = 0; i < PACK; i++) {
                    sum.at[i] += weight * own.at[i];
                }
            }
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

// The bias of the expert of a choice, which gate and up have in common; null without.
template <typename T> __device__ const T *own_bias(const T *bias, const int *ids, size_t slot, size_t width) {
    return bias != nullptr ? bias + ids[slot] * 2 * width : nullptr;
}

// Adds a bias to gate and up.
template <bool WIDE, typename T> __device__ void add_bias(Pack &gate, Pack &up, const T *bias, size_t first, size_t width) {
    add(gate, load<WIDE>(bias, first, width));
    add(up, load<WIDE>(bias + width, first, width));
}

// With `BIASED` the bias of the row's expert is added first. The compiler makes better code where it knows that there is none.
template <bool BIASED, typename Function, typename T>
__device__ void weighed(Function function, T *act, const T *gate_up, const float *weights, const int *row_slot,
                        size_t width, const T *bias, const int *ids) {
    const size_t first = pack_of_row();
    if (first >= width) {
        return;
    }
    const size_t slot = own_slot(row_slot);
    const float weight = weights[slot];
    const T *gate = gate_up + size_t(blockIdx.x) * 2 * width, *up = gate + width;
    const T *own = own_bias(bias, ids, slot, width);
    knowing(are_wide(width, act, gate_up, bias), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        Pack g = load<WIDE>(gate, first, width);
        Pack u = load<WIDE>(up, first, width);
        if constexpr (BIASED) {
            add_bias<WIDE>(g, u, own, first, width);
        }
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            g.at[i] = weight * function.act(g.at[i], u.at[i]);
        }
        store<WIDE>(act + size_t(blockIdx.x) * width, first, width, g);
    });
}

// Gate and up become their own gradients. A block has a whole row, whose sum is the weight's gradient, or is added to it.
template <typename Function, typename T>
__device__ void weighed_backward(Function function, T *gate_up, float *dweights, const T *dact, const float *weights,
                                 const int *row_slot, size_t width, const T *bias, const int *ids, int accumulate) {
    const size_t slot = own_slot(row_slot);
    const float weight = weights[slot];
    T *gate = gate_up + size_t(blockIdx.x) * 2 * width, *up = gate + width;
    const T *own = own_bias(bias, ids, slot, width);
    float sum = 0.0f;
    knowing(are_wide(width, gate_up, dact, bias), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
            Pack g = load<WIDE>(gate, first, width), u = load<WIDE>(up, first, width);
            if (own != nullptr) {
                add_bias<WIDE>(g, u, own, first, width);
            }
            const Pack d = load<WIDE>(dact + size_t(blockIdx.x) * width, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                const Gated of = function.gated(g.at[i], u.at[i]);
                const float weighed = weight * d.at[i];
                sum += d.at[i] * (of.passed * of.factor);
                g.at[i] = weighed * of.factor * of.slope;
                u.at[i] = weighed * of.passed * of.factor_slope;
            }
            store<WIDE>(gate, first, width, g);
            store<WIDE>(up, first, width, u);
        }
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        dweights[slot] = accumulate ? dweights[slot] + sum : sum;
    }
}

// A block sums a warp's width of columns over the rows of an expert, each with its weight unless `weights` is null. Rows are in
// order, or those of `row_token`. When accumulating, an expert without rows keeps what it has.
template <typename G, typename T>
__device__ void expert_bias_gradient(G *out, const T *dy, const int *row_token, const float *weights, const int *row_slot,
                                     const int *offsets, size_t width, int accumulate) {
    const size_t first = column_pack(), expert = blockIdx.y, start = offsets[expert], end = offsets[expert + 1];
    if (accumulate && start == end) {
        return;
    }
    const auto term = [&](auto known_wide, size_t row) {
        const size_t line = row_token != nullptr ? size_t(row_token[row]) : row;
        Pack terms = load<known_wide>(dy + line * width, first, width);
        if (weights != nullptr) {
            const float weight = weights[row_slot != nullptr ? size_t(row_slot[row]) : row];
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                terms.at[i] *= weight;
            }
        }
        return terms;
    };
    const float sum = column_sums(start, end, first < width && are_wide(width, dy), term);
    store_column_sums<G>(width, sum, accumulate, [&](size_t column) { return out + expert * width + column; });
}

// A block multiplies the gradient of a token by the bias of the expert of one of its choices.
template <typename T>
__device__ void expert_bias_dweights(float *dweights, const T *dy, const T *bias, const int *ids, size_t choices,
                                     size_t width) {
    const size_t slot = blockIdx.x;
    const T *gradients = dy + slot / choices * width, *own = bias + ids[slot] * width;
    float sum = 0.0f;
    knowing(are_wide(width, dy, bias), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
            const Pack d = load<WIDE>(gradients, first, width), b = load<WIDE>(own, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                sum += d.at[i] * b.at[i];
            }
        }
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        dweights[slot] = sum;
    }
}

// `alpha` and `limit` are those of ClampedSwish. With a bias, or where it adds to the gradients of weights, another kernel
// computes: the usual one has no instruction for that.
#define OF_ONE_FUNCTION(Function, gated_name, T, name)                                                         \
    extern "C" __global__ void gated_name##_##name(T *act, const T *gate_up, const float *weights,             \
                                                   const int *row_slot, size_t width, float alpha,             \
                                                   float limit) {                                              \
        weighed<false, Function, T>({alpha, limit}, act, gate_up, weights, row_slot, width, nullptr, nullptr); \
    }                                                                                                          \
    EXPORT(gated_name##_##name);                                                                               \
    extern "C" __global__ void gated_name##_biased_##name(T *act, const T *gate_up, const float *weights,      \
                                                          const int *row_slot, size_t width, float alpha,      \
                                                          float limit, const T *bias, const int *ids) {        \
        weighed<true, Function, T>({alpha, limit}, act, gate_up, weights, row_slot, width, bias, ids);         \
    }                                                                                                          \
    EXPORT(gated_name##_biased_##name);                                                                        \
    extern "C" __global__ void gated_name##_backward_##name(                                                   \
        T *gate_up, float *dweights, const T *dact, const float *weights, const int *row_slot, size_t width,   \
        float alpha, float limit) {                                                                            \
        weighed_backward<Function, T>({alpha, limit}, gate_up, dweights, dact, weights, row_slot, width,       \
                                      nullptr, nullptr, false);                                                \
    }                                                                                                          \
    EXPORT(gated_name##_backward_##name);                                                                      \
    extern "C" __global__ void gated_name##_backward_biased_##name(                                            \
        T *gate_up, float *dweights, const T *dact, const float *weights, const int *row_slot, size_t width,   \
        float alpha, float limit, const T *bias, const int *ids, int accumulate) {                             \
        weighed_backward<Function, T>({alpha, limit}, gate_up, dweights, dact, weights, row_slot, width, bias, \
                                      ids, accumulate);                                                        \
    }                                                                                                          \
    EXPORT(gated_name##_backward_biased_##name)

#define BIAS_GRADIENT(G, T, name)                                                                              \
    extern "C" __global__ void __launch_bounds__(COLUMN_PACKS *ROW_LANES_MAX)                                  \
        expert_bias_gradient_##name(G *out, const T *dy, const int *row_token, const float *weights,           \
                                    const int *row_slot, const int *offsets, size_t width, int accumulate) {   \
        expert_bias_gradient(out, dy, row_token, weights, row_slot, offsets, width, accumulate);               \
    }                                                                                                          \
    EXPORT(expert_bias_gradient_##name)

BIAS_GRADIENT(float, float, f32_f32);
BIAS_GRADIENT(float, bf16, f32_bf16);
BIAS_GRADIENT(bf16, float, bf16_f32);
BIAS_GRADIENT(bf16, bf16, bf16_bf16);

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void sum_rows_##name(T *out, const T *rows, const int *slot_row, const T *init,      \
                                               size_t choices, size_t width) {                                 \
        sum_rows<false, T>(out, rows, slot_row, init, choices, width, nullptr, nullptr, nullptr);              \
    }                                                                                                          \
    EXPORT(sum_rows_##name);                                                                                   \
    extern "C" __global__ void sum_rows_biased_##name(T *out, const T *rows, const int *slot_row,              \
                                                      const T *init, size_t choices, size_t width,             \
                                                      const T *bias, const int *ids, const float *weights) {   \
        sum_rows<true>(out, rows, slot_row, init, choices, width, bias, ids, weights);                         \
    }                                                                                                          \
    EXPORT(sum_rows_biased_##name);                                                                            \
    extern "C" __global__ void expert_bias_dweights_##name(float *dweights, const T *dy, const T *bias,        \
                                                           const int *ids, size_t choices, size_t width) {     \
        expert_bias_dweights(dweights, dy, bias, ids, choices, width);                                         \
    }                                                                                                          \
    EXPORT(expert_bias_dweights_##name);                                                                       \
    OF_ONE_FUNCTION(Silu, weighed_swiglu, T, name);                                                            \
    OF_ONE_FUNCTION(GeluTanh, weighed_geglu, T, name);                                                         \
    OF_ONE_FUNCTION(ClampedSwish, weighed_clamped, T, name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
