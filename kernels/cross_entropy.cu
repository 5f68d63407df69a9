// Cross-entropy with its gradient in place of the logits.
#include "softmax.cuh"

// Packs that a thread asks for before it uses the first.
constexpr int AHEAD = 4;

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
    const float scale = factor_of_all == nullptr ? 1.0f : *factor_of_all;
    Exponentials found;
    knowing(are_wide(vocabulary, logits), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        const size_t stride = blockDim.x * PACK;
        // Its barriers part every thread's reading of the target's logit from the writing below.
        found = exponentials<AHEAD, WIDE>(own, vocabulary);
        const float factor = scale / found.sum;
        for (size_t first = threadIdx.x * PACK; first < vocabulary; first += AHEAD * stride) {
            Held<T> asked[AHEAD];
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ahead++) {
                const size_t at = first + ahead * stride;
                asked[ahead] = hold_if<WIDE>(at < vocabulary, own, at, vocabulary);
            }
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ahead++) {
                const size_t at = first + ahead * stride;
                if (at < vocabulary) {
                    Pack values = widen(asked[ahead]);
#pragma unroll
                    for (int i = 0; i < PACK; i++) {
                        values.at[i] = expf(values.at[i] - found.largest) * factor;
                    }
                    store<WIDE>(own, at, vocabulary, values);
                }
            }
        }
        // By the thread that has written its pack: the order is the program's.
        if (target / PACK % blockDim.x == threadIdx.x) {
            own[target] = narrow<T>(expf(logit - found.largest) * factor - scale);
        }
    });
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
