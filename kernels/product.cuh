// A warp's product of matrices whose elements functions give: bf16 on tensor cores, f32 with ordinary multiply-adds. Sums are the tiles of
// `tile.cuh`.
#pragma once

#include "tile.cuh"

// Two numbers rounded to bf16, and what that leaves of them, rounded: together 16 bits of significand.
struct Rounded {
    uint32_t high, low;

    __device__ Rounded(float lower, float upper)
        : high(bf16_pair(lower, upper)),
          low(bf16_pair(lower - __uint_as_float(high << 16), upper - __uint_as_float(high & 0xffff0000u))) {}
};

// How many bf16 numbers an element of each factor is the sum of: the second makes a product more.
template <int OF_A, int OF_B> struct Parts {};

// sums [16 F rows from `row`, 8 N columns from `column`] += a b, over k from `first` to `end`, a multiple of 16 further. A lane has k,
// k + 4, k + 8 and k + 12 of each sixteen, in both factors alike, since the order of k is free.
template <int OF_A, int OF_B, int F, int N, typename A, typename B>
__device__ void add_product(bf16, Parts<OF_A, OF_B>, float (&sums)[F][N][4], int row, int column, int first, int end, const A &a,
                            const B &b) {
    const int group = threadIdx.x % WARP / 4;
#pragma unroll(F == 1 ? 2 : 1)
    for (int k = first + threadIdx.x % 4; k < end; k += 16) {
        uint32_t right[N][2][2];
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int own = column + 8 * n + group, at = k + 8 * i;
                const Rounded pair(b(at, own), b(at + 4, own));
                right[n][0][i] = pair.high;
                right[n][1][i] = pair.low;
            }
        }
#pragma unroll
        for (int f = 0; f < F; f++) {
            uint32_t left[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int own = row + 16 * f + group + i % 2 * 8, at = k + i / 2 * 8;
                const Rounded pair(a(own, at), a(own, at + 4));
                left[0][i] = pair.high;
                left[1][i] = pair.low;
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                multiply_16x8x16(sums[f][n], left[0], right[n][0]);
                if constexpr (OF_A == 2) {
                    multiply_16x8x16(sums[f][n], left[1], right[n][0]);
                }
                if constexpr (OF_B == 2) {
                    multiply_16x8x16(sums[f][n], left[0], right[n][1]);
                }
            }
        }
    }
}

// The same; nothing is rounded.
template <int OF_A, int OF_B, int F, int N, typename A, typename B>
__device__ void add_product(float, Parts<OF_A, OF_B>, float (&sums)[F][N][4], int row, int column, int first, int end, const A &a,
                            const B &b) {
#pragma unroll(F == 1 ? 2 : 1)
    for (int k = first; k < end; k++) {
        float right[N][2];
#pragma unroll
        for (int n = 0; n < N; n++) {
            right[n][0] = b(k, column + 8 * n + lane_column(0));
            right[n][1] = b(k, column + 8 * n + lane_column(1));
        }
#pragma unroll
        for (int f = 0; f < F; f++) {
            const float left[2] = {a(row + 16 * f + lane_row(0), k), a(row + 16 * f + lane_row(2), k)};
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[f][n][i] += left[i / 2] * right[n][i % 2];
                }
            }
        }
    }
}

// Calls a function with row, column and sum of each of the lane's elements.
template <int F, int N, typename Each> __device__ void for_sums(float (&sums)[F][N][4], int row, int column, const Each &each) {
#pragma unroll
    for (int f = 0; f < F; f++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                each(row + 16 * f + lane_row(i), column + 8 * n + lane_column(i), sums[f][n][i]);
            }
        }
    }
}
