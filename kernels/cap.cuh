// Soft caps (Gemma 2 2024): x becomes cap tanh(x / cap), of logits and of attention scores. The slope, which is the derivative of that,
// is computed from the capped value.
#pragma once

#include "kernel.cuh"

// tanh(x), as in `crates/kernels/src/cpu/simd.rs`: near 0 a polynomial of Cephes, since the other formula cancels there.
__device__ inline float tanh_of(float x) {
    const float square = x * x, size = fabsf(x);
    float sum = -5.7049887e-3f;
    sum = sum * square + 2.0639089e-2f;
    sum = sum * square - 5.3739716e-2f;
    sum = sum * square + 1.3331442e-1f;
    sum = sum * square - 3.3333282e-1f;
    const float near = x + x * square * sum, far = 1.0f - 2.0f / (expf(2.0f * size) + 1.0f);
    return size < 0.625f ? near : x < 0.0f ? -far : far;
}

// The derivative of a tanh, from its value.
__device__ inline float slope_of_tanh(float tanh) { return 1.0f - tanh * tanh; }

// Logits without a cap.
struct Uncapped {
    static constexpr bool CHANGES = false;

    __device__ float operator()(float x) const { return x; }
    __device__ float slope(float) const { return 1.0f; }
};

// Logits with a cap.
struct Capped {
    static constexpr bool CHANGES = true;
    float cap, inverse;

    __device__ explicit Capped(float cap) : cap(cap), inverse(1.0f / cap) {}
    __device__ float operator()(float x) const { return cap * tanh_of(x * inverse); }
    __device__ float slope(float capped) const { return slope_of_tanh(capped * inverse); }
};

// The cap of attention scores, with their scale: a product of a query and a key becomes cap tanh(scale product / cap).
struct ScoreCap {
    // 0 where there is none.
    float cap;
    // The factor on products within the tanh.
    float factor;

    __device__ bool is_given() const { return cap > 0.0f; }
    __device__ float of(float product) const { return cap * tanh_of(product * factor); }
    // The derivative of the capped score with respect to the product. Flash attention computes the capped score from its probability, so
    // rounding may place it beyond the cap: there the slope is 0, not negative.
    __device__ float slope(float capped) const { return cap * factor * fmaxf(slope_of_tanh(capped / cap), 0.0f); }
};
