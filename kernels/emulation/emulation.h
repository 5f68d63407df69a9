// CUDA's language and built-in functions on the host: included before every kernel source that is compiled for the
// emulation. See README.md for what the emulation finds and what it cannot.
#pragma once

#define EMULATION

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "shared.h"
#include "tensor_cores.h"
#ifdef EMULATION_ROUNDING
#include "rounding.h"
#endif

// Inlines everything that a kernel calls into one function. So its local arrays need no addresses, whose use would be
// checked like that of global memory, and every access has a line of the kernel's own.
#define __global__ __attribute__((flatten))
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace emulation {

// The indices of the running CUDA thread; each host thread runs one at a time.
struct Indices {
    uint3 thread, block, of_threads, of_blocks;
};
extern __thread Indices indices;

}  // namespace emulation

#define threadIdx emulation::indices.thread
#define blockIdx emulation::indices.block
#define blockDim emulation::indices.of_threads
#define gridDim emulation::indices.of_blocks

// Where in a kernel source a function was called.
#define EMULATION_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emulation {

// A barrier of all threads of a block. Returns whether any of them, or all of them, gave true.
struct Votes {
    bool any, all;
};
Votes block_barrier(bool vote, Place place);

// Exchanges a value with the lanes in `mask`: the values of all 32 lanes, valid until the next exchange.
const uint64_t *exchange(unsigned mask, uint64_t value, Place place);

// The lane of the thread that runs.
unsigned lane();

// Returns what the sum was. Threads take turns, so this is an ordinary addition.
unsigned add_atomically(unsigned *sum, unsigned value, Place place);

// The value that `lane` has exchanged; an error if it has not taken part.
template <typename T> T value_of(const uint64_t *values, unsigned mask, unsigned lane, Place place) {
    if (!(mask >> lane & 1)) {
        fail(place, "a shuffle reads lane %u, which does not take part in it", lane);
    }
    T value;
    std::memcpy(&value, &values[lane], sizeof(T));
    return value;
}

template <typename T> const uint64_t *exchange_typed(unsigned mask, T value, Place place) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "lanes exchange up to eight bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return exchange(mask, bits, place);
}

// A shuffle within groups of `width` lanes from the lane that `source(lane in its group)` names, or from oneself where
// that is outside the group.
template <typename T, typename Source>
T shuffle(unsigned mask, T value, int width, Place place, Source source) {
    const uint64_t *values = exchange_typed(mask, value, place);
    const int own = int(lane()), start = own / width * width, from = source(own - start);
    return value_of<T>(values, mask, unsigned(from >= 0 && from < width ? start + from : own), place);
}

}  // namespace emulation

inline void __syncthreads(EMULATION_PLACE) { emulation::block_barrier(false, {file, line}); }
inline int __syncthreads_or(int vote, EMULATION_PLACE) {
    return emulation::block_barrier(vote != 0, {file, line}).any;
}
inline int __syncthreads_and(int vote, EMULATION_PLACE) {
    return emulation::block_barrier(vote != 0, {file, line}).all;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATION_PLACE) { emulation::exchange(mask, 0, {file, line}); }

template <typename T> T __shfl_sync(unsigned mask, T value, int from, int width = 32, EMULATION_PLACE) {
    return emulation::shuffle(mask, value, width, {file, line}, [=](int) { return from & (width - 1); });
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATION_PLACE) {
    return emulation::shuffle(mask, value, width, {file, line}, [=](int own) { return own ^ lanes; });
}
template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATION_PLACE) {
    return emulation::shuffle(mask, value, width, {file, line}, [=](int own) { return own + int(by); });
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATION_PLACE) {
    return emulation::shuffle(mask, value, width, {file, line}, [=](int own) { return own - int(by); });
}

inline unsigned __ballot_sync(unsigned mask, int vote, EMULATION_PLACE) {
    const uint64_t *votes = emulation::exchange(mask, vote != 0, {file, line});
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        ballot |= unsigned((mask >> lane & 1) && votes[lane]) << lane;
    }
    return ballot;
}
inline int __any_sync(unsigned mask, int vote, EMULATION_PLACE) {
    return __ballot_sync(mask, vote, file, line) != 0;
}
inline int __all_sync(unsigned mask, int vote, EMULATION_PLACE) {
    return __ballot_sync(mask, vote, file, line) == mask;
}

// Atomic additions of floats are left out, since their results would depend on the order.
inline unsigned atomicAdd(unsigned *sum, unsigned value, EMULATION_PLACE) {
    return emulation::add_atomically(sum, value, {file, line});
}
inline int atomicAdd(int *sum, int value, EMULATION_PLACE) {
    return int(emulation::add_atomically(reinterpret_cast<unsigned *>(sum), unsigned(value), {file, line}));
}

inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

// The emulation is compiled without contraction, so ordinary operations do the same as these.
#ifdef EMULATION_ROUNDING
inline float __fadd_rn(float a, float b) { return emulation::alone(a + b); }
inline float __fsub_rn(float a, float b) { return emulation::alone(a - b); }
inline float __fmul_rn(float a, float b) { return emulation::alone(a * b); }
#else
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
#endif
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
// Each four bits of the selector name a byte of both words, from the lowest on.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned chosen = 0;
    for (int i = 0; i < 4; i++) {
        chosen |= unsigned(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
    }
    return chosen;
}
inline long long __double_as_longlong(double x) {
    long long bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline double __longlong_as_double(long long bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Checks the alignment of a wide access; the host's CPU would not fail on a wrong one.
template <typename T> void require_alignment(const T *pointer, size_t alignment, EMULATION_PLACE) {
    if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
        emulation::fail({file, line}, "an access of %zu bytes is not aligned", alignment);
    }
}

// A kernel as it is launched: parameters by address, as `cuLaunchKernel` takes them.
#include "registry.h"
#define EXPORT(name) \
    static const emulation::Registration registration_of_##name(__FILE__, #name, &name)
