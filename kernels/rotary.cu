// Rotary position embedding (Su et al. 2021), pairing the halves of a head as Hugging Face does.
#include "rotary.cuh"

// A block turns one token's row of `heads` heads, a pack of pairs a thread. Rows are `stride` elements apart.
template <typename T>
__device__ void rotary(T *x, size_t stride, const float *table, size_t table_rows, const int *positions, size_t seq,
                       int heads, int half, float sign) {
    const size_t row = blockIdx.x;
    const Angles angles = angles_of(row, table, table_rows, positions, seq, half, sign);
    T *of_row = x + row * stride;
    for (int pack = threadIdx.x; pack < heads * ((half + PACK - 1) / PACK); pack += blockDim.x) {
        turn_pairs(of_row, of_row, pack, angles);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void rotary_##name(T *x, size_t stride, const float *table, size_t table_rows,       \
                                             const int *positions, size_t seq, int heads, int half,            \
                                             float sign) {                                                     \
        rotary(x, stride, table, table_rows, positions, seq, heads, half, sign);                               \
    }                                                                                                          \
    EXPORT(rotary_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
