// Rotary position embedding (Su et al. 2021), pairing the halves of a head as Hugging Face does.
#include "rotary.cuh"

// A block turns one token's row of `heads` heads, a pack of pairs a thread. Rows are `stride` elements apart.
template <typename T>
__device__ void rotary(T *x, size_t stride, const float *table, size_t table_rows, const int *positions, size_t seq,
                       int heads, int head_dim, int half, float sign) {
    const size_t row = blockIdx.x;
    const Angles angles = angles_of(row, table, table_rows, positions, seq, half, sign);
    const int packs = packs_of(half);
    for (int pack = threadIdx.x; pack < heads * packs; pack += blockDim.x) {
        T *const head = x + row * stride + pack / packs * head_dim;
        turn_pairs(head, head, pack % packs, angles);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void rotary_##name(T *x, size_t stride, const float *table, size_t table_rows,       \
                                             const int *positions, size_t seq, int heads, int head_dim,        \
                                             int half, float sign) {                                           \
        rotary(x, stride, table, table_rows, positions, seq, heads, head_dim, half, sign);                     \
    }                                                                                                          \
    EXPORT(rotary_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
