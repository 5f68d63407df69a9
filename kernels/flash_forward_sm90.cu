// Flash attention's forward pass in bf16 on Hopper: as in `flash_attention.cu`, by the products of groups of threads. One group copies keys
// and values to rings of stages, and others have 64 queries each. A group's scores of the next keys are multiplied while values are added
// by the weights of the last; and groups multiply in turn, so that one weighs scores while another multiplies.
#include "flash_sm90.cuh"

// For heads padded to QK, whose values are padded to V. The launch code repeats these numbers.
template <int QK, int V> struct Sizes {
    static constexpr int GROUPS = QK == 64 ? 3 : 2;
    static constexpr int QUERIES = 64 * GROUPS;
    static constexpr int KEYS = QK == 128 ? 128 : QK == 256 ? 80 : 112;
    static constexpr int STAGES = 2;
    static constexpr int THREADS = 128 * (1 + GROUPS);
    // Registers of a thread that copies, and of one that multiplies. Launched are 168 of three groups, and 128 of four.
    static constexpr int COPYING = GROUPS == 3 ? 56 : 40;
    static constexpr int MULTIPLYING = GROUPS == 3 ? 152 : 232;
};

#ifdef EMULATION

template <int QK, int V>
void flash_forward(bf16 *out, float *lse, const bf16 *sinks, const bf16 *q, const bf16 *k, const bf16 *v, const Attention &a) {
    typedef Sizes<QK, V> Size;
    const Head head = Head::of_block(a);
    const PlainHead plain = {a, head, q, k, v};
    const int first = int(gridDim.z - 1 - blockIdx.z) * Size::QUERIES;
    if (int(threadIdx.x) >= rows_left(a, first, Size::QUERIES)) {
        return;
    }
    const int query = first + int(threadIdx.x), first_key = head.first_key(a, query);
    float top = -INFINITY, sum = 0.0f, sums[V] = {};
    for (int key = first_key; key <= query; key++) {
        top = fmaxf(top, plain.score(query, key));
    }
    if (sinks != nullptr) {
        const float sink = widen(sinks[head.head]);
        top = fmaxf(top, sink);
        sum = expf(sink - top);
    }
    for (int key = first_key; key <= query; key++) {
        const float weight = expf(plain.score(query, key) - top);
        sum += weight;
        const size_t kept_columns = plain.is_kept(query, key) ? a.own_v_dim : 0;
        for (size_t i = 0; i < kept_columns; i++) {
            sums[i] += weight * widen(plain.value(key)[i]);
        }
    }
    for (size_t i = 0; i < a.own_v_dim && out != nullptr; i++) {
        head.of_queries(a, out, a.own_v_dim).row(query)[i] = narrow<bf16>(sums[i] * (a.kept_scale / sum));
    }
    if (lse != nullptr) {
        lse[head.statistics(a) + query] = top + logf(sum);
    }
}

#else

// What lies in a block's shared memory.
template <int QK, int V> struct Shared {
    typedef Sizes<QK, V> Size;

    HeadPanels<Size::QUERIES, QK> queries;
    RowRing<Size::STAGES, Size::KEYS, QK> keys;
    RowRing<Size::STAGES, Size::KEYS, V> values;
    // Becomes full when the queries are there.
    uint32_t queries_barrier;
    // The head's sink, if it has one. In registers, what its address follows from would be kept from tile to tile, and spill others.
    uint32_t sink;

    __device__ explicit Shared(uint32_t address) {
        queries.address = address;
        keys.stages = queries.address + queries.BYTES;
        values.stages = keys.stages + keys.BYTES;
        keys.barriers = values.stages + values.BYTES;
        values.barriers = keys.barriers + keys.BARRIER_BYTES;
        queries_barrier = values.barriers + values.BARRIER_BYTES;
        sink = queries_barrier + 8;
    }
    __device__ void init_barriers() const {
        init_barrier(queries_barrier, GROUP);
        keys.init_barriers(GROUP, Size::GROUPS * GROUP / WARP);
        values.init_barriers(GROUP, Size::GROUPS * GROUP / WARP);
    }
};

// The copying group's work. Keys go by from the diagonal backwards: tiles with hidden ones come first.
template <int QK, int V>
__device__ void copy_tiles(Shared<QK, V> shared, const bf16 *q, const bf16 *k, const bf16 *v, const Attention &a, const Head &head,
                           int first_query) {
    constexpr int QUERIES = Sizes<QK, V>::QUERIES, KEYS = Sizes<QK, V>::KEYS;
    const Keys keys = Keys::of_block<QUERIES, KEYS>(a, head, first_query);
    shared.queries.fill(head.of_queries(a, q, a.qk_dim), first_query, rows_left(a, first_query, QUERIES), shared.queries_barrier);
    const HeadRows<const bf16> key_rows = head.of_keys(a, k, a.qk_dim), value_rows = head.of_keys(a, v, a.own_v_dim);
    for (int tile = keys.tiles - 1; tile >= 0; tile--) {
        const int key = keys.first + tile * KEYS, count = rows_left(a, key, KEYS);
        shared.keys.wait_until_free();
        shared.keys.rows().fill(key_rows, key, count, shared.keys.full_barrier());
        shared.keys.advance();
        shared.values.wait_until_free();
        shared.values.rows().fill(value_rows, key, count, shared.values.full_barrier());
        shared.values.advance();
    }
    // No thread ends with a copy under way.
    wait_for_copies();
}

// Multiplying groups ask for their products one after the other: each waits for the one before it, and the first for the last one's of the
// tile before.
template <int GROUPS> struct Turn {
    int group;

    __device__ void wait(bool is_first_tile) const {
        if (GROUPS > 1 && !(group == 0 && is_first_tile)) {
            wait_for_groups(1 + group, 2 * GROUP);
        }
    }
    __device__ void pass_on(bool is_last_tile) const {
        if (GROUPS > 1 && !(group == GROUPS - 1 && is_last_tile)) {
            arrive_at_groups(group == GROUPS - 1 ? 1 : 2 + group, 2 * GROUP);
        }
    }
};

// Sixteen queries of a warp from `query` on, and the sums of their values.
template <int QK, int V> struct QueryRows {
    static constexpr int KEYS = Sizes<QK, V>::KEYS;

    const Attention &a;
    const Head &head;
    int query;
    int first_keys[2];
    OnlineSoftmax softmax;
    float sums[V / 8][4] = {};

    // Scores of keys from `key` on become weights. Returns whether earlier sums must be multiplied by `rescale`.
    __device__ bool weigh(float (&scores)[KEYS / 8][4], float (&rescale)[2], int key) {
        if (a.hides<16, KEYS>(query, key)) {
            hide(scores, query, key, first_keys);
        }
        const bool is_rescaled = __any_sync(WHOLE_WARP, softmax.weigh(scores, rescale, a.scale * LOG2_E));
        if (a.threshold != 0) {
            drop(scores, a, head, query, key);
        }
        return is_rescaled;
    }
};

// The work of a multiplying group, number `group` of them.
template <int QK, int V>
__device__ void attend(bf16 *out, float *lse, const bf16 *sinks, Shared<QK, V> shared, const Attention &a, const Head &head, int first_query,
                       int group) {
    constexpr int QUERIES = Sizes<QK, V>::QUERIES, KEYS = Sizes<QK, V>::KEYS;
    const Keys keys = Keys::of_block<QUERIES, KEYS>(a, head, first_query);
    const Turn<Sizes<QK, V>::GROUPS> turn = {group};
    const int query = first_query + 64 * group + row_of_warp();
    QueryRows<QK, V> rows = {a, head, query, {head.first_key(a, query + lane_row(0)), head.first_key(a, query + lane_row(2))}};
    if (sinks != nullptr) {
        rows.softmax.begin(load_number(shared.sink), a.scale, a.scale * LOG2_E);
    }
    float scores[KEYS / 8][4], rescale[2];
    Sixteen weights[KEYS / 16];
    const auto ask_for_own_scores = [&] { ask_for_scores(scores, shared.queries, 64 * group, shared.keys.rows()); };
    const auto ask_for_sums = [&] { ask_for_weighted(rows.sums, weights, shared.values.rows()); };
    const auto free_keys = [&] {
        free_stage(shared.keys.free_barrier());
        shared.keys.advance();
    };
    wait_for_phase(shared.queries_barrier, 0);
    shared.keys.wait_until_full();
    turn.wait(true);
    ask_for_own_scores();
    turn.pass_on(keys.tiles == 1);
    wgmma_wait<0>();
    pin(scores);
    free_keys();
    rows.weigh(scores, rescale, keys.first + (keys.tiles - 1) * KEYS);
    round_weights(weights, scores);
    for (int tile = keys.tiles - 2; tile >= 0; tile--) {
        shared.keys.wait_until_full();
        shared.values.wait_until_full();
        turn.wait(false);
        ask_for_own_scores();
        ask_for_sums();
        turn.pass_on(tile == 0);
        wgmma_wait<1>();
        pin(scores);
        free_keys();
        const bool is_rescaled = rows.weigh(scores, rescale, keys.first + tile * KEYS);
        wgmma_wait<0>();
        pin(rows.sums);
        pin(weights);
        free_stage(shared.values.free_barrier());
        shared.values.advance();
        if (is_rescaled) {
            rescale_rows(rows.sums, rescale);
        }
        round_weights(weights, scores);
    }
    shared.values.wait_until_full();
    ask_for_sums();
    wgmma_wait<0>();
    pin(rows.sums);
    store_forward(out, lse, rows.sums, rows.softmax, query, a, head, a.own_v_dim);
}

// Blocks along x are sequences, along y heads; along z queries, the last first, since they see the most keys.
template <int QK, int V>
__device__ void flash_forward(bf16 *out, float *lse, const bf16 *sinks, const bf16 *q, const bf16 *k, const bf16 *v, const Attention &a) {
    typedef Sizes<QK, V> Size;
    extern __shared__ __align__(1024) Chunk chunks[];
    const Shared<QK, V> shared(shared_address(chunks));
    if (threadIdx.x == 0) {
        shared.init_barriers();
        if (sinks != nullptr) {
            store_number(shared.sink, widen(sinks[blockIdx.y]));
        }
    }
    __syncthreads();
    const Head head = Head::of_block(a);
    const int first = int(gridDim.z - 1 - blockIdx.z) * Size::QUERIES, group = same_in_warp(int(threadIdx.x) / GROUP);
    if (group == 0) {
        shrink_registers<Size::COPYING>();
        copy_tiles(shared, q, k, v, a, head, first);
    } else {
        grow_registers<Size::MULTIPLYING>();
        attend(out, lse, sinks, shared, a, head, first, group - 1);
    }
}

#endif

#define OF_ONE_WIDTH(QK, V)                                                                                    \
    extern "C" __global__ void __launch_bounds__(Sizes<QK, V>::THREADS, 1) flash_forward_sm90_##QK##_bf16(     \
        bf16 *out, float *lse, const bf16 *sinks, const bf16 *q, const bf16 *k, const bf16 *v, ATTENTION) {    \
        flash_forward<QK, V>(out, lse, sinks, q, k, v, OF_ATTENTION);                                          \
    }                                                                                                          \
    EXPORT(flash_forward_sm90_##QK##_bf16)

OF_ONE_WIDTH(64, 64);
OF_ONE_WIDTH(128, 128);
OF_ONE_WIDTH(192, 128);
OF_ONE_WIDTH(256, 256);
