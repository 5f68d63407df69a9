// Eight neighbouring elements at a time, in wide accesses where the tensor's alignment allows: 16 bytes, 8 of u8.
#pragma once

#include "reduce.cuh"

constexpr int PACK = 8;

// Eight elements, widened.
struct Pack {
    float at[PACK];
};

__device__ inline void add(Pack &sums, const Pack &terms) {
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        sums.at[i] += terms.at[i];
    }
}

// Adds the second half of a pack's sums to the first until one is left.
__device__ inline double pack_sum(double (&lanes)[PACK]) {
#pragma unroll
    for (int width = PACK / 2; width > 0; width /= 2) {
#pragma unroll
        for (int i = 0; i < width; i++) {
            lanes[i] += lanes[i + width];
        }
    }
    return lanes[0];
}

// First element of this thread's pack in a flat tensor, by blocks and threads along x.
__device__ inline size_t flat_pack() {
    return (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
}

// Whether the pack at `first`, a multiple of PACK, of `n` elements can be accessed as a whole.
template <typename T> __device__ bool is_wide(const T *x, size_t first, size_t n) {
    return first + PACK <= n && reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

// Whether that is so of every pack of matrices with rows of `width` elements.
template <typename... T> __device__ bool are_wide(size_t width, const T *...matrices) {
    return width % PACK == 0 && ((reinterpret_cast<uintptr_t>(matrices) % 16 == 0) && ...);
}

// A condition that the compiler knows.
template <bool VALUE> struct Known {
    static constexpr bool value = VALUE;
    __device__ constexpr operator bool() const { return VALUE; }
};

// Calls `body` with a condition as one that the compiler knows. A loop in it has no branch at every access, so that
// several iterations' accesses are under way at a time; it has no barriers, where threads may disagree.
template <typename Body> __device__ void knowing(bool condition, Body body) {
    if (condition) {
        body(Known<true>());
    } else {
        body(Known<false>());
    }
}

// Eight elements as a tensor holds them.
template <typename T> struct Elements {
    static constexpr size_t BYTES = sizeof(T) * PACK;
    alignas(BYTES < 16 ? BYTES : 16) T at[PACK];
};

// Copies eight elements in the widest accesses that there are for them.
template <typename T> __device__ void copy_wide(T *to, const T *from) {
    if constexpr (Elements<T>::BYTES == 8) {
        *reinterpret_cast<uint2 *>(to) = *reinterpret_cast<const uint2 *>(from);
    } else {
#pragma unroll
        for (size_t part = 0; part < Elements<T>::BYTES / 16; part++) {
            reinterpret_cast<uint4 *>(to)[part] = reinterpret_cast<const uint4 *>(from)[part];
        }
    }
}

// Elements `first` to `first + PACK` of `n`; those beyond the end count as `missing`. `WIDE` where the caller knows it.
template <bool WIDE = false, typename T>
__device__ Elements<T> load_elements(const T *x, size_t first, size_t n, T missing) {
    Elements<T> elements;
    if (WIDE || is_wide(x, first, n)) {
        require_alignment(x + first, alignof(Elements<T>));
        copy_wide(elements.at, x + first);
    } else {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            elements.at[i] = first + i < n ? x[first + i] : missing;
        }
    }
    return elements;
}

// Writes elements `first` to `first + PACK` of `n`; those beyond the end are left out. `WIDE` as in `load_elements`.
template <bool WIDE = false, typename T>
__device__ void store_elements(T *x, size_t first, size_t n, const Elements<T> &elements) {
    if (WIDE || is_wide(x, first, n)) {
        require_alignment(x + first, alignof(Elements<T>));
        copy_wide(x + first, elements.at);
    } else {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            if (first + i < n) {
                x[first + i] = elements.at[i];
            }
        }
    }
}

__device__ inline int packs_of(int elements) { return (elements + PACK - 1) / PACK; }

// Moves the `pack`-th pack of `width` elements.
template <typename T> __device__ void move_pack(T *to, const T *from, int pack, int width) {
    const int first = pack * PACK;
    store_elements(to, first, width, load_elements(from, first, width, narrow<T>(0.0f)));
}

template <typename T> __device__ Pack widen(const Elements<T> &elements) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        pack.at[i] = widen(elements.at[i]);
    }
    return pack;
}

// Elements widened; those beyond the end count as `missing`, which the type must hold.
template <bool WIDE = false, typename T>
__device__ Pack load(const T *x, size_t first, size_t n, float missing = 0.0f) {
    return widen(load_elements<WIDE>(x, first, n, narrow<T>(missing)));
}

// Eight elements that wait to be used, in words: elements of 16 bits would take a register each.
template <typename T> struct Held {
    static constexpr int WORDS = sizeof(T) * PACK / sizeof(uint4);
    uint4 words[WORDS];
};

// A pack, if it exists; zero where it does not, and beyond the end.
template <bool WIDE, typename T> __device__ Held<T> hold_if(bool exists, const T *x, size_t first, size_t n) {
    Held<T> held = {};
    if (exists && (WIDE || is_wide(x, first, n))) {
        require_alignment(x + first, alignof(uint4));
#pragma unroll
        for (int i = 0; i < Held<T>::WORDS; i++) {
            held.words[i] = reinterpret_cast<const uint4 *>(x + first)[i];
        }
    } else if (exists) {
        const Elements<T> elements = load_elements(x, first, n, narrow<T>(0.0f));
#pragma unroll
        for (int i = 0; i < Held<T>::WORDS; i++) {
            held.words[i] = reinterpret_cast<const uint4 *>(elements.at)[i];
        }
    }
    return held;
}

__device__ inline Pack widen(const Held<float> &held) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < Held<float>::WORDS; i++) {
        const uint4 words = held.words[i];
        pack.at[4 * i] = __uint_as_float(words.x);
        pack.at[4 * i + 1] = __uint_as_float(words.y);
        pack.at[4 * i + 2] = __uint_as_float(words.z);
        pack.at[4 * i + 3] = __uint_as_float(words.w);
    }
    return pack;
}

// A bf16 is the upper half of the f32.
__device__ inline Pack widen(const Held<bf16> &held) {
    const uint32_t words[PACK / 2] = {held.words[0].x, held.words[0].y, held.words[0].z, held.words[0].w};
    Pack pack;
#pragma unroll
    for (int i = 0; i < PACK / 2; i++) {
        pack.at[2 * i] = __uint_as_float(words[i] << 16);
        pack.at[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return pack;
}

// Elements rounded from a pack.
template <bool WIDE = false, typename T>
__device__ void store(T *x, size_t first, size_t n, const Pack &pack) {
    Elements<T> elements;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        elements.at[i] = narrow<T>(pack.at[i]);
    }
    store_elements<WIDE>(x, first, n, elements);
}

// Stores a pack, or adds it to what is there: rounded once either way.
template <bool WIDE = false, typename T>
__device__ void store_or_add(T *x, size_t first, size_t n, Pack pack, int accumulate) {
    if (accumulate) {
        add(pack, load<WIDE>(x, first, n));
    }
    store<WIDE>(x, first, n, pack);
}

// `store` where the packs of a warp's lanes follow one another; with `WIDE` all lanes are there. Each of the two accesses that a
// pack of f32 takes would write halves of sectors of 32 bytes. So two lanes trade the even one's second half for the odd one's
// first, and write a sector together. Loads need no trade: a lane's second 16 bytes are in the first-level cache after the first.
template <bool WIDE, typename T> __device__ void store_together(T *x, size_t first, size_t n, const Pack &pack) {
    if constexpr (!WIDE || sizeof(T) != sizeof(float)) {
        store<WIDE>(x, first, n, pack);
    } else {
        const bool odd = threadIdx.x % 2;
        Elements<T> sectors;
#pragma unroll
        for (int i = 0; i < PACK / 2; i++) {
            const float low = pack.at[i], high = pack.at[PACK / 2 + i];
            const float traded = __shfl_xor_sync(WHOLE_WARP, odd ? low : high, 1);
            sectors.at[i] = narrow<T>(odd ? traded : low);
            sectors.at[PACK / 2 + i] = narrow<T>(odd ? high : traded);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            T *to = x + first + half * PACK - (odd ? PACK / 2 : 0);
            require_alignment(to, alignof(uint4));
            *reinterpret_cast<uint4 *>(to) = reinterpret_cast<const uint4 *>(sectors.at)[half];
        }
    }
}
