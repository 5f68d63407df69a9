// The parts of attention with stored probabilities that are no matrix products. A block works on one row of one
// head's scores, which lie row by row in f32 scratch. Results of the compute type take their row's place: row `r`
// starts where it did, so rows of bf16 are two rows' width apart.
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
// does not see: later ones, and those before its window. The first row's first element has the index `element` for dropout.
template <typename T>
__device__ void attention_softmax(T *kept, float *scores, size_t window, size_t seq, size_t element, Dropout dropout) {
    const size_t row = blockIdx.x, visible = row % seq + 1;
    float *own = scores + row * seq;
    if (visible > window) {
        for (size_t key = threadIdx.x; key < visible - window; key += blockDim.x) {
            own[key] = -INFINITY;
        }
        __syncthreads();
    }
    const Exponentials found = exponentials(own, visible);
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
// beyond the diagonal.
template <typename T>
__device__ void attention_softmax_backward(float *dp, const T *probs, size_t seq, size_t element, Dropout dropout) {
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
        return gradients;
    });
}

#define PARAMETERS size_t seq, size_t element, size_t threshold, const uint32_t *key, float kept_scale
#define OF_ROWS seq, element, {threshold, key, kept_scale}
#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void attention_softmax_##name(T *kept, float *scores, size_t window, PARAMETERS) {   \
        attention_softmax(kept, scores, window, OF_ROWS);                                                      \
    }                                                                                                          \
    EXPORT(attention_softmax_##name);                                                                          \
    extern "C" __global__ void attention_drop_##name(float *scores, const T *probs, PARAMETERS) {              \
        attention_drop(scores, probs, OF_ROWS);                                                                \
    }                                                                                                          \
    EXPORT(attention_drop_##name);                                                                             \
    extern "C" __global__ void attention_softmax_backward_##name(float *dp, const T *probs, PARAMETERS) {      \
        attention_softmax_backward(dp, probs, OF_ROWS);                                                        \
    }                                                                                                          \
    EXPORT(attention_softmax_backward_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
