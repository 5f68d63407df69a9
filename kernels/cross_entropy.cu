// Cross-entropy with its gradient in place of the logits, and the cap of logits.
#include "softmax.cuh"

// Packs that a thread asks for before it uses the first.
constexpr int AHEAD = 4;

// A block works on one token, in two passes over its logits. The gradients' factors lie in device memory, one for each token at a stride
// of 1, or one for all at a stride of 0; without any they are 1.
template <typename Cap, typename T>
__device__ void cross_entropy(Cap cap, float *losses, T *logits, const int *targets, size_t vocabulary,
                              const float *scales, size_t scale_stride) {
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
    const float logit = cap(widen(own[target]));
    const float scale = scales == nullptr ? 1.0f : scales[row * scale_stride];
    Exponentials found;
    knowing(are_wide(vocabulary, logits), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        const size_t stride = blockDim.x * PACK;
        // Its barriers part every thread's reading of the target's logit from the writing below.
        found = exponentials<AHEAD, WIDE>(own, vocabulary, cap);
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
                        const float capped = cap(values.at[i]);
                        values.at[i] = expf(capped - found.largest) * factor * cap.slope(capped);
                    }
                    store<WIDE>(own, at, vocabulary, values);
                }
            }
        }
        // By the thread that has written its pack: the order is the program's.
        if (target / PACK % blockDim.x == threadIdx.x) {
            own[target] = narrow<T>((expf(logit - found.largest) * factor - scale) * cap.slope(logit));
        }
    });
    if (threadIdx.x == 0) {
        losses[row] = logf(found.sum) - (logit - found.largest);
    }
}

template <typename T> __device__ void soft_cap(T *x, size_t n, float cap) {
    const size_t first = flat_pack();
    if (first < n) {
        const Capped capped(cap);
        Pack values = load(x, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            values.at[i] = capped(values.at[i]);
        }
        store(x, first, n, values);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void cross_entropy_##name(float *losses, T *logits, const int *targets,              \
                                                    size_t vocabulary, const float *scales,                    \
                                                    size_t scale_stride) {                                     \
        cross_entropy(Uncapped(), losses, logits, targets, vocabulary, scales, scale_stride);                  \
    }                                                                                                          \
    EXPORT(cross_entropy_##name);                                                                              \
    extern "C" __global__ void cross_entropy_capped_##name(float *losses, T *logits, const int *targets,       \
                                                           size_t vocabulary, const float *scales,             \
                                                           size_t scale_stride, float cap) {                   \
        cross_entropy(Capped(cap), losses, logits, targets, vocabulary, scales, scale_stride);                 \
    }                                                                                                          \
    EXPORT(cross_entropy_capped_##name);                                                                       \
    extern "C" __global__ void soft_cap_##name(T *x, size_t n, float cap) { soft_cap(x, n, cap); }             \
    EXPORT(soft_cap_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
