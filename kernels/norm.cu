// Sums over whole arenas, in orders that are the same on every GPU and on the CPU.
#include "pack.cuh"
#include "reduce.cuh"

// One block: what is summed is as long as the tokens of a step.
__device__ inline void sum(float *out, const float *x, size_t n, int accumulate) {
    double total = 0.0;
    for (size_t first = threadIdx.x * PACK; first < n; first += blockDim.x * PACK) {
        const Pack values = load(x, first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            total += double(values.at[i]);
        }
    }
    total = block_sum(total);
    if (threadIdx.x == 0) {
        out[0] = float(accumulate ? double(out[0]) + total : total);
    }
}

// Elements of a grain: `memory::GRAIN_ELEMENTS`.
constexpr size_t GRAIN = 4096;

// A warp sums the squares of a grain. They are exact in f64: whether they are fused with the sum does not matter.
template <typename T> __device__ void norm_grains(double *grains, const T *x, size_t n) {
    const size_t grain = own_row(), start = grain * GRAIN;
    if (start >= n) {
        return;
    }
    const T *own = x + start;
    const size_t count = GRAIN < n - start ? GRAIN : n - start;
    double lanes[PACK] = {};
    knowing(count == GRAIN && are_wide(GRAIN, own), [&](auto wide) {
#pragma unroll 2
        for (size_t first = threadIdx.x * PACK; first < (wide ? GRAIN : count); first += WARP * PACK) {
            const Pack values = load<wide>(own, first, count);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                lanes[i] += double(values.at[i]) * double(values.at[i]);
            }
        }
    });
    const double sum = warp_reduce(pack_sum(lanes), Sum());
    if (threadIdx.x == 0) {
        grains[grain] = sum;
    }
}

// One block: there is a grain for 4096 elements. An infinite `max_norm` never clips; where the loss is not finite, neither
// is the factor.
__device__ inline void norm_and_clip(float *out, const double *grains, size_t count, const float *loss, float max_norm) {
    const float root = float(sqrt(block_sum(sum_of_grains(grains, count))));
    const float norm = isinf(root * root) ? INFINITY : root;
    const bool finite = isfinite(norm) && isfinite(loss[0]);
    if (threadIdx.x == 0) {
        out[0] = norm;
        out[1] = finite ? fminf(max_norm / (norm + 1e-6f), 1.0f) : NAN;
    }
}

extern "C" __global__ void sum_f32(float *out, const float *x, size_t n, int accumulate) {
    sum(out, x, n, accumulate);
}
EXPORT(sum_f32);

extern "C" __global__ void norm_and_clip_f32(float *out, const double *grains, size_t count, const float *loss,
                                                  float max_norm) {
    norm_and_clip(out, grains, count, loss, max_norm);
}
EXPORT(norm_and_clip_f32);

#define GRAINS(T, name)                                                                                        \
    extern "C" __global__ void norm_grains_##name(double *grains, const T *x, size_t n) {                      \
        norm_grains(grains, x, n);                                                                             \
    }                                                                                                          \
    EXPORT(norm_grains_##name)

GRAINS(float, f32);
GRAINS(bf16, bf16);
