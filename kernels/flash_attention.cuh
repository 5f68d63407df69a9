// Causal attention that never stores the scores (Dao et al. 2022; Dao 2023): what kernels of all kinds know. Every block keeps rows of
// one head in shared memory, and tiles of other rows go by: keys and values past queries, and in the backward pass also queries past
// keys, so that every sum has one owner and one order. Probabilities are made again from q, k and the statistics.
//
// Tiles of scores lie in registers as `tile.cuh` says: eights of columns, of which a lane has four elements.
#pragma once

#include "cap.cuh"
#include "pack.cuh"
#include "random.cuh"
#include "tile.cuh"

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

// More than a sequence has. The launch code repeats this number.
constexpr int NO_WINDOW = 1 << 30;

struct Attention {
    const int *documents;
    size_t seq, heads, kv_heads;
    // Widths of a head of queries and keys, and of one of values.
    size_t qk_dim, own_v_dim;
    // The factor on products of queries and keys. It is 1 where scores have a cap, which has a factor of its own.
    float scale;
    // A query sees as many keys at most, its own included: NO_WINDOW where all up to itself.
    int window;
    // Dropout, unless the threshold is 0; the key lies in device memory.
    size_t threshold;
    const uint32_t *key;
    float kept_scale;
    ScoreCap cap;

    // Whether queries may see no key before a certain one.
    __device__ bool has_first_keys() const { return documents != nullptr || window < NO_WINDOW; }
    // Whether one of KEYS keys may be hidden from one of QUERIES queries; `query` and `key` are the first of them. None is hidden
    // if no key lies after the first query or before the last one's window. So it is at `whole` distances: one comparison.
    template <int QUERIES, int KEYS> __device__ bool hides(int query, int key) const {
        const int whole = window + 2 - QUERIES - KEYS;
        return unsigned(key - query + window - QUERIES) >= (documents != nullptr || whole < 0 ? 0u : unsigned(whole));
    }
    // Width of a head of values, of dout and of the output. Kernels for the widest heads alone take another than that of keys:
    // in the others it would cost instructions and registers. Neither do others take a cap.
    template <int D> __device__ size_t v_dim() const { return D == 256 ? own_v_dim : qk_dim; }
    template <int D> __device__ bool is_capped() const { return D == 256 && cap.is_given(); }
    // Query heads that a key-value head serves.
    __device__ unsigned group() const { return unsigned(heads) / unsigned(kv_heads); }
    __device__ bool is_kept(uint64_t stream, uint64_t element) const { return random_u32(stream, element) >= threshold; }
};

// A query head of a sequence, and the key-value head that serves it.
struct Head {
    unsigned sequence, head, kv_head;

    // The block's: sequences along x, heads along y. No division, whose results would be kept in registers for the end.
    __device__ static Head of_block(const Attention &a) { return {blockIdx.x, blockIdx.y, blockIdx.y / a.group()}; }
    __device__ Head member(const Attention &a, unsigned member) const {
        return {sequence, kv_head * a.group() + member, kv_head};
    }

    // Its rows in a tensor of query heads, or of key-value heads, each `dim` wide.
    template <typename T> __device__ HeadRows<T> of_queries(const Attention &a, T *tensor, size_t dim) const {
        const unsigned stride = unsigned(a.heads) * unsigned(dim);
        return {tensor + (size_t(sequence) * a.seq * a.heads + head) * dim, stride, int(dim)};
    }
    template <typename T> __device__ HeadRows<T> of_keys(const Attention &a, T *tensor, size_t dim) const {
        const unsigned stride = unsigned(a.kv_heads) * unsigned(dim);
        return {tensor + size_t(sequence) * a.seq * stride + kv_head * dim, stride, int(dim)};
    }
    // Where its numbers start in a tensor `[b, heads, s]`.
    __device__ size_t statistics(const Attention &a) const { return (size_t(sequence) * a.heads + head) * a.seq; }
    // The first key that a query sees.
    __device__ int first_key(const Attention &a, int query) const {
        const bool given = a.documents != nullptr && query < int(a.seq);
        const int of_document = given ? a.documents[size_t(sequence) * a.seq + query] : 0;
        const int of_window = query + 1 - a.window;
        return of_document > of_window ? of_document : of_window;
    }
    // The first key that any of some queries sees; whole warps call it.
    __device__ int first_key(const Attention &a, int query, int queries) const {
        int first = query;
        for (int i = threadIdx.x % WARP; i < queries; i += WARP) {
            const int own = first_key(a, query + i);
            first = own < first ? own : first;
        }
        return warp_reduce(first, [](int x, int y) { return x < y ? x : y; });
    }
};

// How many of `rows` rows from `first` on the sequence has.
__device__ inline int rows_left(const Attention &a, int first, int rows) {
    const size_t left = a.seq - size_t(first);
    return left < size_t(rows) ? int(left) : rows;
}

// How far, as a power of two, a row's scores may go beyond its base before that follows: sums have room for more.
constexpr float HEADROOM = 8.0f;

// What a lane knows of its two rows' keys so far. Weights are exp(scale (score - base)), whatever the base: it cancels.
struct OnlineSoftmax {
    float base[2] = {-INFINITY, -INFINITY};
    // Of this lane's columns alone.
    float sum[2] = {0.0f, 0.0f};

    // Begins rows with a sink, which counts in the sum and has no value. It is the first base; larger scores replace it as in `weigh`. Four
    // lanes share a row, so one of them alone adds the sink's weight to its sum.
    __device__ void begin(float sink, float scale, float factor) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            base[half] = sink / scale;
            sum[half] = threadIdx.x % 4 == 0 ? exp2_flushed(fmaf(sink, LOG2_E, -exponent_offset(half, factor))) : 0.0f;
        }
    }

    // Scores become weights. `rescale` is what earlier sums must be multiplied by; returns whether that is not one. So
    // it seldom is: a base is a row's largest score in the tile that it meets first, and stays within HEADROOM.
    template <int N> __device__ bool weigh(float (&scores)[N][4], float (&rescale)[2], float factor) {
        bool is_rescaled = false;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < N; n++) {
                top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            }
            top = row_reduce(top, Largest());
            // Not of a row that has seen nothing yet: the difference of two infinities is no number.
            const bool follows = (top - base[half]) * factor > HEADROOM;
            rescale[half] = follows ? exp2_flushed((base[half] - top) * factor) : 1.0f;
            base[half] = follows ? top : base[half];
            const float offset = exponent_offset(half, factor);
            float added = 0.0f;
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[n][i] = exp2_flushed(fmaf(scores[n][i], factor, -offset));
                    added += scores[n][i];
                }
            }
            sum[half] = sum[half] * rescale[half] + added;
            is_rescaled = is_rescaled || follows;
        }
        return is_rescaled;
    }

    // The base as an exponent of two, rounded: the same in all of a row's weights.
    __device__ float exponent_offset(int half, float factor) const {
        return base[half] == -INFINITY ? 0.0f : base[half] * factor;
    }

    // The logarithm of the sum of exp(scale score), of which `sum` is the whole row's. What the offset's rounding made
    // of the weights is taken back.
    __device__ float log_sum(int half, float sum, float scale, float factor) const {
        const float rounded = fmaf(base[half], factor, -exponent_offset(half, factor));
        return base[half] * scale + (logf(sum) - rounded * LN_2);
    }
};

// The first keys that a block's queries see, which documents or a window give them.
struct FirstKeys {
    SharedArray<int> of;
    bool given;

    // Of the queries from `first` on, one a thread; known after a barrier.
    __device__ void keep(const Attention &a, const Head &head, int first, int queries) const {
        if (given && int(threadIdx.x) < queries) {
            of[threadIdx.x] = head.first_key(a, first + threadIdx.x);
        }
    }
    __device__ int at(int row) const {
        int first = 0;
        if (given) {
            first = of[row];
        }
        return first;
    }
};

// Sets the scores of keys that a query does not see to minus infinity. A lane's two queries see none before their first keys.
template <int N> __device__ void hide(float (&scores)[N][4], int query, int key, const int (&first_keys)[2]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int own = key + 8 * n + lane_column(i);
            if (own > query + lane_row(i) || own < first_keys[i / 2]) {
                scores[n][i] = -INFINITY;
            }
        }
    }
}

template <int C> __device__ void rescale_rows(float (&sums)[C][4], const float (&factors)[2]) {
#pragma unroll
    for (int c = 0; c < C; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[c][i] *= factors[i / 2];
        }
    }
}

// Stores what sixteen queries of a warp have gathered; `query` is the first of them.
template <typename T, int C>
__device__ void store_forward(T *out, float *lse, float (&sums)[C][4], const OnlineSoftmax &softmax, int query,
                              const Attention &a, const Head &head, size_t v_dim) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = query + lane_row(2 * half);
        const float sum = row_reduce(softmax.sum[half], Sum());
        if (own >= int(a.seq)) {
            continue;
        }
        if (out != nullptr) {
            store_row(head.of_queries(a, out, v_dim).row(own), int(v_dim), sums, half, a.kept_scale / sum);
        }
        if (lse != nullptr && threadIdx.x % 4 == 0) {
            lse[head.statistics(a) + own] = softmax.log_sum(half, sum, a.scale, a.scale * LOG2_E);
        }
    }
}

template <int N> __device__ void cap_scores(float (&scores)[N][4], const ScoreCap &cap) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[n][i] = cap.of(scores[n][i]);
        }
    }
}

// Probabilities as powers of two, from scores and the logarithm of the sum of a row's exponentials.
template <typename T> struct Exponent {
    static constexpr bool IS_F32 = sizeof(T) == 4;

    // What is made of a row's logarithm once.
    __device__ static float of_row(float lse) { return IS_F32 ? lse : lse * LOG2_E; }
    // In f32 the difference comes first, so that large scores leave no rounding of their own. Probabilities that become
    // bf16 do not show that.
    __device__ static float of(float score, float row, float scale) {
        return IS_F32 ? fmaf(score, scale, -row) * LOG2_E : fmaf(score, scale * LOG2_E, -row);
    }
    // The score of a probability, where scores have no scale.
    __device__ static float score_of(float p, float row) { return IS_F32 ? row + logf(p) : (row + log2f(p)) * LN_2; }
};

// Of a query, what its row of probabilities follows from.
struct Statistics {
    // By `Exponent::of_row`.
    float lse;
    int first_key;
};

// An element of a tile of scores.
struct Element {
    int query, key;
    Statistics of_query;
};

// Which elements of a tile are kept, a bit each, those of eight eights of columns a word. All of them first, and few at a time: beside the
// rest of the arithmetic, random numbers take registers that sums need. Nothing would be spilled, but the backward pass would take up to
// 24 registers a thread more, and dq's loop 6 % more instructions, also where nothing is dropped.
template <int N> struct KeptElements {
    unsigned words[(N + 7) / 8] = {};

    // `first` is the index of the head's first element, `at` says which a lane's are.
    template <typename At> __device__ void find(const Attention &a, uint64_t first, At at) {
        const uint64_t stream = read_key(a.key);
#pragma unroll
        for (int word = 0; word < (N + 7) / 8; word++) {
#pragma unroll 1
            for (int n = 8 * word; n < 8 * word + 8 && n < N; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const Element element = at(n, i);
                    const uint64_t index = first + size_t(element.query) * a.seq + element.key;
                    words[word] |= unsigned(a.is_kept(stream, index)) << (4 * (n % 8) + i);
                }
            }
        }
    }
    __device__ bool has(int n, int i) const { return (words[n / 8] >> (4 * (n % 8) + i) & 1) != 0; }
};

// Drops weights of a tile, whose first element is that of a query and a key.
template <int N> __device__ void drop(float (&weights)[N][4], const Attention &a, const Head &head, int query, int key) {
    KeptElements<N> kept;
    kept.find(a, head.statistics(a) * a.seq, [&](int n, int i) {
        return Element{query + lane_row(i), key + 8 * n + lane_column(i), {}};
    });
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weights[n][i] = kept.has(n, i) ? weights[n][i] : 0.0f;
        }
    }
}

// Scores become probabilities, negative where forward dropped them.
template <typename T, bool HIDES, bool DROPS, int N, typename At>
__device__ void find_probabilities(float (&scores)[N][4], const Attention &a, const KeptElements<N> &kept_elements, At at) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Element element = at(n, i);
            const Statistics &known = element.of_query;
            const float p = exp2_flushed(Exponent<T>::of(scores[n][i], known.lse, a.scale));
            const bool seen = !HIDES || (element.key <= element.query && element.key >= known.first_key);
            const bool kept = !DROPS || kept_elements.has(n, i);
            scores[n][i] = !seen ? 0.0f : kept ? p : -p;
        }
    }
}

// `hides`: whether there are elements that their queries do not see. `kept` gives which are kept, where some are dropped.
template <typename T, int N, typename Kept, typename At>
__device__ void find_probabilities(float (&scores)[N][4], const Attention &a, bool hides, Kept kept, At at) {
    if (a.threshold != 0) {
        find_probabilities<T, true, true>(scores, a, kept(), at);
    } else if (hides) {
        find_probabilities<T, true, false>(scores, a, KeptElements<N>(), at);
    } else {
        find_probabilities<T, false, false>(scores, a, KeptElements<N>(), at);
    }
}

// The same, of a head's elements.
template <typename T, int N, typename At>
__device__ void find_probabilities(float (&scores)[N][4], const Attention &a, const Head &head, bool hides, At at) {
    const uint64_t first = head.statistics(a) * a.seq;
    const auto kept = [&] {
        KeptElements<N> elements;
        elements.find(a, first, at);
        return elements;
    };
    find_probabilities<T>(scores, a, hides, kept, at);
}

// What forward made of probabilities as `find_probabilities` leaves them.
template <int N> __device__ void leave_out_dropped(float (&probabilities)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &p = probabilities[n][i];
            // Not the larger of both, which would be 0 where p is no number.
            p = p < 0.0f ? 0.0f : p;
        }
    }
}

// Gradients of probabilities, dropped or not, become those of scores before scaling. `probability` has them as
// `find_probabilities` leaves them, `row_sum` those of their rows.
template <bool DROPS, int N, typename Probability, typename RowSum>
__device__ void differentiate(float (&gradients)[N][4], float kept_scale, Probability probability, RowSum row_sum) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float p = probability(n, i), sum = row_sum(n, i), gradient = gradients[n][i];
            gradients[n][i] = !DROPS ? p * (gradient - sum) : p < 0.0f ? p * sum : p * (gradient * kept_scale - sum);
        }
    }
}

template <int N, typename Probability, typename RowSum>
__device__ void differentiate(float (&gradients)[N][4], const Attention &a, Probability probability, RowSum row_sum) {
    if (a.threshold != 0) {
        differentiate<true>(gradients, a.kept_scale, probability, row_sum);
    } else {
        differentiate<false>(gradients, 1.0f, probability, row_sum);
    }
}

// Multiplies gradients of capped scores by the cap's slope, so that they become gradients of products. The capped score is computed from the
// probability, as `find_probabilities` leaves it, and from the row's logarithm. A probability of 0 has the score minus infinity and the slope 0.
template <typename T, int N, typename Probability, typename Lse>
__device__ void apply_slopes(float (&gradients)[N][4], const ScoreCap &cap, Probability probability, Lse lse) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            gradients[n][i] *= cap.slope(Exponent<T>::score_of(fabsf(probability(n, i)), lse(n, i)));
        }
    }
}

// Where a walk over query heads of a group, and the blocks of queries of each, has come to.
struct Walk {
    int member, query;

    // Goes on from here to queries that see a key before `end`; returns whether there are any, of members before
    // `members`. The queries of each head start at `first`, and from `last` on none sees such a key. Whole warps call it.
    template <int QUERIES>
    __device__ bool find(const Attention &a, const Head &head, int members, int first, int last, int end) {
        for (; member < members; member++, query = first) {
            for (; query < last; query += QUERIES) {
                const bool documents = a.documents != nullptr;
                if (!documents || head.first_key(a, query, rows_left(a, query, QUERIES)) < end) {
                    return true;
                }
            }
        }
        return false;
    }
};

// Where parts of the query heads of each group leave their sums, unless one part has them all: of each part those for
// dk, like k, then for dv, like v.
struct Parts {
    float *sums;
    size_t count;
};

#define ATTENTION                                                                                              \
    const int *documents, size_t seq, size_t heads, size_t kv_heads, size_t qk_dim, size_t v_dim, float scale, \
        int window, size_t threshold, const uint32_t *key, float kept_scale, float cap, float within_cap
#define OF_ATTENTION                                                                                           \
    {documents, seq, heads, kv_heads, qk_dim, v_dim, scale, window, threshold, key, kept_scale, {cap, within_cap}}
