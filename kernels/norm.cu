// Sums over whole arenas. Squares are f32, sums f64, in a number of parts that is the same on every GPU.
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

// Block p sums the squares of elements p * part to (p + 1) * part of `n`; `part` is a multiple of PACK.
template <typename T> __device__ void norm_parts(double *parts, const T *x, size_t n, size_t part) {
    const size_t start = blockIdx.x * part;
    if (start >= n) {
        if (threadIdx.x == 0) {
            parts[blockIdx.x] = 0.0;
        }
        return;
    }
    const size_t count = part < n - start ? part : n - start;
    double total = 0.0;
    for (size_t first = threadIdx.x * PACK; first < count; first += blockDim.x * PACK) {
        const Pack values = load(x + start, first, count);
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            squares += values.at[i] * values.at[i];
        }
        total += double(squares);
    }
    total = block_sum(total);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = total;
    }
}

// One block with a thread for each part. An infinite `max_norm` never clips; `loss` may be null, and where it is not
// finite neither is the factor.
__device__ inline void norm_and_clip(float *out, const double *parts, const float *loss, float max_norm) {
    const float norm = float(sqrt(block_sum(parts[threadIdx.x])));
    const bool finite = isfinite(norm) && (loss == nullptr || isfinite(loss[0]));
    if (threadIdx.x == 0) {
        out[0] = norm;
        out[1] = finite ? fminf(max_norm / (norm + 1e-6f), 1.0f) : NAN;
    }
}

extern "C" __global__ void sum_f32(float *out, const float *x, size_t n, int accumulate) {
    sum(out, x, n, accumulate);
}
EXPORT(sum_f32);

extern "C" __global__ void norm_and_clip_f32(float *out, const double *parts, const float *loss, float max_norm) {
    norm_and_clip(out, parts, loss, max_norm);
}
EXPORT(norm_and_clip_f32);

#define PARTS(T, name)                                                                                         \
    extern "C" __global__ void norm_parts_##name(double *parts, const T *x, size_t n, size_t part) {           \
        norm_parts(parts, x, n, part);                                                                         \
    }                                                                                                          \
    EXPORT(norm_parts_##name)

PARTS(float, f32);
PARTS(bf16, bf16);
