// AdamW (Loshchilov and Hutter 2019) with f32 moments, on f32 weights or on bf16 weights with an f32 master.
#include "pack.cuh"

// The numbers of one update.
struct Rates {
    float gradient_scale, beta1, beta2, eps;
    // 1 - learning rate x weight decay.
    float keep;
    // Learning rate / (1 - beta1^t).
    float step_size;
    // 1 / sqrt(1 - beta2^t).
    float root_scale;
};

// `master` holds the weights that are updated; `rounded`, if there is one, receives them rounded to bf16.
__device__ inline void adamw(bf16 *rounded, float *master, float *first_moment, float *second_moment,
                             const float *gradients, size_t n, const Rates &rates) {
    const size_t first = flat_pack();
    if (first >= n) {
        return;
    }
    Pack weight = load(master, first, n);
    Pack m = load(first_moment, first, n), v = load(second_moment, first, n);
    const Pack raw = load(gradients, first, n);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        const float gradient = raw.at[i] * rates.gradient_scale;
        m.at[i] = rates.beta1 * m.at[i] + (1.0f - rates.beta1) * gradient;
        v.at[i] = rates.beta2 * v.at[i] + (1.0f - rates.beta2) * gradient * gradient;
        const float root = sqrtf(v.at[i]) * rates.root_scale + rates.eps;
        weight.at[i] = weight.at[i] * rates.keep - rates.step_size * m.at[i] / root;
    }
    store(master, first, n, weight);
    store(first_moment, first, n, m);
    store(second_moment, first, n, v);
    if (rounded != nullptr) {
        store(rounded, first, n, weight);
    }
}

// `rates` and `clip` are in device memory: see `kernels::AdamW`. A factor that is not finite leaves all as it was.
extern "C" __global__ void adamw_f32(bf16 *rounded, float *master, float *first_moment, float *second_moment,
                                     const float *gradients, const float *rates, const float *clip, float beta1,
                                     float beta2, float eps, float weight_decay, size_t n) {
    const float factor = clip[1], rate = rates[0];
    if (isfinite(factor)) {
        const Rates numbers = {factor,   beta1, beta2, eps, 1.0f - rate * weight_decay, rate * rates[1],
                               rates[2]};
        adamw(rounded, master, first_moment, second_moment, gradients, n, numbers);
    }
}
EXPORT(adamw_f32);
