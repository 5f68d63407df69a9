// Dropout (Srivastava et al. 2014), alone and between a bias and a residual.
#include "dropout.cuh"

template <typename T> __device__ void add_pack(Pack &values, const T *x, size_t first, size_t n) {
    const Pack terms = load(x, first, n);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        values.at[i] += terms.at[i];
    }
}

// Drops elements of a pack, whose first has this index, and multiplies all by `scale`.
__device__ inline void drop_and_scale(Pack &values, size_t first, Dropout dropout, float scale) {
    dropout.apply(values, first);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        values.at[i] *= scale;
    }
}

// A block works on one row. Without a bias or a residual their pointers are null. For dropout, the first row's first
// element has the index `element`.
template <typename T>
__device__ void bias_dropout_add(T *out, const T *bias, const T *residual, size_t width, size_t element,
                                 Dropout dropout, float scale) {
    const size_t start = blockIdx.x * width;
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        Pack values = load(out + start, first, width);
        if (bias != nullptr) {
            add_pack(values, bias, first, width);
        }
        drop_and_scale(values, element + start + first, dropout, scale);
        if (residual != nullptr) {
            add_pack(values, residual + start, first, width);
        }
        store(out + start, first, width, values);
    }
}

template <typename T>
__device__ void dropout_scale(T *out, const T *x, size_t n, size_t element, Dropout dropout, float scale) {
    const size_t first = flat_pack();
    if (first < n) {
        Pack values = load(x, first, n);
        drop_and_scale(values, element + first, dropout, scale);
        store(out, first, n, values);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void bias_dropout_add_##name(T *out, const T *bias, const T *residual, size_t width, \
                                                       size_t element, size_t threshold, const uint32_t *key,  \
                                                       float kept_scale, float scale) {                        \
        bias_dropout_add(out, bias, residual, width, element, {threshold, key, kept_scale}, scale);            \
    }                                                                                                          \
    EXPORT(bias_dropout_add_##name);                                                                           \
    extern "C" __global__ void dropout_scale_##name(T *out, const T *x, size_t n, size_t element,              \
                                                    size_t threshold, const uint32_t *key, float kept_scale,   \
                                                    float scale) {                                             \
        dropout_scale(out, x, n, element, {threshold, key, kept_scale}, scale);                                \
    }                                                                                                          \
    EXPORT(dropout_scale_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
