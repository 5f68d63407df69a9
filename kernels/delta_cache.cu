// Layers of the gated delta rule while tokens are generated (Yang et al. 2025).
#include "logarithm.cuh"
#include "pack.cuh"
#include "sigmoid.cuh"

// Tokens of a block of the convolution. The most taps are fewer, so that only blocks of first tokens read `before`.
constexpr int TOKENS = 16;

// Rows of a call that are tokens of a sequence.
struct NewTokens {
    // The row of the sequence's first token, and its tokens in front of the rows. One of them is 0.
    size_t begin, earlier;

    __device__ NewTokens(size_t length, size_t seq)
        : begin(seq > length ? seq - length : 0), earlier(length > seq ? length - seq : 0) {}
};

// A block has some columns, one a thread, of some tokens of a sequence. That of its first tokens also keeps its last rows.
template <typename T>
__device__ void cached_convolution(T *out, T *before, const T *x, size_t stride, const T *weight, const int *lengths, size_t seq,
                                   size_t columns, int taps) {
    const unsigned parts = unsigned((seq + TOKENS - 1) / TOKENS), sequence = blockIdx.x / parts;
    const size_t start = size_t(blockIdx.x % parts) * TOKENS;
    const size_t column = size_t(blockIdx.y) * blockDim.x + threadIdx.x, kept = taps - 1;
    if (column >= columns) {
        return;
    }
    const NewTokens tokens(lengths[sequence], seq);
    T *const own = before + sequence * kept * columns + column;
    // Places are those of the kept rows, and behind them those of the new ones.
    const auto is_token = [&](size_t place) { return place + tokens.earlier >= kept + tokens.begin; };
    const auto at = [&](size_t place) {
        return place < kept ? own[place * columns] : x[(sequence * seq + place - kept) * stride + column];
    };
    for (size_t token = start; token < start + TOKENS && token < seq; token++) {
        float sum = 0.0f;
        for (size_t back = 0; back <= kept && is_token(kept + token - back); back++) {
            sum += widen(weight[column * taps + kept - back]) * widen(at(kept + token - back));
        }
        out[(sequence * seq + token) * columns + column] = narrow<T>(sum * sigmoid(sum));
    }
    // A row that is read lies behind all that were written.
    for (size_t place = 0; start == 0 && place < kept; place++) {
        own[place * columns] = is_token(seq + place) ? at(seq + place) : narrow<T>(0.0f);
    }
}

// Lanes that share a value column, packs of keys of each, columns of a warp, and warps of a block.
constexpr int KEY_LANES = 4;
constexpr int KEY_PACKS = 4;
constexpr int OWN_KEYS = KEY_PACKS * PACK;
constexpr int WARP_COLUMNS = WARP / KEY_LANES;
constexpr int WARPS = 4;

// The sum over the lanes of a value column.
__device__ inline float sum_of_column(float x) {
#pragma unroll
    for (int distance = KEY_LANES / 2; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    }
    return x;
}

// A lane's part of a row of keys or queries: every KEY_LANES-th pack, zero beyond the row. It may wait to be used.
template <typename T> struct LaneKeys {
    Held<T> packs[KEY_PACKS];

    __device__ void load(const T *row, int width, int lane) {
#pragma unroll
        for (int i = 0; i < KEY_PACKS; i++) {
            const int first = (lane + i * KEY_LANES) * PACK;
            packs[i] = hold_if<false>(first < width, row, first, width);
        }
    }
    __device__ void widen_to(float (&keys)[OWN_KEYS]) const {
#pragma unroll
        for (int i = 0; i < KEY_PACKS; i++) {
            const Pack pack = widen(packs[i]);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                keys[i * PACK + j] = pack.at[j];
            }
        }
    }
};

// A layer of the gated delta rule. Of a row of `mixed` queries of all heads come first, then keys, then values.
template <typename T> struct CachedLayer {
    const T *mixed;
    const T *b, *a;
    size_t b_stride, a_stride;
    const float *a_log, *dt_bias;
    size_t seq;
    int key_heads, value_heads, key_dim, value_dim;
};

// A token as a lane reads it.
template <typename T> struct LaneToken {
    LaneKeys<T> query, key;
    T value, a, b;

    __device__ void load(const CachedLayer<T> &of, size_t token, int head, int column, int lane) {
        const size_t keys = size_t(of.key_heads) * of.key_dim;
        const T *const row = of.mixed + token * (2 * keys + size_t(of.value_heads) * of.value_dim);
        const T *const own = row + size_t(head / (of.value_heads / of.key_heads)) * of.key_dim;
        query.load(own, of.key_dim, lane);
        key.load(own + keys, of.key_dim, lane);
        value = column < of.value_dim ? row[2 * keys + size_t(head) * of.value_dim + column] : narrow<T>(0.0f);
        a = of.a[token * of.a_stride + head];
        b = of.b[token * of.b_stride + head];
    }
};

// A block has a tile of a value head's columns of a sequence, whose state is in registers over all tokens. No warp waits for another.
template <typename T>
__device__ void cached_delta(T *out, float *states, const int *lengths, const CachedLayer<T> &of) {
    const int head = blockIdx.x % of.value_heads, lane = threadIdx.x % KEY_LANES;
    const size_t sequence = blockIdx.x / of.value_heads;
    const int column = (blockIdx.y * WARPS + threadIdx.x / WARP) * WARP_COLUMNS + threadIdx.x % WARP / KEY_LANES;
    const NewTokens tokens(lengths[sequence], of.seq);
    const bool exists = column < of.value_dim, goes_on = tokens.earlier > 0;
    float *const own = states + (sequence * of.value_heads + head) * of.key_dim * of.value_dim + column;
    const auto key_of = [&](int i) { return (lane + i / PACK * KEY_LANES) * PACK + i % PACK; };
    float state[OWN_KEYS];
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++) {
        const bool is_read = exists && goes_on && key_of(i) < of.key_dim;
        state[i] = is_read ? own[size_t(key_of(i)) * of.value_dim] : 0.0f;
    }
    const float rate = -expf(of.a_log[head]), bias = of.dt_bias[head], root = sqrtf(float(of.key_dim));
    const size_t first = sequence * of.seq;
    LaneToken<T> next;
    next.load(of, first, head, column, lane);
    for (size_t token = 0; token < of.seq; token++) {
        const LaneToken<T> now = next;
        if (token + 1 < of.seq) {
            next.load(of, first + token + 1, head, column, lane);
        }
        T *const to = out + ((first + token) * of.value_heads + head) * of.value_dim + column;
        if (token < tokens.begin) {
            if (exists && lane == 0) {
                *to = narrow<T>(0.0f);
            }
            continue;
        }
        float key[OWN_KEYS], query[OWN_KEYS];
        now.key.widen_to(key);
        now.query.widen_to(query);
        float keys = 0.0f, queries = 0.0f, product = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN_KEYS; i++) {
            keys += key[i] * key[i];
            queries += query[i] * query[i];
            product += key[i] * state[i];
        }
        const float key_norm = 1.0f / sqrtf(sum_of_column(keys) + 1e-6f);
        const float query_norm = 1.0f / (sqrtf(sum_of_column(queries) + 1e-6f) * root);
        const float x = widen(now.a) + bias, decay = expf(rate * (fmaxf(x, 0.0f) + log_1_plus(expf(-fabsf(x)))));
        const float beta = widen(narrow<T>(sigmoid(widen(now.b))));
        const float change = beta * (widen(now.value) - decay * (sum_of_column(product) * key_norm)) * key_norm;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN_KEYS; i++) {
            state[i] = decay * state[i] + key[i] * change;
            sum += query[i] * state[i];
        }
        sum = sum_of_column(sum);
        if (exists && lane == 0) {
            *to = narrow<T>(sum * query_norm);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++) {
        if (exists && key_of(i) < of.key_dim) {
            own[size_t(key_of(i)) * of.value_dim] = state[i];
        }
    }
}

#define OF_ONE_TYPE(T, name)                                                                                                       \
    extern "C" __global__ void cached_convolution_##name(T *out, T *before, const T *x, size_t stride, const T *weight,            \
                                                         const int *lengths, size_t seq, size_t columns, int taps) {               \
        cached_convolution(out, before, x, stride, weight, lengths, seq, columns, taps);                                           \
    }                                                                                                                              \
    EXPORT(cached_convolution_##name);                                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP)                                                                      \
        cached_delta_##name(T *out, float *states, const T *mixed, const T *b, size_t b_stride, const T *a, size_t a_stride,       \
                            const float *a_log, const float *dt_bias, const int *lengths, size_t seq, int key_heads,               \
                            int value_heads, int key_dim, int value_dim) {                                                         \
        cached_delta(out, states, lengths, CachedLayer<T>{mixed, b, a, b_stride, a_stride, a_log, dt_bias, seq, key_heads,         \
                                                          value_heads, key_dim, value_dim});                                       \
    }                                                                                                                              \
    EXPORT(cached_delta_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
