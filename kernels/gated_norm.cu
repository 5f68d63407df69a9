// The gated norm behind the gated delta rule (Yang et al. 2025).
#include "columns.cuh"
#include "sigmoid.cuh"

// A warp has a row of a head of the gated norm. Rows of `x` are contiguous, `heads` of them a token; those of `z` have gaps between tokens.
template <typename T>
__device__ void gated_norm(T *y, float *rstd, const T *x, const T *z, size_t z_stride, const T *weight, size_t tokens, size_t heads,
                           size_t head, float eps) {
    const size_t token = size_t(blockIdx.x) * blockDim.y + threadIdx.y, row = token * heads + blockIdx.y;
    if (token >= tokens) {
        return;
    }
    x += row * head;
    z += token * z_stride + blockIdx.y * head;
    float squares = 0.0f;
    for (size_t column = threadIdx.x; column < head; column += WARP) {
        squares += widen(x[column]) * widen(x[column]);
    }
    const float scale = 1.0f / sqrtf(warp_reduce(squares, Sum()) / float(head) + eps);
    if (rstd != nullptr && threadIdx.x == 0) {
        rstd[row] = scale;
    }
    for (size_t column = threadIdx.x; y != nullptr && column < head; column += WARP) {
        const float normed = widen(narrow<T>(widen(x[column]) * scale)), gate = widen(z[column]);
        y[row * head + column] = narrow<T>(widen(narrow<T>(widen(weight[column]) * normed)) * gate * sigmoid(gate));
    }
}

// The same warps: gradients of the input and of the gate.
template <typename T>
__device__ void gated_norm_backward(T *dx, T *dz, size_t dz_stride, const T *dy, const T *x, const T *z, size_t z_stride,
                                    const T *weight, const float *rstds, size_t tokens, size_t heads, size_t head) {
    const size_t token = size_t(blockIdx.x) * blockDim.y + threadIdx.y, row = token * heads + blockIdx.y;
    if (token >= tokens) {
        return;
    }
    const float rstd = rstds[row];
    x += row * head;
    z += token * z_stride + blockIdx.y * head;
    dz += token * dz_stride + blockIdx.y * head;
    float along = 0.0f;
    for (size_t column = threadIdx.x; column < head; column += WARP) {
        const float gate = widen(z[column]);
        along += widen(dy[row * head + column]) * widen(weight[column]) * gate * sigmoid(gate) * widen(x[column]) * rstd;
    }
    along = warp_reduce(along, Sum()) / float(head);
    for (size_t column = threadIdx.x; column < head; column += WARP) {
        const float normed = widen(x[column]) * rstd, gate = widen(z[column]), s = sigmoid(gate);
        const float d = widen(dy[row * head + column]) * widen(weight[column]);
        dz[column] = narrow<T>(d * normed * s * (1.0f + gate * (1.0f - s)));
        dx[row * head + column] = narrow<T>(rstd * (d * gate * s - normed * along));
    }
}

// Parts of the weight's gradient: a block's columns, over `part_rows` rows of heads.
template <typename T>
__device__ void gated_norm_dweight(float *parts, const T *dy, const T *x, const T *z, size_t z_stride, const float *rstds, size_t rows,
                                   size_t part_rows, size_t heads, size_t head) {
    const size_t first = column_pack(), start = blockIdx.y * part_rows;
    const size_t end = start + part_rows < rows ? start + part_rows : rows;
    const auto term = [&](auto known_wide, size_t row) {
        const size_t token = row / heads;
        const T *const own_z = z + token * z_stride + (row - token * heads) * head;
        const Pack gradients = load<known_wide>(dy + row * head, first, head), values = load<known_wide>(x + row * head, first, head);
        const Pack gates = load<known_wide>(own_z, first, head);
        Pack terms;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            terms.at[i] = gradients.at[i] * (values.at[i] * rstds[row]) * gates.at[i] * sigmoid(gates.at[i]);
        }
        return terms;
    };
    const bool wide = first < head && are_wide(head, dy, x, z) && z_stride % PACK == 0;
    const float sum = column_sums(start, end, wide, term);
    store_column_sums<float>(head, sum, false, [&](size_t column) { return parts + blockIdx.y * head + column; });
}

#define OF_ONE_TYPE(T, name)                                                                                                   \
    extern "C" __global__ void gated_norm_##name(T *y, float *rstd, const T *x, const T *z, size_t z_stride, const T *weight,  \
                                                 size_t tokens, size_t heads, size_t head, float eps) {                        \
        gated_norm(y, rstd, x, z, z_stride, weight, tokens, heads, head, eps);                                                 \
    }                                                                                                                          \
    EXPORT(gated_norm_##name);                                                                                                 \
    extern "C" __global__ void gated_norm_backward_##name(T *dx, T *dz, size_t dz_stride, const T *dy, const T *x, const T *z, \
                                                          size_t z_stride, const T *weight, const float *rstds, size_t tokens, \
                                                          size_t heads, size_t head) {                                         \
        gated_norm_backward(dx, dz, dz_stride, dy, x, z, z_stride, weight, rstds, tokens, heads, head);                        \
    }                                                                                                                          \
    EXPORT(gated_norm_backward_##name);                                                                                        \
    extern "C" __global__ void __launch_bounds__(COLUMN_PACKS *ROW_LANES_MAX)                                                  \
        gated_norm_dweight_##name(float *parts, const T *dy, const T *x, const T *z, size_t z_stride, const float *rstds,      \
                                  size_t rows, size_t part_rows, size_t heads, size_t head) {                                  \
        gated_norm_dweight(parts, dy, x, z, z_stride, rstds, rows, part_rows, heads, head);                                    \
    }                                                                                                                          \
    EXPORT(gated_norm_dweight_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
