// The parts of attention with stored probabilities that are no matrix products. A block works on one row of one
// head's scores, which lie row by row in f32 scratch. Results of the compute type take their row's place: row `r`
// starts where it did, so rows of bf16 are two rows' width apart.
#include "cap.cuh"
#include "dropout.cuh"
#include "softmax.cuh"

// Writes a row in place of the f32 values that it is made from: `make(first)` reads a pack of them, and a strip is
// written when all of it has been read. What it overwrites lies in this strip or before.
template <typename T, typename Make> __device__ void replace_row(float *row, size_t n, Make make) {
    T *replaced = reinterpret_cast<T *>(row);
    for (size_t strip = 0; strip < n; strip += blockDim.x * PACK) {
        const size_t first = strip + threadIdx.x * PACK;
        const Pack values = make(first);
        __syncthreads();
        if (first < n) {
            store(replaced, first, n, values);
        }
    }
}

// Probabilities of a row: in `kept`, where asked for, and dropped in place of its scores. They are zero for keys that its query
// does not see: later ones, and those before its window. The first row's first element has the index `element` for dropout. Where
// there are sinks, that of the head counts in the sum, and `lse` gets the logarithm of that. With a cap, scores are what its tanh is
// taken of.
template <bool CAPPED, typename T>
__device__ void attention_softmax(T *kept, float *lse, float *scores, const T *sinks, float cap, size_t window, size_t seq,
                                  size_t element, Dropout dropout) {
    const size_t row = blockIdx.x, visible = row % seq + 1;
    float *own = scores + row * seq;
    if constexpr (CAPPED) {
        for (size_t key = threadIdx.x; key < visible; key += blockDim.x) {
            own[key] = ScoreCap{cap, 1.0f}.of(own[key]);
        }
        __syncthreads();
    }
    if (visible > window) {
        for (size_t key = threadIdx.x; key < visible - window; key += blockDim.x) {
            own[key] = -INFINITY;
        }
        __syncthreads();
    }
    Exponentials found = exponentials(own, visible);
    if (sinks != nullptr) {
        const float sink = widen(sinks[row / seq]), top = fmaxf(found.largest, sink);
        found = {top, found.sum * expf(found.largest - top) + expf(sink - top)};
        if (lse != nullptr && threadIdx.x == 0) {
            lse[row] = found.largest + logf(found.sum);
        }
    }
    const float factor = 1.0f / found.sum;
    replace_row<T>(own, seq, [&](size_t first) {
        Pack values = load(own, first, visible, -INFINITY);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values.at[i] = expf(values.at[i] - found.largest) * factor;
        }
        if (kept != nullptr && first < seq) {
            store(kept + row * seq, first, seq, values);
        }
        dropout.apply(values, element + row * seq + first);
        return values;
    });
}

// Dropped probabilities of a row, where its scores were or will be.
template <typename T>
__device__ void attention_drop(float *scores, const T *probs, size_t seq, size_t element, Dropout dropout) {
    const size_t start = blockIdx.x * seq;
    T *dropped = reinterpret_cast<T *>(scores + start);
    for (size_t first = threadIdx.x * PACK; first < seq; first += blockDim.x * PACK) {
        Pack values = load(probs + start, first, seq);
        dropout.apply(values, element + start + first);
        store(dropped, first, seq, values);
    }
}

// The gradient of the scores before scaling, p (dp - sum(p dp)), in place of the gradient of dropped probabilities; zero
// beyond the diagonal. `row_sums` gets the sums, where asked for. With a cap, `scores` are what its tanh is taken of.
template <bool CAPPED, typename T>
__device__ void attention_softmax_backward(float *dp, float *row_sums, const T *probs, const float *scores, size_t seq,
                                           size_t element, Dropout dropout) {
    const size_t row = blockIdx.x, visible = row % seq + 1;
    float *own = dp + row * seq;
    const T *p = probs + row * seq;
    const auto load_gradients = [&](size_t first) {
        Pack gradients = load(own, first, visible);
        dropout.apply(gradients, element + row * seq + first);
        return gradients;
    };
    float dot = 0.0f;
    for (size_t first = threadIdx.x * PACK; first < visible; first += blockDim.x * PACK) {
        const Pack gradients = load_gradients(first), weights = load(p, first, visible);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            dot += gradients.at[i] * weights.at[i];
        }
    }
    dot = block_sum(dot);
    replace_row<T>(own, seq, [&](size_t first) {
        Pack gradients = load_gradients(first);
        const Pack weights = load(p, first, visible);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            gradients.at[i] = weights.at[i] * (gradients.at[i] - dot);
        }
        if constexpr (CAPPED) {
            const Pack own_scores = load(scores + row * seq, first, visible);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                gradients.at[i] *= slope_of_tanh(tanh_of(own_scores.at[i]));
            }
        }
        return gradients;
    });
    if (row_sums != nullptr && threadIdx.x == 0) {
        row_sums[row] = dot;
    }
}

#define PARAMETERS size_t seq, size_t element, size_t threshold, const uint32_t *key, float kept_scale
#define OF_ROWS seq, element, {threshold, key, kept_scale}
#define OF_ONE_TYPE(T, name)                                                                                   \
    OF_ONE_FORM(T, false, name);                                                                               \
    OF_ONE_FORM(T, true, capped_##name);                                                                       \
    extern "C" __global__ void attention_drop_##name(float *scores, const T *probs, PARAMETERS) {              \
        attention_drop(scores, probs, OF_ROWS);                                                                \
    }                                                                                                          \
    EXPORT(attention_drop_##name)
#define OF_ONE_FORM(T, CAPPED, name)                                                                           \
    extern "C" __global__ void attention_softmax_##name(T *kept, float *lse, float *scores, const T *sinks,    \
                                                        float cap, size_t window, PARAMETERS) {                \
        attention_softmax<CAPPED>(kept, lse, scores, sinks, cap, window, OF_ROWS);                             \
    }                                                                                                          \
    EXPORT(attention_softmax_##name);                                                                          \
    extern "C" __global__ void attention_softmax_backward_##name(float *dp, float *row_sums, const T *probs,   \
                                                                 const float *scores, PARAMETERS) {            \
        attention_softmax_backward<CAPPED>(dp, row_sums, probs, scores, OF_ROWS);                              \
    }                                                                                                          \
    EXPORT(attention_softmax_backward_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
