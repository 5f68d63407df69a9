// Weights and moments in the forms that optimizers keep them in: read into f32 a pack at a time, and written back.
//
// A warp updates a block of 256 elements, a pack a lane: as many as share the `absmax` of quantised moments, so that
// no form needs more than a warp to agree.
#pragma once

#include "pack.cuh"
#include "quantise.cuh"
#include "random.cuh"
#include "split.cuh"
#include "unfused.cuh"

// Threads of a block, and blocks of 256 that each of its warps updates: fewer blocks fill fewer maps.
constexpr int THREADS = 256;
constexpr int ROUNDS = 8;

// 32 random bits for each element, by its place among all parameters.
struct Random {
    uint64_t key, first_index;

    __device__ Random(const uint32_t *key, size_t first_index)
        : key(uint64_t(key[1]) << 32 | key[0]), first_index(first_index) {}

    // Weights and moments must not be rounded alike.
    __device__ uint32_t of_weight(size_t element) const { return random_u32(~key, first_index + element); }
    __device__ uint32_t of_moments(size_t element) const { return random_u32(key, first_index + element); }
};

// Forms of weights: made from the parameters and what stands beside them.

struct F32Weights {
    float *weights;

    __device__ F32Weights(void *parameters, void *) : weights(static_cast<float *>(parameters)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const { return load<WIDE>(weights, first, n); }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &) const {
        store_together<WIDE>(weights, first, n, pack);
    }
};

struct MasterWeights {
    bf16 *weights;
    float *master;

    __device__ MasterWeights(void *parameters, void *beside)
        : weights(static_cast<bf16 *>(parameters)), master(static_cast<float *>(beside)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const { return load<WIDE>(master, first, n); }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &) const {
        Elements<bf16> halves;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            halves.at[i] = split_weight(pack.at[i]);
        }
        store_together<WIDE>(master, first, n, pack);
        store_elements<WIDE>(weights, first, n, halves);
    }
};

template <typename R> struct SplitOf {
    using Stored = typename R::Stored;
    bf16 *weights;
    Stored *remainders;

    __device__ SplitOf(void *parameters, void *beside)
        : weights(static_cast<bf16 *>(parameters)), remainders(static_cast<Stored *>(beside)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const {
        const Elements<bf16> halves = load_elements<WIDE>(weights, first, n, narrow<bf16>(0.0f));
        const Elements<Stored> rest = load_elements<WIDE>(remainders, first, n, Stored(0));
        Pack pack;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            pack.at[i] = join(halves.at[i], R::read(rest.at[i]));
        }
        return pack;
    }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &) const {
        Elements<bf16> halves;
        Elements<Stored> rest;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float master = R::master(pack.at[i]);
            halves.at[i] = split_weight(master);
            rest.at[i] = R::store(split_remainder(master));
        }
        store_elements<WIDE>(weights, first, n, halves);
        store_elements<WIDE>(remainders, first, n, rest);
    }
};

using SplitWeights = SplitOf<Remainder>;
using Split24Weights = SplitOf<RemainderByte>;

struct RoundedWeights {
    bf16 *weights;

    __device__ RoundedWeights(void *parameters, void *) : weights(static_cast<bf16 *>(parameters)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const { return load<WIDE>(weights, first, n); }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &random) const {
        Elements<bf16> halves;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            halves.at[i] = round_stochastically(pack.at[i], random.of_weight(first + i) & 0xffff);
        }
        store_elements<WIDE>(weights, first, n, halves);
    }
};

// Forms of a moment: made from its values and, where they are codes, their `absmax`. A moment of bf16 is rounded with 16 of an
// element's random bits, those from `SHIFT` on.

struct F32Moment {
    float *values;

    __device__ F32Moment(void *values, float *) : values(static_cast<float *>(values)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const { return load<WIDE>(values, first, n); }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &) const {
        store_together<WIDE>(values, first, n, pack);
    }
};

template <int SHIFT> struct Bf16Moment {
    bf16 *values;

    __device__ Bf16Moment(void *values, float *) : values(static_cast<bf16 *>(values)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const { return load<WIDE>(values, first, n); }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &random) const {
        Elements<bf16> halves;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const uint32_t bits = random.of_moments(first + i) >> SHIFT;
            halves.at[i] = round_stochastically(pack.at[i], bits & 0xffff);
        }
        store_elements<WIDE>(values, first, n, halves);
    }
};

// A function for each map: the emulation knows shared memory by the line that declares it.
__device__ inline Map<true> signed_map() {
    SHARED(float, values, CODES);
    SHARED(uint32_t, words, Map<true>::WORDS);
    const Map<true> map = {values, words};
    map.fill();
    return map;
}

__device__ inline Map<false> unsigned_map() {
    SHARED(float, values, CODES);
    SHARED(uint32_t, words, Map<false>::WORDS);
    const Map<false> map = {values, words};
    map.fill();
    return map;
}

template <bool SIGNED> __device__ Map<SIGNED> filled_map() {
    if constexpr (SIGNED) {
        return signed_map();
    } else {
        return unsigned_map();
    }
}

template <bool SIGNED, bool WAITS = true> struct CodedMoment {
    uint8_t *codes;
    float *absmax;
    Map<SIGNED> map;

    // All threads of a block make it together. The first of two need not wait: the second does.
    __device__ CodedMoment(void *codes, float *absmax)
        : codes(static_cast<uint8_t *>(codes)), absmax(absmax), map(filled_map<SIGNED>()) {
        if (WAITS) {
            __syncthreads();
        }
    }
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const {
        return load_codes<WIDE>(map, codes, absmax, first, n);
    }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &) const {
        store_codes<WIDE>(map, codes, absmax, first, n, pack);
    }
};

// Goes over the packs of `n` elements in rounds. Every lane of a warp that has elements stays to the end: quantised moments are
// reduced over the warp. `aligned`: whether all tensors are, for wide accesses.
template <typename Body> __device__ void in_rounds(bool aligned, size_t n, Body body) {
    // In all blocks but the last, every lane has elements in every round.
    knowing(aligned && (size_t(blockIdx.x) + 1) * ROUNDS * THREADS * PACK <= n, [&](auto whole) {
        constexpr bool WIDE = decltype(whole)();
        for (int round = 0; round < ROUNDS; round++) {
            const size_t first = ((size_t(blockIdx.x) * ROUNDS + round) * THREADS + threadIdx.x) * PACK;
            if (!WIDE && first / BLOCK * BLOCK >= n) {
                return;
            }
            body(whole, first);
        }
    });
}
