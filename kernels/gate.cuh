// Functions of a gate: what comes of gate and up, and their gradients. As in `crates/kernels/src/cpu/gate.rs`.
#pragma once

#include "kernel.cuh"

// sqrt(8 / pi), twice the factor in the tanh: 1 + tanh(u) is 2 sigmoid(2 u).
constexpr float GELU_FACTOR = 1.5957691f;
// The weight of the cube.
constexpr float CUBE = 0.044715f;

// The share of `x` that GELU lets pass.
__device__ inline float gelu_share(float x) { return 1.0f / (1.0f + expf(-GELU_FACTOR * (x + CUBE * x * x * x))); }

// The derivative of GELU, divided by the share.
__device__ inline float gelu_slope(float x, float share) {
    const float slope = GELU_FACTOR * (1.0f + 3.0f * CUBE * x * x);
    return 1.0f + x * (1.0f - share) * slope;
}

// act = passed factor: a function of the gate by one of up. Each has its derivative beside it.
struct Gated {
    float passed, slope, factor, factor_slope;
};

struct Silu {
    __device__ Silu(float, float) {}
    __device__ float act(float g, float u) const { return g / (1.0f + expf(-g)) * u; }
    __device__ Gated gated(float g, float u) const {
        const float sigmoid = 1.0f / (1.0f + expf(-g));
        const float silu = g * sigmoid;
        return {silu, sigmoid + silu * (1.0f - sigmoid), u, 1.0f};
    }
};

struct GeluTanh {
    __device__ GeluTanh(float, float) {}
    __device__ float act(float g, float u) const { return g * gelu_share(g) * u; }
    __device__ Gated gated(float g, float u) const {
        const float share = gelu_share(g);
        return {g * share, share * gelu_slope(g, share), u, 1.0f};
    }
};

// (u + 1) g sigmoid(alpha g), with g cut at `limit` and u at both -limit and limit. NaN stays NaN.
struct ClampedSwish {
    float alpha, limit;

    __device__ ClampedSwish(float alpha, float limit) : alpha(alpha), limit(limit) {}
    __device__ float act(float g, float u) const {
        const Gated of = gated(g, u);
        return of.passed * of.factor;
    }
    __device__ Gated gated(float g, float u) const {
        const bool cuts_gate = g > limit, cuts_up = u > limit || u < -limit;
        const float gate = cuts_gate ? limit : g, up = u > limit ? limit : u < -limit ? -limit : u;
        const float sigmoid = 1.0f / (1.0f + expf(-alpha * gate));
        const float slope = sigmoid + alpha * gate * sigmoid * (1.0f - sigmoid);
        return {gate * sigmoid, cuts_gate ? 0.0f : slope, up + 1.0f, cuts_up ? 0.0f : 1.0f};
    }
};
