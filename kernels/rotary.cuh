// Rotary position embedding (Su et al. 2021) of packs of pairs: an element of a head's first half, and that of its second.
#pragma once

#include "magnitude.cuh"
#include "positions.cuh"

// What the pairs of a token's heads are turned by.
struct Angles {
    const float *cosines, *sines;
    int half;
    // -1 turns back.
    float sign;
};

// Those of a token, in a table with the cosines of `table_rows` positions, then the sines.
__device__ inline Angles angles_of(size_t token, const float *table, size_t table_rows, const int *positions, size_t seq,
                                   int half, float sign) {
    const float *cosines = table + position_of(token, positions, seq) * half;
    return {cosines, cosines + table_rows * half, half, sign};
}

// Turns the `pack`-th pack of pairs of a head, on its way from one place to another or to the same. `FINDS` as in `store_finding`.
template <bool FINDS, typename T>
__device__ void turn_pairs(int &largest, T *to, const T *from, int pack, const Angles &angles) {
    const int half = angles.half, first = pack * PACK;
    Pack a = load(from, first, half), b = load(from + half, first, half);
    const Pack cosine = load(angles.cosines, first, half), sine = load(angles.sines, first, half);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        const float turned = a.at[i] * cosine.at[i] - b.at[i] * angles.sign * sine.at[i];
        b.at[i] = b.at[i] * cosine.at[i] + a.at[i] * angles.sign * sine.at[i];
        a.at[i] = turned;
    }
    store_finding<FINDS>(largest, to, first, half, a);
    store_finding<FINDS>(largest, to + half, first, half, b);
}

template <typename T> __device__ void turn_pairs(T *to, const T *from, int pack, const Angles &angles) {
    int largest = 0;
    turn_pairs<false>(largest, to, from, pack, angles);
}
