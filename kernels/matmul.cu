// Matrix products of types that cuBLASLt does not take together: operands of two types, and f32 operands with a bf16
// result. Every other product is cuBLASLt's; a model needs these where its gradients alone are bf16.
#include "kernel.cuh"

constexpr int TILE = 16;

// `out [m, n] = init + a [m, k] b [k, n]`, a block for each TILE x TILE of `out`, a thread for each element. Distances
// between rows and columns are in elements; `init` may be null, or `out` itself.
template <typename O, typename A, typename B>
__device__ void matmul(O *out, size_t out_row, const O *init, size_t init_row, const A *a, const B *b, size_t m,
                       size_t k, size_t n, size_t a_row, size_t a_column, size_t b_row, size_t b_column) {
    SHARED(float, a_tile, TILE * TILE);
    SHARED(float, b_tile, TILE * TILE);
    const int y = threadIdx.y, x = threadIdx.x;
    const size_t row = size_t(blockIdx.x) * TILE + y, column = size_t(blockIdx.y) * TILE + x;
    float sum = 0.0f;
    for (size_t start = 0; start < k; start += TILE) {
        const bool a_inside = row < m && start + x < k, b_inside = start + y < k && column < n;
        a_tile[y * TILE + x] = a_inside ? widen(a[row * a_row + (start + x) * a_column]) : 0.0f;
        b_tile[y * TILE + x] = b_inside ? widen(b[(start + y) * b_row + column * b_column]) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            sum += a_tile[y * TILE + i] * b_tile[i * TILE + x];
        }
        __syncthreads();
    }
    if (row < m && column < n) {
        if (init != nullptr) {
            sum += widen(init[row * init_row + column]);
        }
        out[row * out_row + column] = narrow<O>(sum);
    }
}

#define OF_THREE_TYPES(O, A, B, name)                                                                          \
    extern "C" __global__ void __launch_bounds__(TILE *TILE)                                                   \
        matmul_##name(O *out, size_t out_row, const O *init, size_t init_row, const A *a, const B *b,          \
                      size_t m, size_t k, size_t n, size_t a_row, size_t a_column, size_t b_row,               \
                      size_t b_column) {                                                                       \
        matmul(out, out_row, init, init_row, a, b, m, k, n, a_row, a_column, b_row, b_column);                 \
    }                                                                                                          \
    EXPORT(matmul_##name)

OF_THREE_TYPES(float, float, bf16, f32_f32_bf16);
OF_THREE_TYPES(float, bf16, float, f32_bf16_f32);
OF_THREE_TYPES(bf16, float, bf16, bf16_f32_bf16);
OF_THREE_TYPES(bf16, bf16, float, bf16_bf16_f32);
OF_THREE_TYPES(bf16, float, float, bf16_f32_f32);
