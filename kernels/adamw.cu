// AdamW (Loshchilov and Hutter 2019) on a range of parameters, in every form of its states. Products are not fused, and every
// form gives the CPU's bits.
#include "states.cuh"

// The numbers of one update; `rates` and `clip` are those of `kernels::AdamW`.
struct Rates {
    Unfused gradient_scale, beta1, beta2, eps;
    // 1 - learning rate x weight decay.
    Unfused keep;
    // Learning rate / (1 - beta1^t).
    Unfused step_size;
    // 1 / sqrt(1 - beta2^t).
    Unfused root_scale;

    __device__ Rates(const float *rates, const float *clip, float beta1, float beta2, float eps, float weight_decay)
        : gradient_scale{clip[1]}, beta1{beta1}, beta2{beta2}, eps{eps},
          keep(Unfused{1.0f} - Unfused{rates[0]} * Unfused{weight_decay}),
          step_size(Unfused{rates[0]} * Unfused{rates[1]}), root_scale{rates[2]} {}
};

// Both moments, each in its form.
template <typename M, typename V> struct Moments {
    M m;
    V v;

    __device__ Moments(void *m, void *v, float *m_absmax, float *v_absmax) : m(m, m_absmax), v(v, v_absmax) {}
};

using F32Moments = Moments<F32Moment, F32Moment>;
// They must not be rounded alike.
using Bf16Moments = Moments<Bf16Moment<0>, Bf16Moment<16>>;
using CodedMoments = Moments<CodedMoment<true, false>, CodedMoment<false>>;

__device__ inline void step(float &weight, float &first_moment, float &second_moment, float raw, const Rates &rates) {
    const Unfused one = {1.0f}, gradient = Unfused{raw} * rates.gradient_scale;
    const Unfused m = rates.beta1 * Unfused{first_moment} + (one - rates.beta1) * gradient;
    const Unfused v = rates.beta2 * Unfused{second_moment} + (one - rates.beta2) * gradient * gradient;
    const Unfused divisor = root(v) * rates.root_scale + rates.eps;
    weight = (Unfused{weight} * rates.keep - rates.step_size * m / divisor).value;
    first_moment = m.value;
    second_moment = v.value;
}

template <typename WeightsForm, typename MomentsForm, typename G>
__device__ void adamw(const WeightsForm &weights, const MomentsForm &moments, const G *gradients, bool aligned,
                      const Rates &rates, const Random &random, size_t n) {
    in_rounds(aligned, n, [&](auto whole, size_t first) {
        constexpr bool WIDE = decltype(whole)();
        Pack weight = weights.template read<WIDE>(first, n);
        // Before the moments, whose codes are looked up as soon as they are there.
        const Pack gradient = load<WIDE>(gradients, first, n);
        Pack m = moments.m.template read<WIDE>(first, n), v = moments.v.template read<WIDE>(first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            step(weight.at[i], m.at[i], v.at[i], gradient.at[i], rates);
        }
        weights.template write<WIDE>(weight, first, n, random);
        moments.m.template write<WIDE>(m, first, n, random);
        moments.v.template write<WIDE>(v, first, n, random);
    });
}

// A factor that is not finite leaves all as it was. Pointers that a form has no use for are null.
#define ADAMW(W, M, G, name)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                          \
        adamw_##name(void *parameters, void *beside, void *first_moment, void *second_moment, float *first_absmax, \
                     float *second_absmax, const G *gradients, const float *rates, const float *clip,              \
                     const uint32_t *key, size_t first_index, float beta1, float beta2, float eps,                 \
                     float weight_decay, size_t n) {                                                               \
        if (isfinite(clip[1])) {                                                                                   \
            adamw(W(parameters, beside), M(first_moment, second_moment, first_absmax, second_absmax), gradients,   \
                  are_wide(PACK, parameters, beside, first_moment, second_moment, gradients),                      \
                  Rates(rates, clip, beta1, beta2, eps, weight_decay), Random(key, first_index), n);               \
        }                                                                                                          \
    }                                                                                                              \
    EXPORT(adamw_##name)

#define ADAMW_OF(W, name)                             \
    ADAMW(W, F32Moments, float, name##_f32_f32);      \
    ADAMW(W, F32Moments, bf16, name##_f32_bf16);      \
    ADAMW(W, Bf16Moments, float, name##_bf16_f32);    \
    ADAMW(W, Bf16Moments, bf16, name##_bf16_bf16);    \
    ADAMW(W, CodedMoments, float, name##_8bit_f32);   \
    ADAMW(W, CodedMoments, bf16, name##_8bit_bf16)

ADAMW_OF(F32Weights, f32);
ADAMW_OF(MasterWeights, master);
ADAMW_OF(SplitWeights, split);
ADAMW_OF(Split24Weights, split24);
ADAMW_OF(RoundedWeights, rounded);
