// Causal attention that never stores the scores, for all GPUs. A warp owns some of the rows that stay, with their sums in registers.
//
// Rows that a tile has beyond the sequence are zeros, and so are columns beyond the head's; neither is stored.
#include "flash_attention.cuh"

// Blocks on a multiprocessor that leave each of so many threads all the 255 registers that it can have. Told nothing,
// the compiler tries for more of them, and spills.
constexpr int blocks(int threads) { return (64 << 10) / 256 / threads; }

// Rows of the tiles, for heads padded to D: in registers the sums, in shared memory at most 163 KB. The launch code
// repeats these numbers.
template <typename T, int D> struct Sizes {
    static constexpr bool IS_F32 = sizeof(T) == 4, IS_WIDE = D > 128;
    // Sixteens of rows of a warp: what it loads of a tile that goes by serves them all. Two, where registers hold the
    // sums: loads keep shared memory busy for longer than their products take otherwise.
    static constexpr int SIXTEENS = IS_F32 || IS_WIDE ? 1 : 2;
    static constexpr int WARP_ROWS = 16 * SIXTEENS;
    // What stays of a head: queries, or in one pass keys.
    static constexpr int QUERIES = IS_F32 && IS_WIDE ? 32 : 64 * SIXTEENS;
    static constexpr int KEYS = IS_F32 && IS_WIDE ? 32 : 64;
    // What goes by in the forward pass, and in the backward passes.
    static constexpr int FORWARD = IS_WIDE ? 32 : 64;
    static constexpr int BACKWARD = IS_F32 ? (IS_WIDE ? 16 : 32) : D <= 64 ? 64 : 32;
    static constexpr int QUERY_THREADS = WARP * QUERIES / WARP_ROWS;
    // Keys have a warp for the sums of dv and one for those of dk, or two where their registers would not do for all
    // columns.
    static constexpr int COLUMN_SETS = IS_F32 && IS_WIDE ? 2 : 1;
    static constexpr int KEY_THREADS = 2 * COLUMN_SETS * WARP * KEYS / WARP_ROWS;
};

// Blocks along x are sequences, along y heads; along z queries, the last first, since they see the most keys.
template <typename T, int D>
__device__ void flash_forward(T *out, float *lse, const T *sinks, const T *q, const T *k, const T *v, const Attention &a) {
    typedef Sizes<T, D> Size;
    constexpr int QUERIES = Size::QUERIES, KEYS = Size::FORWARD, THREADS = Size::QUERY_THREADS, F = Size::SIXTEENS;
    DYNAMIC_SHARED(Chunk, chunks);
    SHARED(int, first_key_of, QUERIES);
    const Tile<T, D> q_tile = {chunks, 0}, k_tile = q_tile.next(QUERIES), v_tile = k_tile.next(KEYS);
    const Head head = Head::of_block(a);
    const HeadRows<const T> keys = head.of_keys(a, k, a.qk_dim), values = head.of_keys(a, v, a.v_dim<D>());
    const int first = int(gridDim.z - 1 - blockIdx.z) * QUERIES, queries = rows_left(a, first, QUERIES);
    const int row = threadIdx.x / WARP * Size::WARP_ROWS, query = first + row, end = first + queries;
    const FirstKeys first_keys = {first_key_of, a.has_first_keys()};
    first_keys.keep(a, head, first, QUERIES);
    int key = head.first_key(a, first, queries) / KEYS * KEYS;
    copy_rows<QUERIES, THREADS>(q_tile, head.of_queries(a, q, a.qk_dim), first, queries);
    copy_rows<KEYS, THREADS>(k_tile, keys, key, rows_left(a, key, KEYS));
    OnlineSoftmax softmax[F];
    float sums[F][D / 8][4] = {};
    // Powers of two: one multiplication serves the scale and the change of base.
    const float factor = a.scale * LOG2_E;
    if (sinks != nullptr) {
#pragma unroll
        for (int f = 0; f < F; f++) {
            softmax[f].begin(widen(sinks[head.head]), a.scale, factor);
        }
    }
    for (; key < end; key += KEYS) {
        wait_for_copies();
        __syncthreads();
        // Values come while scores are made, and the next keys while values are added.
        if (out != nullptr) {
            copy_rows<KEYS, THREADS>(v_tile, values, key, rows_left(a, key, KEYS));
        }
        float scores[F][KEYS / 8][4] = {};
        add_product(scores, q_tile, row, k_tile);
#pragma unroll
        for (int f = 0; f < F; f++) {
            const int start = query + 16 * f;
            if (a.is_capped<D>()) {
                cap_scores(scores[f], a.cap);
            }
            if (a.hides<16, KEYS>(start, key)) {
                const int of = row + 16 * f;
                hide(scores[f], start, key, {first_keys.at(of + lane_row(0)), first_keys.at(of + lane_row(2))});
            }
            float rescale[2];
            if (__any_sync(WHOLE_WARP, softmax[f].weigh(scores[f], rescale, factor))) {
                rescale_rows(sums[f], rescale);
            }
            if (a.threshold != 0) {
                drop(scores[f], a, head, start, key);
            }
        }
        wait_for_copies();
        __syncthreads();
        if (key + KEYS < end) {
            copy_rows<KEYS, THREADS>(k_tile, keys, key + KEYS, rows_left(a, key + KEYS, KEYS));
        }
        if (out != nullptr) {
            add_weighted(sums, scores, v_tile, 0);
        }
    }
#pragma unroll
    for (int f = 0; f < F; f++) {
        store_forward(out, lse, sums[f], softmax[f], query + 16 * f, a, head, a.v_dim<D>());
    }
}

// The sums of dout * out over a head's row: of the probabilities times their gradients, dropped or not. A row has
// `lanes` lanes, a power of two. Blocks along x are tokens, along y some of their heads.
template <typename T>
__device__ void flash_row_sums(float *sums, const T *dout, const T *out, size_t seq, size_t heads, size_t v_dim,
                               size_t lanes) {
    const unsigned token = blockIdx.x, lane = threadIdx.x % unsigned(lanes);
    const size_t head = (size_t(blockIdx.y) * blockDim.x + threadIdx.x) / unsigned(lanes), row = token * heads + head;
    float sum = 0.0f;
    if (head < heads) {
        for (size_t first = lane * PACK; first < v_dim; first += lanes * PACK) {
            const Pack a = load(dout + row * v_dim, first, v_dim);
            const Pack b = load(out + row * v_dim, first, v_dim);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                sum += a.at[i] * b.at[i];
            }
        }
    }
    for (unsigned distance = unsigned(lanes) / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(WHOLE_WARP, sum, distance);
    }
    if (lane == 0 && head < heads) {
        // A sequence is no longer than all tokens, whose number has 32 bits.
        const unsigned sequence = token / unsigned(seq), at = token % unsigned(seq);
        sums[(sequence * heads + head) * seq + at] = sum;
    }
}

// Blocks as in the forward pass.
template <typename T, int D>
__device__ void flash_backward_queries(T *dq, const T *dout, const float *lse, const float *row_sums, const T *q,
                                       const T *k, const T *v, const Attention &a) {
    typedef Sizes<T, D> Size;
    constexpr int QUERIES = Size::QUERIES, KEYS = Size::BACKWARD, THREADS = Size::QUERY_THREADS, F = Size::SIXTEENS;
    DYNAMIC_SHARED(Chunk, chunks);
    SHARED(float, lse_of, QUERIES);
    SHARED(float, row_sum_of, QUERIES);
    SHARED(int, first_key_of, QUERIES);
    const Tile<T, D> q_tile = {chunks, 0}, dout_tile = q_tile.next(QUERIES);
    const Tile<T, D> v_tile = dout_tile.next(QUERIES);
    const Head head = Head::of_block(a);
    const HeadRows<const T> keys = head.of_keys(a, k, a.qk_dim), values = head.of_keys(a, v, a.v_dim<D>());
    const int first = int(gridDim.z - 1 - blockIdx.z) * QUERIES, queries = rows_left(a, first, QUERIES);
    const int row = threadIdx.x / WARP * Size::WARP_ROWS, query = first + row, end = first + queries;
    const FirstKeys first_keys = {first_key_of, a.has_first_keys()};
    first_keys.keep(a, head, first, QUERIES);
    // Every thread has a query of its own at most.
    if (const int own = threadIdx.x; own < QUERIES) {
        const bool exists = own < queries;
        const size_t at = head.statistics(a) + first + own;
        lse_of[own] = exists ? Exponent<T>::of_row(lse[at]) : 0.0f;
        row_sum_of[own] = exists ? row_sums[at] : 0.0f;
    }
    const auto k_tile = [&](int turn) { return v_tile.next((1 + turn) * KEYS); };
    const auto copy_keys = [&](int turn, int key) {
        copy_rows<KEYS, THREADS>(k_tile(turn), keys, key, rows_left(a, key, KEYS));
    };
    const auto copy_values = [&](int key) { copy_rows<KEYS, THREADS>(v_tile, values, key, rows_left(a, key, KEYS)); };
    int key = head.first_key(a, first, queries) / KEYS * KEYS;
    copy_rows<QUERIES, THREADS>(q_tile, head.of_queries(a, q, a.qk_dim), first, queries);
    copy_rows<QUERIES, THREADS>(dout_tile, head.of_queries(a, dout, a.v_dim<D>()), first, queries);
    copy_keys(0, key);
    copy_values(key);
    float sums[F][D / 8][4] = {};
    for (int turn = 0; key < end; key += KEYS, turn ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (key + KEYS < end) {
            copy_keys(turn ^ 1, key + KEYS);
        }
        float gradients[F][KEYS / 8][4] = {};
        add_product(gradients, dout_tile, row, v_tile);
        // Values are used once, so they have one tile: with two, heads of 128 would not fit where a block has 99 KiB.
        __syncthreads();
        if (key + KEYS < end) {
            copy_values(key + KEYS);
        }
        float scores[F][KEYS / 8][4] = {};
        add_product(scores, q_tile, row, k_tile(turn));
#pragma unroll
        for (int f = 0; f < F; f++) {
            const int start = query + 16 * f, of = row + 16 * f;
            const float row_lse[2] = {lse_of[of + lane_row(0)], lse_of[of + lane_row(2)]};
            const float row_sum[2] = {row_sum_of[of + lane_row(0)], row_sum_of[of + lane_row(2)]};
            const bool hides = a.hides<16, KEYS>(start, key);
            if (a.is_capped<D>()) {
                cap_scores(scores[f], a.cap);
            }
            find_probabilities<T>(scores[f], a, head, hides, [&](int n, int i) {
                const int first_key = first_keys.at(of + lane_row(i));
                return Element{start + lane_row(i), key + 8 * n + lane_column(i), {row_lse[i / 2], first_key}};
            });
            const auto probability = [&](int n, int i) { return scores[f][n][i]; };
            differentiate(gradients[f], a, probability, [&](int, int i) { return row_sum[i / 2]; });
            if (a.is_capped<D>()) {
                apply_slopes<T>(gradients[f], a.cap, probability, [&](int, int i) { return row_lse[i / 2]; });
            }
        }
        add_weighted(sums, gradients, k_tile(turn), 0);
    }
#pragma unroll
    for (int f = 0; f < F; f++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = query + 16 * f + lane_row(2 * half);
            if (own < int(a.seq)) {
                // Not by `of_queries`: its offset, made before the loop, would be kept in registers that are needed there.
                T *const to = dq + ((size_t(head.sequence) * a.seq + own) * a.heads + head.head) * a.qk_dim;
                store_row(to, int(a.qk_dim), sums[f], half, a.scale);
            }
        }
    }
}

// Two tiles at a time go by, twice: the next come while these are multiplied.
template <typename T, int D> struct Passing {
    Tile<T, D> tiles;
    static constexpr int ROWS = Sizes<T, D>::BACKWARD;

    __device__ Tile<T, D> left(int turn) const { return tiles.next(2 * turn * ROWS); }
    __device__ Tile<T, D> right(int turn) const { return tiles.next((2 * turn + 1) * ROWS); }
};

// Blocks along x are sequences, along y key-value heads, and parts of the query heads of each; along z keys, the first
// first, since the most queries see them. Two warps share some keys, and the work: one has their scores, and sums dv;
// the other has the gradients of their probabilities, is handed these, and sums dk.
template <typename T, int D>
__device__ void flash_backward_keys(T *dk, T *dv, const Parts &parts, const T *dout, const float *lse,
                                    const float *row_sums, const T *q, const T *k, const T *v, const Attention &a) {
    typedef Sizes<T, D> Size;
    constexpr int KEYS = Size::KEYS, QUERIES = Size::BACKWARD, THREADS = Size::KEY_THREADS, F = Size::SIXTEENS;
    constexpr int COLUMNS = D / 8 / Size::COLUMN_SETS;
    DYNAMIC_SHARED(Chunk, chunks);
    SHARED(float, lse_of, 2 * QUERIES);
    SHARED(float, row_sum_of, 2 * QUERIES);
    SHARED(int, first_key_of, 2 * QUERIES);
    SHARED(float4, handed_over, KEYS * QUERIES / 4);
    const Tile<T, D> k_tile = {chunks, 0}, v_tile = k_tile.next(KEYS);
    const Passing<T, D> passing = {v_tile.next(KEYS)};
    const unsigned part = blockIdx.y % unsigned(parts.count), kv_head = blockIdx.y / unsigned(parts.count);
    const Head group = {blockIdx.x, 0, kv_head};
    const auto first_member = [&](unsigned part) { return int(part * a.group() / unsigned(parts.count)); };
    const int members = first_member(part + 1);
    const int first = int(blockIdx.z) * KEYS, keys = rows_left(a, first, KEYS), end = first + keys;
    const int warp = threadIdx.x / WARP, row = warp / (2 * Size::COLUMN_SETS) * Size::WARP_ROWS, key = first + row;
    const bool sums_dv = warp % 2 == 0;
    const int columns = warp / 2 % Size::COLUMN_SETS * COLUMNS;
    const auto copy_queries = [&](int turn, const Walk &walk) {
        const Head head = group.member(a, walk.member);
        const int queries = rows_left(a, walk.query, QUERIES);
        copy_rows<QUERIES, THREADS>(passing.left(turn), head.of_queries(a, q, a.qk_dim), walk.query, queries);
        copy_rows<QUERIES, THREADS>(passing.right(turn), head.of_queries(a, dout, a.v_dim<D>()), walk.query, queries);
        // Beyond the sequence dout is zero; so is all that its rows add, if their statistics are numbers.
        const int own = threadIdx.x, to = turn * QUERIES + own;
        const size_t at = head.statistics(a) + walk.query + own;
        if (own < QUERIES) {
            const bool exists = own < queries;
            lse_of[to] = exists ? Exponent<T>::of_row(lse[at]) : 0.0f;
            row_sum_of[to] = exists ? row_sums[at] : 0.0f;
            if (a.has_first_keys()) {
                first_key_of[to] = head.first_key(a, walk.query + own);
            }
        }
    };
    copy_rows<KEYS, THREADS>(k_tile, group.of_keys(a, k, a.qk_dim), first, keys);
    copy_rows<KEYS, THREADS>(v_tile, group.of_keys(a, v, a.v_dim<D>()), first, keys);
    // Beyond these queries, all windows begin after the keys.
    const int reach = end - 1 + a.window, last = reach < int(a.seq) ? reach : int(a.seq);
    Walk next = {first_member(part), first};
    bool more = next.find<QUERIES>(a, group, members, first, last, end);
    copy_queries(0, next);
    float sums[F][COLUMNS][4] = {};
    for (int turn = 0; more; turn ^= 1) {
        wait_for_copies();
        __syncthreads();
        const Walk now = next;
        next.query += QUERIES;
        more = next.find<QUERIES>(a, group, members, first, last, end);
        if (more) {
            copy_queries(turn ^ 1, next);
        }
        // Scores, or gradients of the probabilities.
        float tile[F][QUERIES / 8][4] = {};
        add_product(tile, sums_dv ? k_tile : v_tile, row, sums_dv ? passing.left(turn) : passing.right(turn));
        const int own = (row / 16 * (QUERIES / 8)) * WARP + threadIdx.x % WARP;
        if (sums_dv) {
#pragma unroll
            for (int f = 0; f < F; f++) {
                const int start = key + 16 * f;
                const bool hides = a.hides<QUERIES, 16>(now.query, start);
                if (a.is_capped<D>()) {
                    cap_scores(tile[f], a.cap);
                }
                find_probabilities<T>(tile[f], a, group.member(a, now.member), hides, [&](int n, int i) {
                    const int own = 8 * n + lane_column(i), of = turn * QUERIES + own;
                    const int first_key = !a.has_first_keys() ? 0 : first_key_of[of];
                    return Element{now.query + own, start + lane_row(i), {lse_of[of], first_key}};
                });
#pragma unroll
                for (int n = 0; n < QUERIES / 8; n++) {
                    const float(&p)[4] = tile[f][n];
                    if (columns == 0) {
                        handed_over[own + (f * (QUERIES / 8) + n) * WARP] = float4{p[0], p[1], p[2], p[3]};
                    }
                }
                if (a.threshold != 0) {
                    leave_out_dropped(tile[f]);
                }
            }
        }
        __syncthreads();
        if (!sums_dv) {
#pragma unroll
            for (int f = 0; f < F; f++) {
                float p[QUERIES / 8][4];
#pragma unroll
                for (int n = 0; n < QUERIES / 8; n++) {
                    const float4 four = handed_over[own + (f * (QUERIES / 8) + n) * WARP];
                    p[n][0] = four.x, p[n][1] = four.y, p[n][2] = four.z, p[n][3] = four.w;
                }
                const auto probability = [&](int n, int i) { return p[n][i]; };
                differentiate(tile[f], a, probability, [&](int n, int i) -> float {
                    return row_sum_of[turn * QUERIES + 8 * n + lane_column(i)];
                });
                if (a.is_capped<D>()) {
                    apply_slopes<T>(tile[f], a.cap, probability, [&](int n, int i) -> float {
                        return lse_of[turn * QUERIES + 8 * n + lane_column(i)];
                    });
                }
            }
        }
        add_weighted(sums, tile, sums_dv ? passing.right(turn) : passing.left(turn), columns);
    }
    const float factor = sums_dv ? a.kept_scale : a.scale;
    const size_t dim = sums_dv ? a.v_dim<D>() : a.qk_dim;
    const int width = int(dim) - 8 * columns;
#pragma unroll
    for (int f = 0; f < F; f++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = key + 16 * f + lane_row(2 * half);
            if (own >= int(a.seq)) {
                continue;
            }
            const size_t token = size_t(group.sequence) * a.seq + own;
            const size_t at = (token * a.kv_heads + group.kv_head) * dim + 8 * columns;
            if (parts.count == 1) {
                store_row((sums_dv ? dv : dk) + at, width, sums[f], half, factor);
            } else {
                const size_t before = part * (a.qk_dim + a.v_dim<D>()) + (sums_dv ? a.qk_dim : 0);
                float *const to = parts.sums + gridDim.x * a.seq * a.kv_heads * before;
                store_row(to + at, width, sums[f], half, factor);
            }
        }
    }
}

// Adds what parts have left, in their order, and rounds once. Blocks along y are dk and dv, of so many elements.
template <typename T>
__device__ void flash_add_parts(T *dk, T *dv, const float *sums, size_t count, size_t of_dk, size_t of_dv) {
    const size_t first = flat_pack(), elements = blockIdx.y == 0 ? of_dk : of_dv;
    if (first >= elements) {
        return;
    }
    const float *const own = sums + blockIdx.y * of_dk;
    Pack sum = load(own, first, elements);
    for (size_t part = 1; part < count; part++) {
        add(sum, load(own + part * (of_dk + of_dv), first, elements));
    }
    store(blockIdx.y == 0 ? dk : dv, first, elements, sum);
}

#define OF_THREADS(T, D, threads) __launch_bounds__(Sizes<T, D>::threads, blocks(Sizes<T, D>::threads))

#define OF_ONE_WIDTH(T, D, name)                                                                               \
    extern "C" __global__ void OF_THREADS(T, D, QUERY_THREADS)                                                 \
        flash_forward_##name(T *out, float *lse, const T *sinks, const T *q, const T *k, const T *v,           \
                             ATTENTION) {                                                                      \
        flash_forward<T, D>(out, lse, sinks, q, k, v, OF_ATTENTION);                                           \
    }                                                                                                          \
    EXPORT(flash_forward_##name);                                                                              \
    extern "C" __global__ void OF_THREADS(T, D, QUERY_THREADS)                                                 \
        flash_backward_queries_##name(T *dq, const T *dout, const float *lse, const float *row_sums,           \
                                      const T *q, const T *k, const T *v, ATTENTION) {                         \
        flash_backward_queries<T, D>(dq, dout, lse, row_sums, q, k, v, OF_ATTENTION);                          \
    }                                                                                                          \
    EXPORT(flash_backward_queries_##name);                                                                     \
    extern "C" __global__ void OF_THREADS(T, D, KEY_THREADS)                                                   \
        flash_backward_keys_##name(T *dk, T *dv, float *sums, size_t parts, const T *dout, const float *lse,   \
                                   const float *row_sums, const T *q, const T *k, const T *v, ATTENTION) {     \
        flash_backward_keys<T, D>(dk, dv, {sums, parts}, dout, lse, row_sums, q, k, v, OF_ATTENTION);          \
    }                                                                                                          \
    EXPORT(flash_backward_keys_##name)

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void flash_row_sums_##name(float *sums, const T *dout, const T *out, size_t seq,     \
                                                     size_t heads, size_t v_dim, size_t lanes) {               \
        flash_row_sums(sums, dout, out, seq, heads, v_dim, lanes);                                             \
    }                                                                                                          \
    EXPORT(flash_row_sums_##name);                                                                             \
    extern "C" __global__ void flash_add_parts_##name(T *dk, T *dv, const float *sums, size_t count,           \
                                                      size_t of_dk, size_t of_dv) {                            \
        flash_add_parts(dk, dv, sums, count, of_dk, of_dv);                                                    \
    }                                                                                                          \
    EXPORT(flash_add_parts_##name);                                                                            \
    OF_ONE_WIDTH(T, 32, 32_##name);                                                                            \
    OF_ONE_WIDTH(T, 64, 64_##name);                                                                            \
    OF_ONE_WIDTH(T, 128, 128_##name);                                                                          \
    OF_ONE_WIDTH(T, 256, 256_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
