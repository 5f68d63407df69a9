// Attention over keys and values that are kept in blocks of 16 tokens while tokens are generated.
#include "cap.cuh"
#include "pack.cuh"
#include "reduce.cuh"

constexpr int CACHE_BLOCK = 16;
constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr float LOG2_E = 1.44269504f;

// The blocks of sequences, and how many tokens they have, the new ones included.
struct Places {
    const int *table, *lengths;
    // Blocks of a sequence in the table, and its new tokens.
    size_t blocks, fresh;

    __device__ const int *blocks_of(size_t row) const { return table + row / fresh * blocks; }
    // Of a new token; negative before the first.
    __device__ long long position(size_t row) const {
        return (long long)(lengths[row / fresh]) - (long long)(fresh - row % fresh);
    }
};

// A block copies the keys and values of one token. Without a cache of values they lie behind the keys.
template <typename T>
__device__ void store_in_cache(T *k_cache, T *v_cache, const T *k, const T *v, Places places, size_t k_width,
                               size_t v_width) {
    const size_t row = blockIdx.x;
    const long long position = places.position(row);
    if (position < 0) {
        return;
    }
    const size_t block = places.blocks_of(row)[position / CACHE_BLOCK];
    const size_t slot = block * CACHE_BLOCK + position % CACHE_BLOCK;
    const auto copy = [&](T *to, const T *from, size_t width) {
        for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
            const auto elements = load_elements(from + row * width, first, width, narrow<T>(0.0f));
            store_elements(to, first, width, elements);
        }
    };
    const size_t of_keys = v_cache == nullptr ? k_width + v_width : k_width;
    copy(k_cache + slot * of_keys, k, k_width);
    copy(v_cache == nullptr ? k_cache + slot * of_keys + k_width : v_cache + slot * v_width, v, v_width);
}

// What sums below `largest` are multiplied by below another. Those of no key stay zero.
__device__ inline float factor_below(float largest, float other, float scale) {
    return largest == -INFINITY ? 0.0f : exp2_flushed((largest - other) * scale);
}

// A lane's packs of a head.
template <int PACKS> struct Part {
    Pack packs[PACKS];
};

// What some keys amount to: the largest score, and sums of weights and of weighted values below it.
template <int PACKS> struct Seen {
    float largest = -INFINITY, total = 0.0f;
    Part<PACKS> sums = {};

    __device__ void add_key(float score, const Part<PACKS> &value, float scale) {
        const float before = largest;
        largest = fmaxf(largest, score);
        const float kept = factor_below(before, largest, scale), weight = exp2_flushed((score - largest) * scale);
        total = total * kept + weight;
#pragma unroll
        for (int i = 0; i < PACKS * PACK; i++) {
            float &sum = sums.packs[i / PACK].at[i % PACK];
            sum = sum * kept + weight * value.packs[i / PACK].at[i % PACK];
        }
    }

    // Adds what the lane so far away has seen; whole warps call it.
    __device__ void exchange(int distance, float scale) {
        const float theirs = __shfl_xor_sync(WHOLE_WARP, largest, distance), top = fmaxf(largest, theirs);
        const float kept = factor_below(largest, top, scale), taken = factor_below(theirs, top, scale);
        total = total * kept + __shfl_xor_sync(WHOLE_WARP, total, distance) * taken;
#pragma unroll
        for (int i = 0; i < PACKS * PACK; i++) {
            float &own = sums.packs[i / PACK].at[i % PACK];
            const float sum = __shfl_xor_sync(WHOLE_WARP, own, distance);
            own = own * kept + sum * taken;
        }
        largest = top;
    }
};

// Where a query head's keys and values lie. Without a cache of values they are the first columns of the keys.
template <typename T> struct Keys {
    const T *k, *v;
    const int *blocks;
    // The first that is seen, and the number of those up to the query's own.
    size_t first, count;
    // Heads of a token in the cache, which of them it is, its widths there, and how far values of two heads are apart.
    size_t heads, head, k_dim, v_dim, v_stride;

    // Which head of all tokens' it is in a slot.
    __device__ size_t at(size_t slot) const { return slot * heads + head; }
};

// The packs of a row that a lane has: every `lanes`-th.
template <int PACKS, typename T> __device__ Part<PACKS> load_part(const T *row, size_t width, int lane, int lanes) {
    Part<PACKS> part;
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        part.packs[i] = load(row, size_t(lane + i * lanes) * PACK, width);
    }
    return part;
}

// A warp's share of the keys: every eighth block. `lanes` neighbouring lanes, a power of two, have the whole of a key.
// Returns what lanes of the same columns have seen together.
template <int PACKS, typename T>
__device__ Seen<PACKS> see(const T *q, const Keys<T> &keys, int warp, int lane, int lanes, float scale, const ScoreCap &cap) {
    const int together = WARP / lanes, own = lane / lanes, part = lane % lanes;
    const Part<PACKS> query = load_part<PACKS>(q, keys.k_dim, part, lanes);
    Seen<PACKS> seen;
    for (size_t block = keys.first / CACHE_BLOCK / WARPS * WARPS + warp; block * CACHE_BLOCK < keys.count; block += WARPS) {
        const size_t start = size_t(keys.blocks[block]) * CACHE_BLOCK;
        for (int token = 0; token < CACHE_BLOCK; token += together) {
            const size_t position = block * CACHE_BLOCK + token + own;
            const bool is_seen = token + own < CACHE_BLOCK && keys.first <= position && position < keys.count;
            const size_t at = keys.at(start + token + own);
            float score = 0.0f;
            if (is_seen) {
                const Part<PACKS> key = load_part<PACKS>(keys.k + at * keys.k_dim, keys.k_dim, part, lanes);
#pragma unroll
                for (int i = 0; i < PACKS * PACK; i++) {
                    score += query.packs[i / PACK].at[i % PACK] * key.packs[i / PACK].at[i % PACK];
                }
            }
            for (int distance = lanes / 2; distance > 0; distance /= 2) {
                score += __shfl_xor_sync(WHOLE_WARP, score, distance);
            }
            if (cap.is_given()) {
                score = cap.of(score);
            }
            if (is_seen) {
                seen.add_key(score, load_part<PACKS>(keys.v + at * keys.v_stride, keys.v_dim, part, lanes), scale);
            }
        }
    }
    for (int distance = lanes; distance < WARP; distance *= 2) {
        seen.exchange(distance, scale);
    }
    return seen;
}

// A block has one head of one new token. Which keys its warps and lanes see follows from the keys' positions alone, and so
// does the order of the sums. A lane has PACKS packs of a head.
template <int PACKS, typename T>
__device__ void cached_attention(T *out, const T *q, const T *k_cache, const T *v_cache, Places places, size_t kv_heads,
                                 size_t k_dim, size_t v_dim, const T *sinks, size_t window, float scale, ScoreCap cap) {
    constexpr int WIDEST = PACKS * WARP * PACK;
    SHARED(float, largest, WARPS);
    SHARED(float, totals, WARPS);
    SHARED(float, sums, WARPS * WIDEST);
    const size_t row = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const size_t query = row * heads + head;
    const long long position = places.position(row);
    if (position < 0) {
        for (size_t column = threadIdx.x; column < v_dim; column += THREADS) {
            out[query * v_dim + column] = narrow<T>(0.0f);
        }
        return;
    }
    const size_t kv_head = head / (heads / kv_heads);
    const size_t count = size_t(position) + 1, first = count > window ? count - window : 0;
    const bool are_apart = v_cache != nullptr;
    const Keys<T> keys = {k_cache, are_apart ? v_cache : k_cache, places.blocks_of(row), first, count, kv_heads, kv_head,
                          k_dim, v_dim, are_apart ? v_dim : k_dim};
    int lanes = 1;
    while (lanes < WARP && size_t(lanes) * PACK < (k_dim > v_dim ? k_dim : v_dim)) {
        lanes *= 2;
    }
    const float factor = scale * LOG2_E;
    const Seen<PACKS> seen = see<PACKS>(q + query * k_dim, keys, warp, lane, lanes, factor, cap);
    if (lane < lanes) {
#pragma unroll
        for (int i = 0; i < PACKS * PACK; i++) {
            sums[warp * WIDEST + (lane + i / PACK * lanes) * PACK + i % PACK] = seen.sums.packs[i / PACK].at[i % PACK];
        }
    }
    if (lane == 0) {
        largest[warp] = seen.largest;
        totals[warp] = seen.total;
    }
    __syncthreads();
    float top = -INFINITY, total = 0.0f;
    for (int other = 0; other < WARPS; other++) {
        const float theirs = largest[other];
        top = fmaxf(top, theirs);
    }
    for (int other = 0; other < WARPS; other++) {
        const float theirs = largest[other], of_total = totals[other];
        total += of_total * factor_below(theirs, top, factor);
    }
    float share = 1.0f;
    if (sinks != nullptr) {
        const float sink = widen(sinks[head]) * LOG2_E, of_keys = top * factor, both = fmaxf(sink, of_keys);
        share = exp2_flushed(of_keys - both);
        total = total * share + exp2_flushed(sink - both);
    }
    for (size_t column = threadIdx.x; column < v_dim; column += THREADS) {
        float sum = 0.0f;
        for (int other = 0; other < WARPS; other++) {
            const float theirs = largest[other], of_sum = sums[other * WIDEST + column];
            sum += of_sum * factor_below(theirs, top, factor);
        }
        out[query * v_dim + column] = narrow<T>(sum * share / total);
    }
}

#define OF_ONE_WIDTH(PACKS, T, name)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                      \
        name(T *out, const T *q, const T *k_cache, const T *v_cache, const int *table, const int *lengths,     \
             size_t blocks, size_t fresh, size_t kv_heads, size_t k_dim, size_t v_dim, const T *sinks,         \
             size_t window, float scale, float cap, float within_cap) {                                        \
        const Places places = {table, lengths, blocks, fresh};                                                 \
        cached_attention<PACKS>(out, q, k_cache, v_cache, places, kv_heads, k_dim, v_dim, sinks, window,       \
                                scale, {cap, within_cap});                                                     \
    }                                                                                                          \
    EXPORT(name)

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void store_in_cache_##name(T *k_cache, T *v_cache, const T *k, const T *v,           \
                                                     const int *table, const int *lengths, size_t blocks,      \
                                                     size_t fresh, size_t k_width, size_t v_width) {           \
        store_in_cache(k_cache, v_cache, k, v, Places{table, lengths, blocks, fresh}, k_width, v_width);       \
    }                                                                                                          \
    EXPORT(store_in_cache_##name);                                                                             \
    OF_ONE_WIDTH(1, T, cached_attention_##name);                                                               \
    OF_ONE_WIDTH(3, T, cached_attention_wide_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
