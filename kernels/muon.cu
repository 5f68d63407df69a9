// Muon (Jordan et al. 2024) beside its products of matrices: the step of the momentum, Newton-Schulz's sums, and the step of
// the weights. Products are not fused, and every form gives the CPU's bits.
#include "states.cuh"

template <typename MomentForm, typename O, typename G>
__device__ void momentum_step(O *out, const MomentForm &moment, const G *gradients, bool aligned, float scale, float decay,
                              int nesterov, const Random &random, size_t n) {
    const Unfused kept = {decay}, rest = Unfused{1.0f} - kept;
    in_rounds(aligned, n, [&](auto whole, size_t first) {
        constexpr bool WIDE = decltype(whole)();
        const Pack gradient = load<WIDE>(gradients, first, n);
        Pack momentum = moment.template read<WIDE>(first, n), direction;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const Unfused clipped = Unfused{gradient.at[i]} * Unfused{scale};
            const Unfused moved = kept * Unfused{momentum.at[i]} + rest * clipped;
            momentum.at[i] = moved.value;
            direction.at[i] = nesterov ? (kept * moved + rest * clipped).value : moved.value;
        }
        store_together<WIDE>(out, first, n, direction);
        moment.template write<WIDE>(momentum, first, n, random);
    });
}

template <typename O> __device__ void no_direction(O *out, size_t n) {
    in_rounds(false, n, [&](auto, size_t first) { store(out, first, n, Pack{}); });
}

// A factor that is not finite leaves the momentum as it was. `absmax` is null where a form has no use for it.
#define MOMENTUM(M, O, G, name)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                           \
        momentum_##name(O *out, void *values, float *absmax, const G *gradients, const float *clip,                 \
                        const uint32_t *key, size_t first_index, float decay, int nesterov, size_t n) {             \
        if (isfinite(clip[1])) {                                                                                    \
            momentum_step(out, M(values, absmax), gradients, are_wide(PACK, out, values, gradients), clip[1],       \
                          decay, nesterov, Random(key, first_index), n);                                            \
        } else {                                                                                                    \
            no_direction(out, n);                                                                                   \
        }                                                                                                           \
    }                                                                                                               \
    EXPORT(momentum_##name)

#define MOMENTUM_OF(M, name)                   \
    MOMENTUM(M, float, float, name##_f32_f32); \
    MOMENTUM(M, float, bf16, name##_f32_bf16); \
    MOMENTUM(M, bf16, float, name##_bf16_f32); \
    MOMENTUM(M, bf16, bf16, name##_bf16_bf16)

MOMENTUM_OF(F32Moment, f32);
MOMENTUM_OF(Bf16Moment<0>, bf16);
MOMENTUM_OF(CodedMoment<true>, 8bit);

template <typename T> __device__ void divide_by_norm(T *x, const float *norm, float eps, size_t n) {
    const size_t first = flat_pack();
    if (first < n) {
        const Unfused divisor = {fmaxf(widen(narrow<T>(norm[0])), eps)};
        Pack pack = load(x, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            pack.at[i] = (Unfused{pack.at[i]} / divisor).value;
        }
        store(x, first, n, pack);
    }
}

template <typename T> __device__ void combine(T *out, const float *x, float alpha, float beta, size_t n) {
    const size_t first = flat_pack();
    if (first < n) {
        const Pack terms = load(x, first, n);
        Pack pack = load(out, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            pack.at[i] = (Unfused{alpha} * Unfused{terms.at[i]} + Unfused{beta} * Unfused{pack.at[i]}).value;
        }
        store(out, first, n, pack);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                         \
    extern "C" __global__ void divide_by_norm_##name(T *x, const float *norm, float eps, size_t n) {                 \
        divide_by_norm(x, norm, eps, n);                                                                             \
    }                                                                                                                \
    EXPORT(divide_by_norm_##name);                                                                                   \
    extern "C" __global__ void combine_##name(T *out, const float *x, float alpha, float beta, size_t n) {           \
        combine(out, x, alpha, beta, n);                                                                             \
    }                                                                                                                \
    EXPORT(combine_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);

template <typename WeightsForm, typename D>
__device__ void step_along(const WeightsForm &weights, const D *direction, bool aligned, float rate, float scale,
                           float weight_decay, const Random &random, size_t n) {
    const Unfused keep = Unfused{1.0f} - Unfused{rate} * Unfused{weight_decay}, size = Unfused{rate} * Unfused{scale};
    in_rounds(aligned, n, [&](auto whole, size_t first) {
        constexpr bool WIDE = decltype(whole)();
        Pack weight = weights.template read<WIDE>(first, n);
        const Pack along = load<WIDE>(direction, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            weight.at[i] = (Unfused{weight.at[i]} * keep - size * Unfused{along.at[i]}).value;
        }
        weights.template write<WIDE>(weight, first, n, random);
    });
}

// A factor that is not finite leaves the weights as they were. `beside` is null where a form has no use for it.
#define STEP_ALONG(W, D, name)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                            \
        step_along_##name(void *parameters, void *beside, const D *direction, const float *rate, const float *clip,  \
                          const uint32_t *key, size_t first_index, float scale, float weight_decay, size_t n) {      \
        if (isfinite(clip[1])) {                                                                                     \
            step_along(W(parameters, beside), direction, are_wide(PACK, parameters, beside, direction), rate[0],     \
                       scale, weight_decay, Random(key, first_index), n);                                            \
        }                                                                                                            \
    }                                                                                                                \
    EXPORT(step_along_##name)

#define STEP_ALONG_OF(W, name)           \
    STEP_ALONG(W, float, name##_f32);    \
    STEP_ALONG(W, bf16, name##_bf16)

STEP_ALONG_OF(F32Weights, f32);
STEP_ALONG_OF(MasterWeights, master);
STEP_ALONG_OF(SplitWeights, split);
STEP_ALONG_OF(Split24Weights, split24);
STEP_ALONG_OF(RoundedWeights, rounded);
