// Learned positions.
#include "positions.cuh"

// A block works on one token's row.
template <typename T>
__device__ void add_positions(T *x, const T *table, const int *positions, size_t seq, size_t width) {
    const size_t row = blockIdx.x, position = position_of(row, positions, seq);
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        store_or_add(x + row * width, first, width, load(table + position * width, first, width), true);
    }
}

// A block sums the rows of one position over the sequences, in their order. Positions from `seq` on have none.
template <typename G, typename T>
__device__ void add_positions_backward(G *dtable, const T *dx, size_t sequences, size_t seq, size_t width,
                                       int accumulate) {
    const size_t position = blockIdx.x;
    if (position >= seq) {
        if (accumulate) {
            return;
        }
        sequences = 0;
    }
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        Pack sums = {};
        // Several rows are loaded before the first is added.
#pragma unroll 4
        for (size_t sequence = 0; sequence < sequences; sequence++) {
            const Pack terms = load(dx + (sequence * seq + position) * width, first, width);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                sums.at[i] += terms.at[i];
            }
        }
        store_or_add(dtable + position * width, first, width, sums, accumulate);
    }
}

#define FORWARD(T, name)                                                                                       \
    extern "C" __global__ void add_positions_##name(T *x, const T *table, const int *positions, size_t seq,    \
                                                    size_t width) {                                            \
        add_positions(x, table, positions, seq, width);                                                        \
    }                                                                                                          \
    EXPORT(add_positions_##name)

FORWARD(float, f32);
FORWARD(bf16, bf16);

#define BACKWARD(G, T, name)                                                                                   \
    extern "C" __global__ void add_positions_backward_##name(G *dtable, const T *dx, size_t sequences,         \
                                                             size_t seq, size_t width, int accumulate) {       \
        add_positions_backward(dtable, dx, sequences, seq, width, accumulate);                                 \
    }                                                                                                          \
    EXPORT(add_positions_backward_##name)

BACKWARD(float, float, f32_f32);
BACKWARD(float, bf16, f32_bf16);
BACKWARD(bf16, float, bf16_f32);
BACKWARD(bf16, bf16, bf16_bf16);
