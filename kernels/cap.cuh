// Logits as they are, or capped: cap tanh(x / cap). The derivative is told by the capped logit.
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

struct Uncapped {
    static constexpr bool CHANGES = false;

    __device__ float operator()(float x) const { return x; }
    __device__ float slope(float) const { return 1.0f; }
};

struct Capped {
    static constexpr bool CHANGES = true;
    float cap, inverse;

    __device__ explicit Capped(float cap) : cap(cap), inverse(1.0f / cap) {}
    __device__ float operator()(float x) const { return cap * tanh_of(x * inverse); }
    __device__ float slope(float capped) const {
        const float share = capped * inverse;
        return 1.0f - share * share;
    }
};

// The soft cap on attention scores (Gemma 2 2024): a product of a query and a key becomes cap tanh(scale product / cap).
struct Cap {
    // 0 where there is none.
    float cap;
    // The factor on products within the tanh.
    float factor;

    __device__ bool is_given() const { return cap > 0.0f; }
    __device__ float of(float product) const { return cap * tanh_of(product * factor); }
    // What the gradient of a capped score is multiplied by to become that of the product. Rounding may lead beyond the cap.
    __device__ float slope(float capped) const {
        const float share = capped / cap;
        return cap * factor * fmaxf(1.0f - share * share, 0.0f);
    }
};
