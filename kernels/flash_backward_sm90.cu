// Flash attention's backward pass in bf16 on Hopper: as in `flash_attention.cu`, by the products of groups of threads. A block keeps rows of
// a head; one group copies those that go by to rings of stages, and two multiply. Scores and gradients of probabilities have the rows that
// stay as rows, and become left factors of the next products without leaving registers.
#include "flash_sm90.cuh"

// For heads padded to QK, whose values are padded to V. The launch code repeats these numbers.
template <int QK, int V> struct Sizes {
    // In the pass for dq: queries that stay, keys that go by, and stages of these and of their values.
    static constexpr int QUERIES = 128, PASSING_KEYS = QK <= 128 ? 128 : 64;
    static constexpr int KEY_STAGES = QK == 64 || QK == 192 ? 3 : 2, VALUE_STAGES = QK == 256 ? 1 : KEY_STAGES;
    // In that for dk and dv: keys that stay, queries that go by, and their stages. A group sums both gradients of 64 keys, or one where
    // its registers would not do for both.
    static constexpr bool SUMS_BOTH = QK <= 128;
    static constexpr int KEYS = SUMS_BOTH ? 128 : 64, PASSING_QUERIES = QK == 64 ? 96 : 64;
    static constexpr int QUERY_STAGES = QK == 256 ? 2 : 3;
    static constexpr int THREADS = 3 * 128;
};

// Members of the group of a key-value head whose queries a block goes over: a part of them, as equal as possible.
struct PartOfGroup {
    Head group;
    unsigned part;
    Parts parts;
    // Its first member, and the first of the next part.
    int first, end;

    // Along y blocks are key-value heads, and parts of each.
    __device__ static PartOfGroup of_block(const Attention &a, const Parts &parts) {
        unsigned count = unsigned(parts.count);
#ifndef EMULATION
        // Who asks twice gets it computed twice: else quotients would be kept in registers in between.
        asm volatile("" : "+r"(count));
#endif
        const unsigned part = blockIdx.y % count, members = a.group();
        return {{blockIdx.x, 0, blockIdx.y / count}, part, parts, int(part * members / count), int((part + 1) * members / count)};
    }
    // Calls `store` with where a key's row of the gradient of keys, or of that of values, belongs, and the row's width.
    template <typename Store>
    __device__ void with_row(const Attention &a, bf16 *gradient, bool of_values, int key, Store store) const {
        const size_t dim = of_values ? a.own_v_dim : a.qk_dim;
        if (parts.count == 1) {
            store(group.of_keys(a, gradient, dim).row(key), int(dim));
        } else {
            const size_t before = part * (a.qk_dim + a.own_v_dim) + (of_values ? a.qk_dim : 0);
            store(group.of_keys(a, parts.sums + gridDim.x * a.seq * a.kv_heads * before, dim).row(key), int(dim));
        }
    }
};

#ifdef EMULATION

struct PlainBackward : PlainHead {
    const bf16 *dout_of_all;

    const bf16 *dout(int at) const { return head.of_queries(a, dout_of_all, a.own_v_dim).row(at); }
    float probability(int query_at, int key_at, const float *lse) const {
        return expf(score(query_at, key_at) - lse[head.statistics(a) + query_at]);
    }
    // The gradient of a score before scaling.
    float gradient(int query_at, int key_at, const float *lse, float row_sum) const {
        const float kept_scale = is_kept(query_at, key_at) ? a.kept_scale : 0.0f;
        const float of_probability = dot(dout(query_at), value(key_at), a.own_v_dim) * kept_scale;
        return probability(query_at, key_at, lse) * (of_probability - row_sum);
    }
};

template <int QK, int V>
void flash_backward_queries(bf16 *dq, float *row_sums, const bf16 *dout, const bf16 *out, const float *lse, const bf16 *q, const bf16 *k,
                            const bf16 *v, const Attention &a) {
    const Head head = Head::of_block(a);
    const PlainBackward plain = {{a, head, q, k, v}, dout};
    const int first = int(gridDim.z - 1 - blockIdx.z) * Sizes<QK, V>::QUERIES, query = first + int(threadIdx.x);
    if (int(threadIdx.x) >= rows_left(a, first, Sizes<QK, V>::QUERIES)) {
        return;
    }
    const float row_sum = PlainHead::dot(plain.dout(query), head.of_queries(a, out, a.own_v_dim).row(query), a.own_v_dim);
    row_sums[head.statistics(a) + query] = row_sum;
    float sums[QK] = {};
    for (int key = head.first_key(a, query); key <= query; key++) {
        const float gradient = plain.gradient(query, key, lse, row_sum);
        for (size_t i = 0; i < a.qk_dim; i++) {
            sums[i] += gradient * widen(plain.key(key)[i]);
        }
    }
    for (size_t i = 0; i < a.qk_dim; i++) {
        head.of_queries(a, dq, a.qk_dim).row(query)[i] = narrow<bf16>(sums[i] * a.scale);
    }
}

template <int QK, int V>
void flash_backward_keys(bf16 *dk, bf16 *dv, const Parts &parts, const bf16 *dout, const float *lse, const float *row_sums, const bf16 *q,
                         const bf16 *k, const bf16 *v, const Attention &a) {
    const PartOfGroup part = PartOfGroup::of_block(a, parts);
    const int first = int(blockIdx.z) * Sizes<QK, V>::KEYS, key = first + int(threadIdx.x);
    if (int(threadIdx.x) >= rows_left(a, first, Sizes<QK, V>::KEYS)) {
        return;
    }
    float of_key[QK] = {}, of_value[V] = {};
    for (int member = part.first; member < part.end; member++) {
        const PlainBackward plain = {{a, part.group.member(a, member), q, k, v}, dout};
        for (int query = key; query < int(a.seq); query++) {
            if (plain.head.first_key(a, query) > key) {
                continue;
            }
            const float gradient = plain.gradient(query, key, lse, row_sums[plain.head.statistics(a) + query]);
            const float weight = plain.is_kept(query, key) ? plain.probability(query, key, lse) : 0.0f;
            for (size_t i = 0; i < a.qk_dim; i++) {
                of_key[i] += gradient * widen(plain.query(query)[i]);
            }
            for (size_t i = 0; i < a.own_v_dim; i++) {
                of_value[i] += weight * widen(plain.dout(query)[i]);
            }
        }
    }
    const auto store = [](const float *sums, float factor) {
        return [=](auto *row, int width) {
            for (int i = 0; i < width; i++) {
                row[i] = narrow<std::remove_reference_t<decltype(*row)>>(sums[i] * factor);
            }
        };
    };
    part.with_row(a, dk, false, key, store(of_key, a.scale));
    part.with_row(a, dv, true, key, store(of_value, a.kept_scale));
}

#else

// What lies in a block's shared memory: of rows that stay and of rows that go by, queries or keys (`qk`), whose products are scores, and
// values or dout (`v`), whose products are gradients of probabilities.
template <int STAYING, int PASSING, int QK_STAGES, int V_STAGES, int QK, int V> struct Shared {
    HeadPanels<STAYING, QK> staying_qk;
    HeadPanels<STAYING, V> staying_v;
    RowRing<QK_STAGES, PASSING, QK> passing_qk;
    RowRing<V_STAGES, PASSING, V> passing_v;
    // Becomes full when the rows that stay are there.
    uint32_t barrier;
    // Of all this.
    static constexpr int BYTES = STAYING * (QK + V) * int(sizeof(bf16)) + decltype(passing_qk)::BYTES + decltype(passing_v)::BYTES +
                                 decltype(passing_qk)::BARRIER_BYTES + decltype(passing_v)::BARRIER_BYTES + 16;

    __device__ explicit Shared(uint32_t address) {
        staying_qk.address = address;
        staying_v.address = staying_qk.address + staying_qk.BYTES;
        passing_qk.stages = staying_v.address + staying_v.BYTES;
        passing_v.stages = passing_qk.stages + passing_qk.BYTES;
        passing_qk.barriers = passing_v.stages + passing_v.BYTES;
        passing_v.barriers = passing_qk.barriers + passing_qk.BARRIER_BYTES;
        barrier = passing_v.barriers + passing_v.BARRIER_BYTES;
    }
    // `qk_arrivals`: how often each copying thread arrives when a stage of `passing_qk` is full.
    __device__ void init_barriers(int qk_arrivals) const {
        init_barrier(barrier, 2 * GROUP);
        passing_qk.init_barriers(qk_arrivals * GROUP, 2 * GROUP / WARP);
        passing_v.init_barriers(GROUP, 2 * GROUP / WARP);
    }
};

template <int QK, int V>
using SharedOfQueries = Shared<Sizes<QK, V>::QUERIES, Sizes<QK, V>::PASSING_KEYS, Sizes<QK, V>::KEY_STAGES, Sizes<QK, V>::VALUE_STAGES, QK, V>;
template <int QK, int V>
using SharedOfKeys = Shared<Sizes<QK, V>::KEYS, Sizes<QK, V>::PASSING_QUERIES, Sizes<QK, V>::QUERY_STAGES, Sizes<QK, V>::QUERY_STAGES, QK, V>;

// Says that this warp no longer reads a stage, of which its lanes themselves have read, too.
__device__ inline void free_read_stage(uint32_t free_barrier) {
    __syncwarp();
    free_stage(free_barrier);
}

// Sums gradients of scores times the rows that go by, of a group's rows from `row` on. `Tiles` says what goes by.
template <typename Tiles, typename Shared, int C>
__device__ void sum_gradients(float (&sums)[C][4], Shared shared, int row, Tiles tiles) {
    float scores[Tiles::COLUMNS / 8][4], gradients[Tiles::COLUMNS / 8][4];
    Sixteen weights[Tiles::COLUMNS / 16];
    KeptElements<Tiles::COLUMNS / 8> kept;
    auto &first = shared.passing_qk;
    auto &second = shared.passing_v;
    tiles.find_next(first);
    ask_for_scores(scores, shared.staying_qk, row, first.rows());
    for (;;) {
        const auto read = first;
        first.advance();
        // Before the gradients take registers.
        tiles.find_kept(kept);
        second.wait_until_full();
        ask_for_scores(gradients, shared.staying_v, row, second.rows());
        wgmma_wait<1>();
        pin(scores);
        tiles.find_probabilities(scores, kept);
        wgmma_wait<0>();
        pin(gradients);
        free_stage(second.free_barrier());
        second.advance();
        tiles.differentiate(gradients, scores);
        round_weights(weights, gradients);
        ask_for_weighted(sums, weights, read.rows());
        if (!tiles.find_next(first)) {
            break;
        }
        // The next scores come while these sums do.
        ask_for_scores(scores, shared.staying_qk, row, first.rows());
        wgmma_wait<1>();
        pin(sums);
        pin(weights);
        free_read_stage(read.free_barrier());
    }
    wgmma_wait<0>();
    pin(sums);
}

// A lane's two queries: the logarithms of their sums of exponentials, the sums of dout * out, and the first keys that they see.
struct RowsOfQueries {
    float lse[2], row_sums[2];
    int first_keys[2];

    // Of sixteen queries from `query` on. Four lanes sum up a row.
    template <int V>
    __device__ static RowsOfQueries of_warp(const bf16 *dout, const bf16 *out, const float *lse, const Attention &a, const Head &head,
                                            int query) {
        const HeadRows<const bf16> douts = head.of_queries(a, dout, a.own_v_dim), outs = head.of_queries(a, out, a.own_v_dim);
        RowsOfQueries rows;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = query + lane_row(2 * half);
            const bool exists = own < int(a.seq);
            const bf16 *const own_dout = douts.first + size_t(own) * douts.stride, *const own_out = outs.first + size_t(own) * outs.stride;
            // All loads are issued before the first use.
            Held<bf16> left[V / 32], right[V / 32];
            knowing(douts.in_chunks() && outs.in_chunks(), [&](auto wide) {
#pragma unroll
                for (int i = 0; i < V / 32; i++) {
                    const int column = 32 * i + 8 * int(threadIdx.x % 4);
                    const bool given = exists && column < douts.width;
                    left[i] = hold_if<wide.value>(given, own_dout, column, a.own_v_dim);
                    right[i] = hold_if<wide.value>(given, own_out, column, a.own_v_dim);
                }
            });
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < V / 32; i++) {
                const Pack x = widen(left[i]), y = widen(right[i]);
#pragma unroll
                for (int at = 0; at < PACK; at++) {
                    sum += x.at[at] * y.at[at];
                }
            }
            rows.row_sums[half] = row_reduce(sum, Sum());
            rows.lse[half] = exists ? Exponent<bf16>::of_row(lse[head.statistics(a) + own]) : 0.0f;
            rows.first_keys[half] = head.first_key(a, own);
        }
        return rows;
    }
    // Stores the sums for the pass for dk and dv.
    __device__ void store_sums(float *to, const Attention &a, const Head &head, int query) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = query + lane_row(2 * half);
            if (threadIdx.x % 4 == 0 && own < int(a.seq)) {
                to[head.statistics(a) + own] = row_sums[half];
            }
        }
    }
};

// Tiles of keys that go by sixteen queries of a warp.
template <int KEYS> struct KeyTiles {
    static constexpr int COLUMNS = KEYS;

    const Attention &a;
    const Head &head;
    int query;
    RowsOfQueries rows;
    // The first key of the tile, and of those that no query sees.
    int key, end;

    template <typename Keys> __device__ bool find_next(const Keys &keys) {
        key += KEYS;
        if (key >= end) {
            return false;
        }
        keys.wait_until_full();
        return true;
    }
    __device__ Element element(int n, int i) const {
        return {query + lane_row(i), key + 8 * n + lane_column(i), {rows.lse[i / 2], rows.first_keys[i / 2]}};
    }
    __device__ void find_kept(KeptElements<KEYS / 8> &kept) const {
        if (a.threshold != 0) {
            kept = {};
            kept.find(a, head.statistics(a) * a.seq, [&](int n, int i) { return element(n, i); });
        }
    }
    __device__ void find_probabilities(float (&scores)[KEYS / 8][4], const KeptElements<KEYS / 8> &kept) const {
        ::find_probabilities<bf16>(scores, a, a.hides<16, KEYS>(query, key), [&] { return kept; }, [&](int n, int i) { return element(n, i); });
    }
    __device__ void differentiate(float (&gradients)[KEYS / 8][4], const float (&probabilities)[KEYS / 8][4]) const {
        ::differentiate(gradients, a, [&](int n, int i) { return probabilities[n][i]; }, [&](int, int i) { return rows.row_sums[i / 2]; });
    }
};

// The copying group's work in the pass for dq.
template <int QK, int V>
__device__ void copy_keys(SharedOfQueries<QK, V> shared, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v, const Attention &a,
                          const Head &head, int query, Keys keys) {
    constexpr int QUERIES = Sizes<QK, V>::QUERIES, KEYS = Sizes<QK, V>::PASSING_KEYS;
    const int queries = rows_left(a, query, QUERIES);
    shared.staying_qk.fill(head.of_queries(a, q, a.qk_dim), query, queries, shared.barrier);
    shared.staying_v.fill(head.of_queries(a, dout, a.own_v_dim), query, queries, shared.barrier);
    const HeadRows<const bf16> key_rows = head.of_keys(a, k, a.qk_dim), value_rows = head.of_keys(a, v, a.own_v_dim);
    for (int tile = 0; tile < keys.tiles; tile++) {
        const int key = keys.first + tile * KEYS, count = rows_left(a, key, KEYS);
        shared.passing_qk.wait_until_free();
        shared.passing_qk.rows().fill(key_rows, key, count, shared.passing_qk.full_barrier());
        shared.passing_qk.advance();
        shared.passing_v.wait_until_free();
        shared.passing_v.rows().fill(value_rows, key, count, shared.passing_v.full_barrier());
        shared.passing_v.advance();
    }
    // No thread ends with a copy under way.
    wait_for_copies();
}

// Blocks along x are sequences, along y heads; along z queries, the last first, since they see the most keys.
template <int QK, int V>
__device__ void flash_backward_queries(bf16 *dq, float *row_sums, const bf16 *dout, const bf16 *out, const float *lse, const bf16 *q,
                                       const bf16 *k, const bf16 *v, const Attention &a) {
    typedef Sizes<QK, V> Size;
    constexpr int KEYS = Size::PASSING_KEYS;
    extern __shared__ __align__(1024) Chunk chunks[];
    const SharedOfQueries<QK, V> shared(shared_address(chunks));
    if (threadIdx.x == 0) {
        shared.init_barriers(1);
    }
    __syncthreads();
    const Head head = Head::of_block(a);
    const int first = int(gridDim.z - 1 - blockIdx.z) * Size::QUERIES, group = same_in_warp(int(threadIdx.x) / GROUP);
    const Keys keys = Keys::of_block<Size::QUERIES, KEYS>(a, head, first);
    // Threads are launched with 168 registers each.
    if (group == 0) {
        shrink_registers<40>();
        copy_keys(shared, dout, q, k, v, a, head, first, keys);
    } else {
        grow_registers<232>();
        const int row = 64 * (group - 1), query = first + row + row_of_warp();
        const RowsOfQueries rows = RowsOfQueries::of_warp<V>(dout, out, lse, a, head, query);
        rows.store_sums(row_sums, a, head, query);
        float sums[QK / 8][4] = {};
        wait_for_phase(shared.barrier, 0);
        sum_gradients(sums, shared, row, KeyTiles<KEYS>{a, head, query, rows, keys.first - KEYS, keys.first + keys.tiles * KEYS});
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = query + lane_row(2 * half);
            if (own < int(a.seq)) {
                store_row(head.of_queries(a, dq, a.qk_dim).row(own), int(a.qk_dim), sums, half, a.scale);
            }
        }
    }
}

// What is known of the queries of a stage.
template <int QUERIES> struct alignas(16) KnownQueries {
    // By `Exponent::of_row`. Pairs are loaded as one: they begin at multiples of 8 bytes.
    float lse[QUERIES];
    float row_sums[QUERIES];
    // A head of -1 ends the walk.
    int head;
    int first_keys[QUERIES];
    // The first of them.
    int query;
};

// Tiles of queries that go by sixteen keys of a warp.
template <int QUERIES> struct QueryTiles {
    static constexpr int COLUMNS = QUERIES;

    const Attention &a;
    // The first of the warp's keys.
    int key;
    const KnownQueries<QUERIES> *stages, *known;
    int head, query;

    template <typename Queries> __device__ bool find_next(const Queries &queries) {
        queries.wait_until_full();
        known = stages + queries.stage;
        head = same_in_warp(known->head);
        if (head < 0) {
            return false;
        }
        query = same_in_warp(known->query);
        return true;
    }
    __device__ Element element(int n, int i) const {
        const int own = 8 * n + lane_column(i);
        return {query + own, key + lane_row(i), {known->lse[own], known->first_keys[own]}};
    }
    __device__ void find_kept(KeptElements<QUERIES / 8> &kept) const {
        if (a.threshold != 0) {
            kept = {};
            kept.find(a, Head{blockIdx.x, unsigned(head), 0}.statistics(a) * a.seq, [&](int n, int i) { return element(n, i); });
        }
    }
    __device__ void find_probabilities(float (&scores)[QUERIES / 8][4], const KeptElements<QUERIES / 8> &kept) const {
        const bool hides = a.hides<QUERIES, 16>(query, key);
        ::find_probabilities<bf16>(scores, a, hides, [&] { return kept; }, [&](int n, int i) { return element(n, i); });
    }
    __device__ void differentiate(float (&gradients)[QUERIES / 8][4], const float (&probabilities)[QUERIES / 8][4]) const {
        ::differentiate(gradients, a, [&](int n, int i) { return probabilities[n][i]; },
                        [&](int n, int i) { return known->row_sums[8 * n + lane_column(i)]; });
    }
    // Probabilities that forward kept, rounded.
    __device__ void round_kept(Sixteen (&weights)[QUERIES / 16], const float (&probabilities)[QUERIES / 8][4]) const {
        if (a.threshold == 0) {
            round_weights(weights, probabilities);
            return;
        }
        float kept[QUERIES / 8][4];
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                kept[n][i] = probabilities[n][i];
            }
        }
        leave_out_dropped(kept);
        round_weights(weights, kept);
    }
};

// The copying group's work in the pass for dk and dv.
template <int QK, int V>
__device__ void copy_queries(SharedOfKeys<QK, V> shared, KnownQueries<Sizes<QK, V>::PASSING_QUERIES> *stages, const bf16 *dout,
                             const float *lse, const float *row_sums, const bf16 *q, const bf16 *k, const bf16 *v, const Attention &a,
                             const PartOfGroup &part) {
    constexpr int KEYS = Sizes<QK, V>::KEYS, QUERIES = Sizes<QK, V>::PASSING_QUERIES;
    const int first = int(blockIdx.z) * KEYS, keys = rows_left(a, first, KEYS), end = first + keys, own = threadIdx.x;
    shared.staying_qk.fill(part.group.of_keys(a, k, a.qk_dim), first, keys, shared.barrier);
    shared.staying_v.fill(part.group.of_keys(a, v, a.own_v_dim), first, keys, shared.barrier);
    // Beyond these queries, all windows begin after the keys.
    const int reach = end - 1 + a.window, last = reach < int(a.seq) ? reach : int(a.seq);
    Walk walk = {part.first, first};
    auto &queries = shared.passing_qk;
    auto &douts = shared.passing_v;
    for (; walk.find<QUERIES>(a, part.group, part.end, first, last, end); walk.query += QUERIES) {
        Head head = part.group.member(a, walk.member);
        // Else the compiler keeps what follows from it in registers that are needed.
        asm volatile("" : "+r"(head.sequence));
        const int count = rows_left(a, walk.query, QUERIES);
        // Beyond the sequence dout is zero; so is all that its rows add, if their statistics are numbers.
        const bool exists = own < count;
        const size_t at = head.statistics(a) + walk.query + own;
        const float own_lse = exists ? Exponent<bf16>::of_row(lse[at]) : 0.0f, own_sum = exists ? row_sums[at] : 0.0f;
        const int own_first_key = exists ? head.first_key(a, walk.query + own) : 0;
        queries.wait_until_free();
        KnownQueries<QUERIES> &known = stages[queries.stage];
        if (own < QUERIES) {
            known.lse[own] = own_lse;
            known.row_sums[own] = own_sum;
            known.first_keys[own] = own_first_key;
        }
        if (own == 0) {
            known.head = int(head.head);
            known.query = walk.query;
        }
        arrive(queries.full_barrier());
        queries.rows().fill(head.of_queries(a, q, a.qk_dim), walk.query, count, queries.full_barrier());
        queries.advance();
        douts.wait_until_free();
        douts.rows().fill(head.of_queries(a, dout, a.own_v_dim), walk.query, count, douts.full_barrier());
        douts.advance();
    }
    queries.wait_until_free();
    if (own == 0) {
        stages[queries.stage].head = -1;
    }
    arrive(queries.full_barrier());
    arrive(queries.full_barrier());
    // No thread ends with a copy under way.
    wait_for_copies();
}

// Sums the gradients of keys and of values, of a group's keys from `row` on.
template <typename Shared, int QUERIES, int QK_EIGHTS, int V_EIGHTS>
__device__ void sum_both(float (&of_keys)[QK_EIGHTS][4], float (&of_values)[V_EIGHTS][4], Shared shared, int row, QueryTiles<QUERIES> tiles) {
    float scores[QUERIES / 8][4], gradients[QUERIES / 8][4];
    Sixteen weights[QUERIES / 16], score_weights[QUERIES / 16];
    KeptElements<QUERIES / 8> kept;
    auto &queries = shared.passing_qk;
    auto &douts = shared.passing_v;
    tiles.find_next(queries);
    ask_for_scores(scores, shared.staying_qk, row, queries.rows());
    for (;;) {
        const auto read = queries;
        queries.advance();
        tiles.find_kept(kept);
        douts.wait_until_full();
        ask_for_scores(gradients, shared.staying_v, row, douts.rows());
        wgmma_wait<1>();
        pin(scores);
        tiles.find_probabilities(scores, kept);
        wgmma_wait<0>();
        pin(gradients);
        tiles.differentiate(gradients, scores);
        round_weights(score_weights, gradients);
        tiles.round_kept(weights, scores);
        ask_for_weighted(of_values, weights, douts.rows());
        ask_for_weighted(of_keys, score_weights, read.rows());
        if (!tiles.find_next(queries)) {
            break;
        }
        // The next scores come while these sums do.
        ask_for_scores(scores, shared.staying_qk, row, queries.rows());
        wgmma_wait<1>();
        pin(of_values);
        pin(of_keys);
        pin(weights);
        pin(score_weights);
        free_read_stage(read.free_barrier());
        free_stage(douts.free_barrier());
        douts.advance();
    }
    wgmma_wait<0>();
    pin(of_values);
    pin(of_keys);
}

// Sums the gradients of values alone.
template <typename Shared, int QUERIES, int C>
__device__ void sum_values(float (&sums)[C][4], Shared shared, int row, QueryTiles<QUERIES> tiles) {
    float scores[QUERIES / 8][4];
    Sixteen weights[QUERIES / 16];
    KeptElements<QUERIES / 8> kept;
    auto &queries = shared.passing_qk;
    auto &douts = shared.passing_v;
    tiles.find_next(queries);
    ask_for_scores(scores, shared.staying_qk, row, queries.rows());
    for (;;) {
        tiles.find_kept(kept);
        wgmma_wait<0>();
        pin(scores);
        tiles.find_probabilities(scores, kept);
        free_read_stage(queries.free_barrier());
        queries.advance();
        tiles.round_kept(weights, scores);
        douts.wait_until_full();
        ask_for_weighted(sums, weights, douts.rows());
        if (!tiles.find_next(queries)) {
            break;
        }
        ask_for_scores(scores, shared.staying_qk, row, queries.rows());
        wgmma_wait<1>();
        pin(sums);
        pin(weights);
        free_stage(douts.free_barrier());
        douts.advance();
    }
    wgmma_wait<0>();
    pin(sums);
}

// Stores a warp's sums of a gradient of sixteen keys from `key` on.
template <int C>
__device__ void store_keys(bf16 *gradient, bool of_values, float (&sums)[C][4], int key, const Attention &a, const Parts &parts) {
    const PartOfGroup part = PartOfGroup::of_block(a, parts);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = key + lane_row(2 * half);
        if (own < int(a.seq)) {
            part.with_row(a, gradient, of_values, own, [&](auto *row, int width) {
                store_row(row, width, sums, half, of_values ? a.kept_scale : a.scale);
            });
        }
    }
}

// Blocks along x are sequences, along y key-value heads, and parts of the query heads of each; along z keys, the first first, since the
// most queries see them.
template <int QK, int V>
__device__ void flash_backward_keys(bf16 *dk, bf16 *dv, const Parts &parts, const bf16 *dout, const float *lse, const float *row_sums,
                                    const bf16 *q, const bf16 *k, const bf16 *v, const Attention &a) {
    typedef Sizes<QK, V> Size;
    typedef KnownQueries<Size::PASSING_QUERIES> Known;
    extern __shared__ __align__(1024) Chunk chunks[];
    const SharedOfKeys<QK, V> shared(shared_address(chunks));
    // What is known of queries lies behind them.
    Known *const stages = reinterpret_cast<Known *>(chunks + shared.BYTES / sizeof(Chunk));
    if (threadIdx.x == 0) {
        shared.init_barriers(2);
    }
    __syncthreads();
    const int group = same_in_warp(int(threadIdx.x) / GROUP);
    // Threads are launched with 168 registers each.
    if (group == 0) {
        shrink_registers<56>();
        copy_queries(shared, stages, dout, lse, row_sums, q, k, v, a, PartOfGroup::of_block(a, parts));
        return;
    }
    const int row = Size::SUMS_BOTH ? 64 * (group - 1) : 0, key = int(blockIdx.z) * Size::KEYS + row + row_of_warp();
    const QueryTiles<Size::PASSING_QUERIES> tiles = {a, key, stages};
    wait_for_phase(shared.barrier, 0);
    if constexpr (Size::SUMS_BOTH) {
        grow_registers<224>();
        float of_keys[QK / 8][4] = {}, of_values[V / 8][4] = {};
        sum_both(of_keys, of_values, shared, row, tiles);
        store_keys(dk, false, of_keys, key, a, parts);
        store_keys(dv, true, of_values, key, a, parts);
    } else if (group == 1) {
        grow_registers<208>();
        float sums[V / 8][4] = {};
        sum_values(sums, shared, row, tiles);
        store_keys(dv, true, sums, key, a, parts);
    } else {
        grow_registers<240>();
        float sums[QK / 8][4] = {};
        sum_gradients(sums, shared, row, tiles);
        store_keys(dk, false, sums, key, a, parts);
    }
}

#endif

#define OF_ONE_WIDTH(QK, V)                                                                                                         \
    extern "C" __global__ void __launch_bounds__(Sizes<QK, V>::THREADS, 1) flash_backward_queries_sm90_##QK##_bf16(                 \
        bf16 *dq, float *row_sums, const bf16 *dout, const bf16 *out, const float *lse, const bf16 *q, const bf16 *k, const bf16 *v, \
        ATTENTION) {                                                                                                                \
        flash_backward_queries<QK, V>(dq, row_sums, dout, out, lse, q, k, v, OF_ATTENTION);                                         \
    }                                                                                                                               \
    EXPORT(flash_backward_queries_sm90_##QK##_bf16);                                                                                \
    extern "C" __global__ void __launch_bounds__(Sizes<QK, V>::THREADS, 1) flash_backward_keys_sm90_##QK##_bf16(                    \
        bf16 *dk, bf16 *dv, float *sums, size_t parts, const bf16 *dout, const float *lse, const float *row_sums, const bf16 *q,    \
        const bf16 *k, const bf16 *v, ATTENTION) {                                                                                  \
        flash_backward_keys<QK, V>(dk, dv, {sums, parts}, dout, lse, row_sums, q, k, v, OF_ATTENTION);                              \
    }                                                                                                                               \
    EXPORT(flash_backward_keys_sm90_##QK##_bf16)

OF_ONE_WIDTH(64, 64);
OF_ONE_WIDTH(128, 128);
OF_ONE_WIDTH(192, 128);
OF_ONE_WIDTH(256, 256);
