// Attention over keys and values that are kept in blocks of 16 tokens while tokens are generated.
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

// A block copies the keys and values of one token.
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
    const auto copy = [&](T *cache, const T *from, size_t width) {
        for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
            const auto elements = load_elements(from + row * width, first, width, narrow<T>(0.0f));
            store_elements(cache + slot * width, first, width, elements);
        }
    };
    copy(k_cache, k, k_width);
    copy(v_cache, v, v_width);
}

// What some keys amount to: the largest score, and sums of weights and of weighted values below it.
struct Seen {
    float largest = -INFINITY, total = 0.0f;
    Pack sums = {};

    // What sums below `largest` are multiplied by below another. Those of no key stay zero.
    __device__ static float factor(float largest, float other, float scale) {
        return largest == -INFINITY ? 0.0f : exp2_flushed((largest - other) * scale);
    }

    __device__ void add_key(float score, const Pack &value, float scale) {
        const float before = largest;
        largest = fmaxf(largest, score);
        const float kept = factor(before, largest, scale), weight = exp2_flushed((score - largest) * scale);
        total = total * kept + weight;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            sums.at[i] = sums.at[i] * kept + weight * value.at[i];
        }
    }

    // Adds what the lane so far away has seen; whole warps call it.
    __device__ void exchange(int distance, float scale) {
        const float theirs = __shfl_xor_sync(WHOLE_WARP, largest, distance), top = fmaxf(largest, theirs);
        const float kept = factor(largest, top, scale), taken = factor(theirs, top, scale);
        total = total * kept + __shfl_xor_sync(WHOLE_WARP, total, distance) * taken;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float sum = __shfl_xor_sync(WHOLE_WARP, sums.at[i], distance);
            sums.at[i] = sums.at[i] * kept + sum * taken;
        }
        largest = top;
    }
};

// Where a query head's keys and values lie.
template <typename T> struct Keys {
    const T *k, *v;
    const int *blocks;
    // The first that is seen, and the number of those up to the query's own.
    size_t first, count;
    // Heads of a token in the cache, which of them it is, and its widths there.
    size_t heads, head, k_dim, v_dim;

    // Which head of all tokens' it is in a slot.
    __device__ size_t at(size_t slot) const { return slot * heads + head; }
};

// A warp's share of the keys: every eighth block. Neighbouring lanes have a pack each of a key; `lanes` of them, a power
// of two, have the whole. Returns what lanes of the same columns have seen together.
template <typename T>
__device__ Seen see(const T *q, const Keys<T> &keys, int warp, int lane, int lanes, float scale) {
    const int together = WARP / lanes, own = lane / lanes;
    const size_t first = size_t(lane % lanes) * PACK;
    const Pack query = load(q, first, keys.k_dim);
    Seen seen;
    for (size_t block = keys.first / CACHE_BLOCK / WARPS * WARPS + warp; block * CACHE_BLOCK < keys.count; block += WARPS) {
        const size_t start = size_t(keys.blocks[block]) * CACHE_BLOCK;
        for (int token = 0; token < CACHE_BLOCK; token += together) {
            const size_t position = block * CACHE_BLOCK + token + own;
            const bool is_seen = token + own < CACHE_BLOCK && keys.first <= position && position < keys.count;
            const size_t at = keys.at(start + token + own);
            float score = 0.0f;
            if (is_seen) {
                const Pack key = load(keys.k + at * keys.k_dim, first, keys.k_dim);
#pragma unroll
                for (int i = 0; i < PACK; i++) {
                    score += query.at[i] * key.at[i];
                }
            }
            for (int distance = lanes / 2; distance > 0; distance /= 2) {
                score += __shfl_xor_sync(WHOLE_WARP, score, distance);
            }
            if (is_seen) {
                seen.add_key(score, load(keys.v + at * keys.v_dim, first, keys.v_dim), scale);
            }
        }
    }
    for (int distance = lanes; distance < WARP; distance *= 2) {
        seen.exchange(distance, scale);
    }
    return seen;
}

// A block has one head of one new token. Which keys its warps and lanes see follows from the keys' positions alone, and so
// does the order of the sums.
template <typename T>
__device__ void cached_attention(T *out, const T *q, const T *k_cache, const T *v_cache, Places places, size_t kv_heads,
                                 size_t k_dim, size_t v_dim, size_t window, float scale) {
    SHARED(float, largest, WARPS);
    SHARED(float, totals, WARPS);
    SHARED(float, sums, WARPS * THREADS);
    const size_t row = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const size_t query = row * heads + head, column = threadIdx.x;
    const long long position = places.position(row);
    if (position < 0) {
        if (column < v_dim) {
            out[query * v_dim + column] = narrow<T>(0.0f);
        }
        return;
    }
    const size_t kv_head = head / (heads / kv_heads);
    const size_t count = size_t(position) + 1, first = count > window ? count - window : 0;
    const Keys<T> keys = {k_cache, v_cache, places.blocks_of(row), first, count, kv_heads, kv_head, k_dim, v_dim};
    int lanes = 1;
    while (size_t(lanes) * PACK < (k_dim > v_dim ? k_dim : v_dim)) {
        lanes *= 2;
    }
    const float factor = scale * LOG2_E;
    const Seen seen = see(q + query * k_dim, keys, warp, lane, lanes, factor);
    if (lane < lanes) {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            sums[warp * THREADS + lane * PACK + i] = seen.sums.at[i];
        }
    }
    if (lane == 0) {
        largest[warp] = seen.largest;
        totals[warp] = seen.total;
    }
    __syncthreads();
    if (column < v_dim) {
        float top = -INFINITY;
        for (int other = 0; other < WARPS; other++) {
            const float theirs = largest[other];
            top = fmaxf(top, theirs);
        }
        float total = 0.0f, sum = 0.0f;
        for (int other = 0; other < WARPS; other++) {
            const float theirs = largest[other], of_total = totals[other], of_sum = sums[other * THREADS + column];
            const float kept = Seen::factor(theirs, top, factor);
            total += of_total * kept;
            sum += of_sum * kept;
        }
        out[query * v_dim + column] = narrow<T>(sum / total);
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void store_in_cache_##name(T *k_cache, T *v_cache, const T *k, const T *v,           \
                                                     const int *table, const int *lengths, size_t blocks,      \
                                                     size_t fresh, size_t k_width, size_t v_width) {           \
        store_in_cache(k_cache, v_cache, k, v, Places{table, lengths, blocks, fresh}, k_width, v_width);       \
    }                                                                                                          \
    EXPORT(store_in_cache_##name);                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                      \
        cached_attention_##name(T *out, const T *q, const T *k_cache, const T *v_cache, const int *table,      \
                                const int *lengths, size_t blocks, size_t fresh, size_t kv_heads,              \
                                size_t k_dim, size_t v_dim, size_t window, float scale) {                      \
        const Places places = {table, lengths, blocks, fresh};                                                 \
        cached_attention(out, q, k_cache, v_cache, places, kv_heads, k_dim, v_dim, window, scale);             \
    }                                                                                                          \
    EXPORT(cached_attention_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
