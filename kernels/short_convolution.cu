// The short causal convolution in front of the gated delta rule (Yang et al. 2025).
#include "kernel.cuh"
#include "sigmoid.cuh"

// The most taps of a convolution.
constexpr int TAPS_MAX = 8;

// A convolution's input, `stride` elements from row to row, and its weights [columns, taps].
template <typename T> struct Convolution {
    const T *x;
    size_t stride;
    const T *weight;
    const int *documents;
    size_t seq, columns;
    int taps;

    // How many taps of a token see tokens of its document.
    __device__ int seen(size_t token) const {
        const size_t place = token % seq - (documents == nullptr ? 0 : size_t(documents[token])) + 1;
        return place < size_t(taps) ? int(place) : taps;
    }
    __device__ float weight_of(size_t column, int back) const { return widen(weight[column * taps + taps - 1 - back]); }
    // The sum in front of the activation function.
    __device__ float sum(size_t token, size_t column) const {
        float sum = 0.0f;
        for (int back = 0; back < seen(token); back++) {
            sum += weight_of(column, back) * widen(x[(token - back) * stride + column]);
        }
        return sum;
    }
    // The gradient of that sum.
    __device__ float gradient(const T *dout, size_t token, size_t column) const {
        const float u = sum(token, column), s = sigmoid(u);
        return widen(dout[token * columns + column]) * s * (1.0f + u * (1.0f - s));
    }
};

// A block has some columns of a token, one a thread.
template <typename T> __device__ void short_convolution(T *out, const Convolution<T> &of) {
    const size_t token = blockIdx.x, column = size_t(blockIdx.y) * blockDim.x + threadIdx.x;
    if (column < of.columns) {
        const float u = of.sum(token, column);
        out[token * of.columns + column] = narrow<T>(u * sigmoid(u));
    }
}

// The same blocks; a token adds up what comes from itself and from those behind it that see it.
template <typename T>
__device__ void short_convolution_dx(T *dx, size_t dx_stride, const T *dout, const Convolution<T> &of) {
    const size_t token = blockIdx.x, column = size_t(blockIdx.y) * blockDim.x + threadIdx.x;
    if (column >= of.columns) {
        return;
    }
    float sum = 0.0f;
    const size_t end = token / of.seq * of.seq + of.seq;
    for (int back = 0; back < of.taps && token + back < end; back++) {
        if (back < of.seen(token + back)) {
            sum += of.weight_of(column, back) * of.gradient(dout, token + back, column);
        }
    }
    dx[token * dx_stride + column] = narrow<T>(sum);
}

// A thread has a column of some tokens; the sums of its taps go to its row of `parts [parts, columns * taps]`.
template <typename T>
__device__ void short_convolution_dweight(float *parts, const T *dout, const Convolution<T> &of, size_t tokens, size_t part_tokens) {
    const size_t column = size_t(blockIdx.x) * blockDim.x + threadIdx.x, start = blockIdx.y * part_tokens;
    if (column >= of.columns) {
        return;
    }
    float sums[TAPS_MAX] = {};
    for (size_t token = start; token < start + part_tokens && token < tokens; token++) {
        const float du = of.gradient(dout, token, column);
        const int seen = of.seen(token);
#pragma unroll
        for (int back = 0; back < TAPS_MAX; back++) {
            if (back < seen) {
                sums[back] += du * widen(of.x[(token - back) * of.stride + column]);
            }
        }
    }
    float *const part = parts + (blockIdx.y * of.columns + column) * of.taps;
#pragma unroll
    for (int back = 0; back < TAPS_MAX; back++) {
        if (back < of.taps) {
            part[of.taps - 1 - back] = sums[back];
        }
    }
}

#define OF_ONE_TYPE(T, name)                                                                                                       \
    extern "C" __global__ void short_convolution_##name(T *out, const T *x, size_t stride, const T *weight, const int *documents,  \
                                                        size_t seq, size_t columns, int taps) {                                    \
        short_convolution(out, Convolution<T>{x, stride, weight, documents, seq, columns, taps});                                  \
    }                                                                                                                              \
    EXPORT(short_convolution_##name);                                                                                              \
    extern "C" __global__ void short_convolution_dx_##name(T *dx, size_t dx_stride, const T *dout, const T *x, size_t stride,      \
                                                           const T *weight, const int *documents, size_t seq, size_t columns,      \
                                                           int taps) {                                                             \
        short_convolution_dx(dx, dx_stride, dout, Convolution<T>{x, stride, weight, documents, seq, columns, taps});               \
    }                                                                                                                              \
    EXPORT(short_convolution_dx_##name);                                                                                           \
    extern "C" __global__ void short_convolution_dweight_##name(float *parts, const T *dout, const T *x, size_t stride,            \
                                                                const T *weight, const int *documents, size_t seq, size_t columns, \
                                                                int taps, size_t tokens, size_t part_tokens) {                     \
        short_convolution_dweight(parts, dout, Convolution<T>{x, stride, weight, documents, seq, columns, taps}, tokens,           \
                                  part_tokens);                                                                                    \
    }                                                                                                                              \
    EXPORT(short_convolution_dweight_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
