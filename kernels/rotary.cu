// Rotary position embedding (Su et al. 2021), pairing the halves of a head as Hugging Face does.
#include "positions.cuh"

// A block turns one token's row of `heads` heads, a pack of pairs a thread. Cosines of all `table_rows` positions come
// before the sines; `sign` is -1 for the inverse.
template <typename T>
__device__ void rotary(T *x, const float *table, size_t table_rows, const int *positions, size_t seq, int heads,
                       int half, float sign) {
    const size_t row = blockIdx.x;
    const float *cosines = table + position_of(row, positions, seq) * half, *sines = cosines + table_rows * half;
    const int packs = (half + PACK - 1) / PACK;
    for (int pack = threadIdx.x; pack < heads * packs; pack += blockDim.x) {
        const int head = pack / packs, first = pack % packs * PACK;
        T *low = x + (row * heads + head) * 2 * half, *high = low + half;
        Pack a = load(low, first, half), b = load(high, first, half);
        const Pack cosine = load(cosines, first, half), sine = load(sines, first, half);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float turned = a.at[i] * cosine.at[i] - b.at[i] * sign * sine.at[i];
            b.at[i] = b.at[i] * cosine.at[i] + a.at[i] * sign * sine.at[i];
            a.at[i] = turned;
        }
        store(low, first, half, a);
        store(high, first, half, b);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void rotary_##name(T *x, const float *table, size_t table_rows,                      \
                                             const int *positions, size_t seq, int heads, int half,            \
                                             float sign) {                                                     \
        rotary(x, table, table_rows, positions, seq, heads, half, sign);                                       \
    }                                                                                                          \
    EXPORT(rotary_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
