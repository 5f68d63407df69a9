// The gradient of attention's sinks: logits that count in the sum of each row of their head and have no value.
#include "reduce.cuh"

// A block has a head. Its threads share the queries of each sequence. `row_sums` are those of dout * out, `[b, heads, s]`.
template <typename G, typename T>
__device__ void sink_gradient(G *dsinks, const T *sinks, const float *lse, const float *row_sums, size_t batch, size_t seq,
                              int accumulate) {
    const size_t head = blockIdx.x, heads = gridDim.x;
    const float sink = widen(sinks[head]);
    double sum = 0.0;
    for (size_t sequence = 0; sequence < batch; sequence++) {
        const size_t first = (sequence * heads + head) * seq;
        for (size_t query = threadIdx.x; query < seq; query += blockDim.x) {
            sum += expf(sink - lse[first + query]) * row_sums[first + query];
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        const float before = accumulate ? widen(dsinks[head]) : 0.0f;
        dsinks[head] = narrow<G>(float(before - sum));
    }
}

#define OF_TYPES(G, T, name)                                                                                   \
    extern "C" __global__ void sink_gradient_##name(G *dsinks, const T *sinks, const float *lse,               \
                                                    const float *row_sums, size_t batch, size_t seq,           \
                                                    int accumulate) {                                          \
        sink_gradient(dsinks, sinks, lse, row_sums, batch, seq, accumulate);                                   \
    }                                                                                                          \
    EXPORT(sink_gradient_##name)

OF_TYPES(float, float, f32_f32);
OF_TYPES(float, bf16, f32_bf16);
OF_TYPES(bf16, float, bf16_f32);
OF_TYPES(bf16, bf16, bf16_bf16);
