// Causal attention that never stores the scores (Dao et al. 2022; Dao 2023). Every block keeps rows of one head in
// shared memory, and tiles of other rows go by: keys and values past queries, and in the backward pass also queries
// past keys, so that every sum has one owner and one order. A warp owns 16 of the rows that stay, with their sums in
// registers; probabilities are made again from q, k and the statistics.
//
// Rows that a tile has beyond the sequence are zeros, and so are columns beyond the head's; neither is stored.
#include "pack.cuh"
#include "random.cuh"
#include "tile.cuh"

constexpr float LOG2_E = 1.44269504f;

// Blocks on a multiprocessor that leave each of so many threads all the 255 registers that it can have.
constexpr int blocks(int threads) { return (64 << 10) / 256 / threads; }

// Rows of the tiles, for heads padded to D: in registers the sums, in shared memory at most 163 KB. The launch code
// repeats these numbers.
template <typename T, int D> struct Sizes {
    static constexpr bool IS_F32 = sizeof(T) == 4, IS_WIDE = D > 128;
    static constexpr int ROW_WARPS = IS_F32 && IS_WIDE ? 2 : 4;
    static constexpr int ROWS = 16 * ROW_WARPS;
    static constexpr int FORWARD = IS_WIDE ? 32 : 64;
    static constexpr int BACKWARD = IS_F32 ? (IS_WIDE ? 16 : 32) : D <= 64 ? 64 : 32;
    static constexpr int THREADS = WARP * ROW_WARPS;
    // Sums of dk and dv are twice as many: wide ones are parted by columns between two sets of warps.
    static constexpr int PARTS = IS_WIDE ? 2 : 1;
    static constexpr int KEY_THREADS = THREADS * PARTS;
    // Blocks on a multiprocessor, where a thread's sums leave it the choice: told nothing, the compiler tries for more
    // of them, and spills.
    static constexpr int BLOCKS = IS_F32 || IS_WIDE ? blocks(THREADS) : 3;
};

struct Attention {
    const int *documents;
    size_t seq, heads, kv_heads, head_dim;
    float scale;
    // Dropout, unless the threshold is 0; the key lies in device memory.
    size_t threshold;
    const uint32_t *key;
    float kept_scale;

    __device__ bool is_kept(uint64_t element) const { return random_u32(read_key(key), element) >= threshold; }
};

// A query head of a sequence, and the key-value head that serves it.
struct Head {
    size_t sequence, head, kv_head;

    __device__ static Head of_query(const Attention &a, size_t index) {
        const size_t head = index % a.heads;
        return {index / a.heads, head, head / (a.heads / a.kv_heads)};
    }
    __device__ Head member(const Attention &a, int member) const {
        return {sequence, kv_head * (a.heads / a.kv_heads) + member, kv_head};
    }

    // Its rows in a tensor like q, or like k.
    template <typename T> __device__ HeadRows<T> like_q(const Attention &a, T *tensor) const {
        return {tensor + (sequence * a.seq * a.heads + head) * a.head_dim, a.heads * a.head_dim, int(a.head_dim)};
    }
    template <typename T> __device__ HeadRows<T> like_k(const Attention &a, T *tensor) const {
        const size_t stride = a.kv_heads * a.head_dim;
        return {tensor + sequence * a.seq * stride + kv_head * a.head_dim, stride, int(a.head_dim)};
    }
    // Where its numbers start in a tensor `[b, heads, s]`.
    __device__ size_t statistics(const Attention &a) const { return (sequence * a.heads + head) * a.seq; }
    // The first key that a query sees.
    __device__ int first_key(const Attention &a, int query) const {
        const bool given = a.documents != nullptr && query < int(a.seq);
        return given ? a.documents[sequence * a.seq + query] : 0;
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

// What a lane knows of its two rows' keys so far.
struct OnlineSoftmax {
    float largest[2] = {-INFINITY, -INFINITY};
    // Of this lane's columns alone.
    float sum[2] = {0.0f, 0.0f};

    // Scores become exp(scale (score - largest)); `rescale` is what earlier sums must be multiplied by.
    template <int N> __device__ void weigh(float (&scores)[N][4], float (&rescale)[2], float scale) {
        // Powers of two: one multiplication serves the scale and the change of base.
        const float factor = scale * LOG2_E;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = largest[half];
#pragma unroll
            for (int n = 0; n < N; n++) {
                top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            }
            top = row_reduce(top, Largest());
            // A row may have seen nothing yet: not the difference of two infinities.
            const float base = top == -INFINITY ? 0.0f : top;
            // Differences first: large scores leave no rounding of their own in the exponent.
            rescale[half] = exp2_flushed((largest[half] - base) * factor);
            float added = 0.0f;
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[n][i] = exp2_flushed((scores[n][i] - base) * factor);
                    added += scores[n][i];
                }
            }
            sum[half] = sum[half] * rescale[half] + added;
            largest[half] = top;
        }
    }
};

// Sets the scores of keys that a query does not see to minus infinity.
template <int N>
__device__ void hide(float (&scores)[N][4], int query, int key, const int (&first_keys)[2]) {
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

// Drops weights of a tile, whose first element has the index `first`.
template <int N> __device__ void drop(float (&weights)[N][4], const Attention &a, uint64_t first) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!a.is_kept(first + lane_row(i) * a.seq + 8 * n + lane_column(i))) {
                weights[n][i] = 0.0f;
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

// Stores what a warp's queries have gathered; `query` is the first of them.
template <typename T, int C>
__device__ void store_forward(T *out, float *lse, float (&sums)[C][4], const OnlineSoftmax &softmax, int query,
                              const Attention &a, const Head &head) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = query + lane_row(2 * half);
        const float sum = row_reduce(softmax.sum[half], Sum());
        if (own >= int(a.seq)) {
            continue;
        }
        if (out != nullptr) {
            store_row(head.like_q(a, out).row(own), int(a.head_dim), sums, half, a.kept_scale / sum);
        }
        if (lse != nullptr && threadIdx.x % 4 == 0) {
            lse[head.statistics(a) + own] = softmax.largest[half] * a.scale + logf(sum);
        }
    }
}

// Blocks along x are heads; along y queries, the last first, since they see the most keys.
template <typename T, int D>
__device__ void flash_forward(T *out, float *lse, const T *q, const T *k, const T *v, const Attention &a) {
    typedef Sizes<T, D> Size;
    constexpr int ROWS = Size::ROWS, KEYS = Size::FORWARD, THREADS = Size::THREADS;
    DYNAMIC_SHARED(Chunk, chunks);
    const Tile<T, D> q_tile = {chunks, 0}, k_tile = q_tile.next(ROWS), v_tile = k_tile.next(KEYS);
    const Head head = Head::of_query(a, blockIdx.x);
    const HeadRows<const T> keys = head.like_k(a, k), values = head.like_k(a, v);
    const int first = int(gridDim.y - 1 - blockIdx.y) * ROWS, queries = rows_left(a, first, ROWS);
    const int row = threadIdx.x / WARP * 16, query = first + row, end = first + queries;
    const int first_keys[2] = {head.first_key(a, query + lane_row(0)), head.first_key(a, query + lane_row(2))};
    int key = head.first_key(a, first, queries) / KEYS * KEYS;
    copy_rows<ROWS, THREADS>(q_tile, head.like_q(a, q), first, queries);
    copy_rows<KEYS, THREADS>(k_tile, keys, key, rows_left(a, key, KEYS));
    OnlineSoftmax softmax;
    float sums[D / 8][4] = {};
    for (; key < end; key += KEYS) {
        wait_for_copies();
        __syncthreads();
        // Values come while scores are made, and the next keys while values are added.
        if (out != nullptr) {
            copy_rows<KEYS, THREADS>(v_tile, values, key, rows_left(a, key, KEYS));
        }
        float scores[KEYS / 8][4] = {}, rescale[2];
        add_product(scores, q_tile, row, k_tile);
        if (a.documents != nullptr || key + KEYS > query + 1) {
            hide(scores, query, key, first_keys);
        }
        softmax.weigh(scores, rescale, a.scale);
        wait_for_copies();
        __syncthreads();
        if (key + KEYS < end) {
            copy_rows<KEYS, THREADS>(k_tile, keys, key + KEYS, rows_left(a, key + KEYS, KEYS));
        }
        if (out != nullptr) {
            if (a.threshold != 0) {
                drop(scores, a, (head.statistics(a) + query) * a.seq + key);
            }
            rescale_rows(sums, rescale);
            add_weighted(sums, scores, v_tile, 0);
        }
    }
    store_forward(out, lse, sums, softmax, query, a, head);
}

// The sums of dout * out over a head's row, a warp each: of the probabilities times their gradients, dropped or not.
// Blocks along x are tokens, along y some of their heads.
template <typename T>
__device__ void flash_row_sums(float *sums, const T *dout, const T *out, size_t seq, size_t heads, size_t head_dim) {
    const unsigned token = blockIdx.x;
    const size_t head = (size_t(blockIdx.y) * blockDim.x + threadIdx.x) / WARP, row = token * heads + head;
    if (head >= heads) {
        return;
    }
    float sum = 0.0f;
    for (size_t first = threadIdx.x % WARP * PACK; first < head_dim; first += WARP * PACK) {
        const Pack a = load(dout + row * head_dim, first, head_dim), b = load(out + row * head_dim, first, head_dim);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            sum += a.at[i] * b.at[i];
        }
    }
    sum = warp_reduce(sum, Sum());
    if (threadIdx.x % WARP == 0) {
        // A sequence is no longer than all tokens, whose number has 32 bits.
        const unsigned sequence = token / unsigned(seq), at = token % unsigned(seq);
        sums[(sequence * heads + head) * seq + at] = sum;
    }
}

// Of a query, what its row of probabilities follows from.
struct Statistics {
    float lse, row_sum;
    int first_key;
};

// An element of a tile of scores.
struct Element {
    int query, key;
    Statistics of_query;
};

// Scores become probabilities, and the gradients of these, dropped or not, those of the scores before scaling; then
// what forward dropped of the probabilities is dropped. `first` is the index of the head's first element.
template <bool HIDES, bool DROPS, int N, typename At>
__device__ void differentiate_elements(float (&scores)[N][4], float (&gradients)[N][4], const Attention &a,
                                       uint64_t first, At at) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Element element = at(n, i);
            const Statistics &known = element.of_query;
            const bool seen = !HIDES || (element.key <= element.query && element.key >= known.first_key);
            // The difference first, as in the forward pass.
            const float p = seen ? exp2f((scores[n][i] * a.scale - known.lse) * LOG2_E) : 0.0f;
            const bool kept = !DROPS || a.is_kept(first + size_t(element.query) * a.seq + element.key);
            const float gradient = kept ? gradients[n][i] * a.kept_scale : 0.0f;
            gradients[n][i] = p * (gradient - known.row_sum);
            scores[n][i] = kept ? p : 0.0f;
        }
    }
}

// `hides`: whether there are elements that their queries do not see.
template <int N, typename At>
__device__ void differentiate(float (&scores)[N][4], float (&gradients)[N][4], const Attention &a,
                              const Head &head, bool hides, At at) {
    const uint64_t first = head.statistics(a) * a.seq;
    if (a.threshold != 0) {
        differentiate_elements<true, true>(scores, gradients, a, first, at);
    } else if (hides) {
        differentiate_elements<true, false>(scores, gradients, a, first, at);
    } else {
        differentiate_elements<false, false>(scores, gradients, a, first, at);
    }
}

// Two tiles at a time go by, twice: the next come while these are multiplied.
template <typename T, int D> struct Passing {
    Tile<T, D> tiles;
    static constexpr int ROWS = Sizes<T, D>::BACKWARD;

    __device__ Tile<T, D> left(int turn) const { return tiles.next(2 * turn * ROWS); }
    __device__ Tile<T, D> right(int turn) const { return tiles.next((2 * turn + 1) * ROWS); }
};

// Blocks as in the forward pass.
template <typename T, int D>
__device__ void flash_backward_queries(T *dq, const T *dout, const float *lse, const float *row_sums, const T *q,
                                       const T *k, const T *v, const Attention &a) {
    typedef Sizes<T, D> Size;
    constexpr int ROWS = Size::ROWS, KEYS = Size::BACKWARD, THREADS = Size::THREADS;
    DYNAMIC_SHARED(Chunk, chunks);
    const Tile<T, D> q_tile = {chunks, 0}, dout_tile = q_tile.next(ROWS);
    const Passing<T, D> passing = {dout_tile.next(ROWS)};
    const Head head = Head::of_query(a, blockIdx.x);
    const HeadRows<const T> keys = head.like_k(a, k), values = head.like_k(a, v);
    const int first = int(gridDim.y - 1 - blockIdx.y) * ROWS, queries = rows_left(a, first, ROWS);
    const int row = threadIdx.x / WARP * 16, query = first + row, end = first + queries;
    Statistics known[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = query + lane_row(2 * half);
        const size_t at = head.statistics(a) + own;
        const bool exists = own < int(a.seq);
        known[half] = {exists ? lse[at] : 0.0f, exists ? row_sums[at] : 0.0f, head.first_key(a, own)};
    }
    const auto copy_keys = [&](int turn, int key) {
        copy_rows<KEYS, THREADS>(passing.left(turn), keys, key, rows_left(a, key, KEYS));
        copy_rows<KEYS, THREADS>(passing.right(turn), values, key, rows_left(a, key, KEYS));
    };
    int key = head.first_key(a, first, queries) / KEYS * KEYS;
    copy_rows<ROWS, THREADS>(q_tile, head.like_q(a, q), first, queries);
    copy_rows<ROWS, THREADS>(dout_tile, head.like_q(a, dout), first, queries);
    copy_keys(0, key);
    float sums[D / 8][4] = {};
    for (int turn = 0; key < end; key += KEYS, turn ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (key + KEYS < end) {
            copy_keys(turn ^ 1, key + KEYS);
        }
        float scores[KEYS / 8][4] = {}, gradients[KEYS / 8][4] = {};
        add_product(scores, q_tile, row, passing.left(turn));
        add_product(gradients, dout_tile, row, passing.right(turn));
        const bool hides = a.documents != nullptr || key + KEYS > query + 1;
        differentiate(scores, gradients, a, head, hides, [&](int n, int i) {
            return Element{query + lane_row(i), key + 8 * n + lane_column(i), known[i / 2]};
        });
        add_weighted(sums, gradients, passing.left(turn), 0);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = query + lane_row(2 * half);
        if (own < int(a.seq)) {
            // Not by `like_q`: its offset, made before the loop, would be kept in registers that are needed there.
            T *const to = dq + ((head.sequence * a.seq + own) * a.heads + head.head) * a.head_dim;
            store_row(to, int(a.head_dim), sums, half, a.scale);
        }
    }
}

// Where a walk over the query heads of a group, and the blocks of queries of each, has come to.
struct Walk {
    int member, query;

    // Goes on from here to queries that see a key before `end`; returns whether there are any. The queries of each
    // head start at `first`. Whole warps call it.
    template <int QUERIES> __device__ bool find(const Attention &a, const Head &head, int first, int end) {
        for (; member < int(a.heads / a.kv_heads); member++, query = first) {
            for (; query < int(a.seq); query += QUERIES) {
                const bool documents = a.documents != nullptr;
                if (!documents || head.first_key(a, query, rows_left(a, query, QUERIES)) < end) {
                    return true;
                }
            }
        }
        return false;
    }
};

// Blocks along x are key-value heads; along y keys, the first first, since the most queries see them.
template <typename T, int D>
__device__ void flash_backward_keys(T *dk, T *dv, const T *dout, const float *lse, const float *row_sums, const T *q,
                                    const T *k, const T *v, const Attention &a) {
    typedef Sizes<T, D> Size;
    constexpr int ROWS = Size::ROWS, QUERIES = Size::BACKWARD, THREADS = Size::KEY_THREADS;
    constexpr int COLUMNS = D / 8 / Size::PARTS;
    DYNAMIC_SHARED(Chunk, chunks);
    SHARED(float, lse_of, 2 * QUERIES);
    SHARED(float, row_sum_of, 2 * QUERIES);
    SHARED(int, first_key_of, 2 * QUERIES);
    const Tile<T, D> k_tile = {chunks, 0}, v_tile = k_tile.next(ROWS);
    const Passing<T, D> passing = {v_tile.next(ROWS)};
    const Head group = {blockIdx.x / a.kv_heads, 0, blockIdx.x % a.kv_heads};
    const int first = int(blockIdx.y) * ROWS, keys = rows_left(a, first, ROWS), end = first + keys;
    const int warp = threadIdx.x / WARP, row = warp % Size::ROW_WARPS * 16, key = first + row;
    const int columns = warp / Size::ROW_WARPS * COLUMNS;
    const auto copy_queries = [&](int turn, const Walk &walk) {
        const Head head = group.member(a, walk.member);
        const int queries = rows_left(a, walk.query, QUERIES);
        copy_rows<QUERIES, THREADS>(passing.left(turn), head.like_q(a, q), walk.query, queries);
        copy_rows<QUERIES, THREADS>(passing.right(turn), head.like_q(a, dout), walk.query, queries);
        // Beyond the sequence dout is zero; so is all that its rows add, if their statistics are numbers.
        const int own = threadIdx.x, to = turn * QUERIES + own;
        const size_t at = head.statistics(a) + walk.query + own;
        if (own < QUERIES) {
            const bool exists = own < queries;
            lse_of[to] = exists ? lse[at] : 0.0f;
            row_sum_of[to] = exists ? row_sums[at] : 0.0f;
            if (a.documents != nullptr) {
                first_key_of[to] = head.first_key(a, walk.query + own);
            }
        }
    };
    copy_rows<ROWS, THREADS>(k_tile, group.like_k(a, k), first, keys);
    copy_rows<ROWS, THREADS>(v_tile, group.like_k(a, v), first, keys);
    Walk next = {0, first};
    bool more = next.find<QUERIES>(a, group, first, end);
    copy_queries(0, next);
    float dk_sums[COLUMNS][4] = {}, dv_sums[COLUMNS][4] = {};
    for (int turn = 0; more; turn ^= 1) {
        wait_for_copies();
        __syncthreads();
        const Walk now = next;
        next.query += QUERIES;
        more = next.find<QUERIES>(a, group, first, end);
        if (more) {
            copy_queries(turn ^ 1, next);
        }
        float scores[QUERIES / 8][4] = {}, gradients[QUERIES / 8][4] = {};
        add_product(scores, k_tile, row, passing.left(turn));
        add_product(gradients, v_tile, row, passing.right(turn));
        const bool hides = a.documents != nullptr || key + 16 > now.query + 1;
        differentiate(scores, gradients, a, group.member(a, now.member), hides, [&](int n, int i) {
            const int own = 8 * n + lane_column(i), of = turn * QUERIES + own;
            const int first_key = a.documents == nullptr ? 0 : first_key_of[of];
            return Element{now.query + own, key + lane_row(i), {lse_of[of], row_sum_of[of], first_key}};
        });
        add_weighted(dv_sums, scores, passing.right(turn), columns);
        add_weighted(dk_sums, gradients, passing.left(turn), columns);
    }
    const int width = int(a.head_dim) - 8 * columns;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = key + lane_row(2 * half);
        if (own < int(a.seq)) {
            store_row(group.like_k(a, dk).row(own) + 8 * columns, width, dk_sums, half, a.scale);
            store_row(group.like_k(a, dv).row(own) + 8 * columns, width, dv_sums, half, a.kept_scale);
        }
    }
}

#define ATTENTION                                                                                              \
    const int *documents, size_t seq, size_t heads, size_t kv_heads, size_t head_dim, float scale,             \
        size_t threshold, const uint32_t *key, float kept_scale
#define OF_ATTENTION {documents, seq, heads, kv_heads, head_dim, scale, threshold, key, kept_scale}

#define OF_ONE_WIDTH(T, D, name)                                                                               \
    extern "C" __global__ void __launch_bounds__(Sizes<T, D>::THREADS, Sizes<T, D>::BLOCKS)                    \
        flash_forward_##name(T *out, float *lse, const T *q, const T *k, const T *v, ATTENTION) {              \
        flash_forward<T, D>(out, lse, q, k, v, OF_ATTENTION);                                                  \
    }                                                                                                          \
    EXPORT(flash_forward_##name);                                                                              \
    extern "C" __global__ void __launch_bounds__(Sizes<T, D>::THREADS, Sizes<T, D>::BLOCKS)                    \
        flash_backward_queries_##name(T *dq, const T *dout, const float *lse, const float *row_sums,           \
                                      const T *q, const T *k, const T *v, ATTENTION) {                         \
        flash_backward_queries<T, D>(dq, dout, lse, row_sums, q, k, v, OF_ATTENTION);                          \
    }                                                                                                          \
    EXPORT(flash_backward_queries_##name);                                                                     \
    extern "C" __global__ void __launch_bounds__(Sizes<T, D>::KEY_THREADS, blocks(Sizes<T, D>::KEY_THREADS))   \
        flash_backward_keys_##name(T *dk, T *dv, const T *dout, const float *lse, const float *row_sums,       \
                                   const T *q, const T *k, const T *v, ATTENTION) {                            \
        flash_backward_keys<T, D>(dk, dv, dout, lse, row_sums, q, k, v, OF_ATTENTION);                         \
    }                                                                                                          \
    EXPORT(flash_backward_keys_##name)

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void flash_row_sums_##name(float *sums, const T *dout, const T *out, size_t seq,     \
                                                     size_t heads, size_t head_dim) {                          \
        flash_row_sums(sums, dout, out, seq, heads, head_dim);                                                 \
    }                                                                                                          \
    EXPORT(flash_row_sums_##name);                                                                             \
    OF_ONE_WIDTH(T, 32, 32_##name);                                                                            \
    OF_ONE_WIDTH(T, 64, 64_##name);                                                                            \
    OF_ONE_WIDTH(T, 128, 128_##name);                                                                          \
    OF_ONE_WIDTH(T, 256, 256_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
