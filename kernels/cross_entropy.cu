// Cross-entropy with its gradient in place of the logits.
#include "softmax.cuh"

// A block works on one token, in two passes over its logits. The gradient's factor lies in device memory; 1 without.
template <typename T>
__device__ void cross_entropy(float *losses, T *logits, const int *targets, size_t vocabulary,
                              const float *factor_of_all) {
    const size_t row = blockIdx.x;
    const int target = targets[row];
    T *own = logits + row * vocabulary;
    if (target < 0) {
        for (size_t first = threadIdx.x * PACK; first < vocabulary; first += blockDim.x * PACK) {
            store(own, first, vocabulary, Pack{});
        }
        if (threadIdx.x == 0) {
            losses[row] = 0.0f;
        }
        return;
    }
    const float logit = widen(own[target]);
    // Its barriers part every thread's reading of the target's logit from the writing below.
    const Exponentials found = exponentials(own, vocabulary);
    const float scale = factor_of_all == nullptr ? 1.0f : *factor_of_all;
    const float factor = scale / found.sum;
    for (size_t first = threadIdx.x * PACK; first < vocabulary; first += blockDim.x * PACK) {
        Pack values = load(own, first, vocabulary);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float gradient = expf(values.at[i] - found.largest) * factor;
            values.at[i] = first + i == size_t(target) ? gradient - scale : gradient;
        }
        store(own, first, vocabulary, values);
    }
    if (threadIdx.x == 0) {
        losses[row] = logf(found.sum) - (logit - found.largest);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void cross_entropy_##name(float *losses, T *logits, const int *targets,              \
                                                    size_t vocabulary, const float *scale) {                   \
        cross_entropy(losses, logits, targets, vocabulary, scale);                                             \
    }                                                                                                          \
    EXPORT(cross_entropy_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
