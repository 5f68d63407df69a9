// A row of a matrix, in the registers of the threads that share it.
#pragma once

#include "pack.cuh"

// Most threads of a block that holds a row, or several narrow ones.
constexpr int HELD_ROW_THREADS = 256;

// A thread's packs of a row of `n` elements. All are on their way before the first is used; those of rows too wide for the
// registers are read anew each time, from cache if the row and its neighbours fit.
template <bool WIDE, typename T> struct RowPacks {
    static constexpr int PACKS = 4;

    const T *x;
    size_t n;
    Held<T> held[PACKS];

    __device__ RowPacks(const T *x, size_t n) : x(x), n(n) {
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            held[i] = hold_if<WIDE>(place(i) < n, x, place(i), n);
        }
    }
    __device__ static size_t place(int i) { return (size_t(i) * blockDim.x + threadIdx.x) * PACK; }

    // Calls `body` with the place and the values of each pack.
    template <typename Body> __device__ void each(Body body) const {
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            if (place(i) < n) {
                body(place(i), widen(held[i]));
            }
        }
#pragma unroll 1
        for (size_t first = place(PACKS); first < n; first += blockDim.x * PACK) {
            body(first, load<WIDE>(x, first, n));
        }
    }
};
