// Products of experts in bf16 on Hopper: as in `grouped_matmul.cu`, by the products of groups of threads. One group copies factors to a
// ring of stages, two multiply them, a half of the rows each. A block computes a few tiles side by side, so that copies for the next
// one are on their way while one is stored.
#include "grouped.cuh"
#include "pack.cuh"
#ifndef EMULATION
#include "hopper.cuh"
#endif

// The launch code repeats these numbers.
constexpr int COLUMNS = 256, DEPTH = 64, STAGES = 4, THREADS = 3 * 128;

// What a block computes: tiles side by side of the product of two factors.
template <typename O, bool A_BY_DEPTH, bool B_BY_DEPTH> struct Tiles {
    Output<O> out;
    Factor<bf16, A_BY_DEPTH> a;
    Factor<bf16, B_BY_DEPTH> b;
    int count;

    __device__ bool is_left() const { return count > 0 && out.columns > 0; }
    __device__ void go_on() {
        count--;
        out.first += COLUMNS;
        out.columns -= COLUMNS;
        b.first += B_BY_DEPTH ? COLUMNS : size_t(COLUMNS) * b.stride;
        b.count -= COLUMNS;
    }
};

#ifdef EMULATION

// The emulation has no products of groups: threads take elements in turn.
template <typename O, bool A_BY_DEPTH, bool B_BY_DEPTH> void multiply(Tiles<O, A_BY_DEPTH, B_BY_DEPTH> tiles) {
    const auto at = [](const auto &factor, int row, int place) {
        return widen(factor.table ? factor.template at<true>(row, place) : factor.template at<false>(row, place));
    };
    for (; tiles.is_left(); tiles.go_on()) {
        const Output<O> &out = tiles.out;
        const int rows = out.rows < ROWS ? out.rows : ROWS, columns = out.columns < COLUMNS ? out.columns : COLUMNS;
        for (int element = int(threadIdx.x); element < rows * columns; element += THREADS) {
            const int row = element / columns, column = element % columns;
            float sum = 0.0f;
            for (int place = 0; place < tiles.a.depth; place++) {
                sum += at(tiles.a, row, place) * at(tiles.b, column, place);
            }
            O *to = out.row(row) + column;
            *to = narrow<O>(out.accumulate ? widen(*to) + sum : sum);
        }
    }
}

#else

// LONG rows of a factor at DEPTH places, in panels of shared memory.
template <int LONG, bool BY_DEPTH> struct Panels {
    static constexpr int CHUNKS = LONG * DEPTH / 8, PANEL_BYTES = DEPTH * LINE_BYTES;
    // Lines that the group's threads copy at a time, a chunk each.
    static constexpr int STEP = GROUP / LINE_CHUNKS;

    Chunk *chunks;

    // Zeros where the factor has no more rows or places: rows of the next expert must not be multiplied, not even by zeros.
    template <bool IS_LISTED, bool IN_CHUNKS> __device__ void copy_lines(const Factor<bf16, BY_DEPTH> &factor, int place) const {
        constexpr int COUNT = LONG / STEP;
        const int thread = int(threadIdx.x) % GROUP, line = thread / LINE_CHUNKS, chunk = thread % LINE_CHUNKS;
        const int to = line * LINE_CHUNKS + swizzled(line, chunk);
        const HeadRows<const bf16> lines = factor.lines(place);
        const int count = factor.line_count(place), first = BY_DEPTH ? place : 0;
#pragma unroll (IN_CHUNKS ? 8 : 1)
        for (int i = 0; i < COUNT; i++) {
            // Panels by depth lie one after the other, with DEPTH lines each.
            const int own = BY_DEPTH ? line + i * STEP % DEPTH : line + i * STEP;
            const int element = chunk * 8 + (BY_DEPTH ? i * STEP / DEPTH * LINE_ELEMENTS : 0);
            const int given = own < count ? lines.width - element : 0;
            const unsigned number = given > 0 ? first + own : 0;
            const unsigned listed = IS_LISTED && given > 0 ? factor.table[factor.entry + number] : number;
            const bf16 *from = lines.row(listed) + (given > 0 ? element : 0);
            const int index = to + i * STEP * LINE_CHUNKS;
            if constexpr (IN_CHUNKS) {
                copy_async(chunks, index, reinterpret_cast<const Chunk *>(from), given > 0);
            } else {
                chunks[index] = partial_chunk(from, given);
            }
        }
    }
    __device__ void copy(const Factor<bf16, BY_DEPTH> &factor, int place) const {
        knowing(factor.table != nullptr, [&](auto is_listed) {
            knowing(factor.in_chunks(), [&](auto in_chunks) {
                copy_lines<decltype(is_listed)::value, decltype(in_chunks)::value>(factor, place);
            });
        });
    }
    // The rows from `row` on, a multiple of 64, at places from `place` on.
    __device__ uint64_t described_from(int row, int place) const {
        const int offset = BY_DEPTH ? row / LINE_ELEMENTS * PANEL_BYTES + place * LINE_BYTES
                                    : row * LINE_BYTES + place * int(sizeof(bf16));
        return described(shared_address(chunks) + offset, PANEL_BYTES);
    }
};

// The ring of stages. The copying group fills a stage when the multiplying ones have freed it. Both go round in the same order.
template <bool A_BY_DEPTH, bool B_BY_DEPTH> struct Ring {
    typedef Panels<ROWS, A_BY_DEPTH> Left;
    typedef Panels<COLUMNS, B_BY_DEPTH> Right;
    static constexpr int STAGE_CHUNKS = Left::CHUNKS + Right::CHUNKS;

    // The stages, and behind them their barriers.
    Chunk *chunks;
    int stage;
    // Changes with every round.
    uint32_t parity;

    __device__ Left left() const { return {chunks + stage * STAGE_CHUNKS}; }
    __device__ Right right() const { return {chunks + stage * STAGE_CHUNKS + Left::CHUNKS}; }
    __device__ uint32_t full() const { return shared_address(chunks + STAGES * STAGE_CHUNKS) + 8 * stage; }
    __device__ uint32_t free() const { return full() + 8 * STAGES; }
    __device__ void go_on() {
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        parity ^= stage == 0;
    }
    // One thread does this.
    __device__ void init_barriers() const {
        for (Ring ring = *this; ring.stage < STAGES; ring.stage++) {
            init_barrier(ring.full(), GROUP);
            init_barrier(ring.free(), 2 * GROUP / WARP);
        }
        publish_barriers();
    }
};

// The copying group's work.
template <typename O, bool A_BY_DEPTH, bool B_BY_DEPTH>
__device__ void copy_tiles(Tiles<O, A_BY_DEPTH, B_BY_DEPTH> tiles, Ring<A_BY_DEPTH, B_BY_DEPTH> ring) {
    for (; tiles.is_left(); tiles.go_on()) {
        for (int place = 0; place < tiles.a.depth; place += DEPTH, ring.go_on()) {
            wait_for_phase(ring.free(), ring.parity ^ 1);
            ring.left().copy(tiles.a, place);
            ring.right().copy(tiles.b, place);
            if (tiles.a.in_chunks() && tiles.b.in_chunks()) {
                arrive_with_copies(ring.full());
            } else {
                // A barrier of copies knows nothing of stores.
                wait_for_copies();
                arrive(ring.full());
            }
        }
    }
}

// Says that this warp's products no longer read a stage; 0: there is none.
__device__ inline void free_stage(uint32_t barrier) {
    if (barrier != 0 && threadIdx.x % WARP == 0) {
        arrive(barrier);
    }
}

// What two lanes, whose numbers differ in one bit, have of two parts: each keeps one part, in which its own elements and the other
// lane's lie side by side.
template <int COUNT>
__device__ void exchange(float (&kept)[2 * COUNT], const float *first, const float *second, int bit) {
    const bool keeps_second = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float own = keeps_second ? second[i] : first[i];
        const float other = __shfl_xor_sync(WHOLE_WARP, keeps_second ? first[i] : second[i], bit);
        kept[i] = keeps_second ? other : own;
        kept[COUNT + i] = keeps_second ? own : other;
    }
}

// Sums that lie side by side in a row of the output, as many as are 16 bytes: a lane's of those that four lanes have of a row in
// EIGHTS eights from `n` on.
template <typename O> struct Collected;

template <> struct Collected<float> {
    static constexpr int COUNT = 4, EIGHTS = 2;
    float values[COUNT];

    __device__ Collected(const GroupSums &sums, int n, int half) {
        exchange<2>(values, &sums[n][2 * half], &sums[n + 1][2 * half], 1);
    }
    static __device__ int column(int n, int lane) { return 8 * (n + lane % 2) + 4 * (lane % 4 / 2); }
};

template <> struct Collected<bf16> {
    static constexpr int COUNT = 8, EIGHTS = 4;
    float values[COUNT];

    __device__ Collected(const GroupSums &sums, int n, int half) {
        const Collected<float> first(sums, n, half), second(sums, n + 2, half);
        exchange<4>(values, first.values, second.values, 2);
    }
    static __device__ int column(int n, int lane) { return 8 * (n + lane % 4); }
};

// Elements of the output as memory has them.
template <typename O> struct Stored {
    alignas(sizeof(Chunk)) O at[Collected<O>::COUNT];

    __device__ void load(const O *from) { *reinterpret_cast<Chunk *>(at) = *reinterpret_cast<const Chunk *>(from); }
    __device__ void store(O *to) const { *reinterpret_cast<Chunk *>(to) = *reinterpret_cast<const Chunk *>(at); }
};

// Stores a warp's sums of sixteen rows from `row` on. What they are added to is asked for a batch at a time.
template <typename O> __device__ void store(const Output<O> &out, const GroupSums &sums, int row) {
    typedef Collected<O> Values;
    constexpr int BATCH = 8, OF_BATCH = BATCH * Values::EIGHTS;
    const bool in_chunks = out.stride % Values::COUNT == 0 && reinterpret_cast<uintptr_t>(out.first) % sizeof(Chunk) == 0;
    int lane = threadIdx.x % WARP;
    // Else the compiler computes all addresses before the loop over tiles, and registers do not suffice.
    asm volatile("" : "+r"(lane));
#pragma unroll
    for (int part = 0; part < 2 * 32 / OF_BATCH; part++) {
        const int half = part * OF_BATCH / 32, first = part * OF_BATCH % 32, own = row + lane / 4 + 8 * half;
        const int columns = own < out.rows ? out.columns : 0;
        O *to = out.row(own);
        Stored<O> stored[BATCH] = {};
        if (in_chunks && out.accumulate) {
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                const int column = Values::column(first + b * Values::EIGHTS, lane);
                if (column < columns) {
                    stored[b].load(to + column);
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int n = first + b * Values::EIGHTS, column = Values::column(n, lane);
            const Values of(sums, n, half);
            const auto sum = [&](int i, O before) {
                return narrow<O>(out.accumulate ? widen(before) + of.values[i] : of.values[i]);
            };
            if (!in_chunks) {
#pragma unroll
                for (int i = 0; i < Values::COUNT; i++) {
                    if (column + i < columns) {
                        to[column + i] = sum(i, to[column + i]);
                    }
                }
            } else if (column < columns) {
#pragma unroll
                for (int i = 0; i < Values::COUNT; i++) {
                    stored[b].at[i] = sum(i, stored[b].at[i]);
                }
                stored[b].store(to + column);
            }
        }
    }
}

// The work of a multiplying group, which has 64 rows from `row` on.
template <typename O, bool A_BY_DEPTH, bool B_BY_DEPTH>
__device__ void multiply_tiles(Tiles<O, A_BY_DEPTH, B_BY_DEPTH> tiles, Ring<A_BY_DEPTH, B_BY_DEPTH> ring, int row) {
    GroupSums sums;
    for (; tiles.is_left(); tiles.go_on()) {
#pragma unroll
        for (int n = 0; n < 32; n++) {
            sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
        }
        // The stage before this one, while products read it.
        uint32_t read = 0;
        for (int place = 0; place < tiles.a.depth; place += DEPTH, ring.go_on()) {
            wait_for_phase(ring.full(), ring.parity);
            show_to_products();
            pin(sums);
            product_fence();
#pragma unroll
            for (int k = 0; k < DEPTH; k += 16) {
                product_64x256x16<A_BY_DEPTH, B_BY_DEPTH>(sums, ring.left().described_from(row, k),
                                                          ring.right().described_from(0, k));
            }
            product_commit();
            product_wait<1>();
            pin(sums);
            free_stage(read);
            read = ring.free();
        }
        product_wait<0>();
        pin(sums);
        free_stage(read);
        store(tiles.out, sums, row + int(threadIdx.x) % GROUP / WARP * 16);
    }
}

// Computes tiles by all groups of the block.
template <typename O, bool A_BY_DEPTH, bool B_BY_DEPTH>
__device__ void multiply(const Tiles<O, A_BY_DEPTH, B_BY_DEPTH> &tiles) {
    extern __shared__ __align__(1024) Chunk stages[];
    Ring<A_BY_DEPTH, B_BY_DEPTH> ring = {stages, 0, 0};
    if (threadIdx.x == 0) {
        ring.init_barriers();
    }
    __syncthreads();
    // Threads are launched with 168 registers each.
    if (threadIdx.x < GROUP) {
        shrink_registers<40>();
        copy_tiles(tiles, ring);
    } else {
        grow_registers<232>();
        multiply_tiles(tiles, ring, threadIdx.x < 2 * GROUP ? 0 : ROWS / 2);
    }
}

#endif

// `out [r, n] = x [r, m] weights_i^T`, as in `grouped_matmul.cu`. Blocks along x: neighbours have the same rows, or those of the same
// expert, so that a cache reads rows and weights once.
template <bool BY_COLUMNS>
__device__ void grouped_matmul(bf16 *out, ExpertRows<bf16> x, const bf16 *weights, const int *offsets, int experts, size_t m,
                               size_t n, int tiles) {
    const unsigned width = tiles * COLUMNS, side_by_side = unsigned((n + width - 1) / width);
    const Rows rows = rows_of_tile(offsets, experts, int(blockIdx.x / side_by_side));
    if (rows.count <= 0) {
        return;
    }
    const size_t column = size_t(blockIdx.x % side_by_side) * width;
    const bf16 *own = weights + size_t(rows.expert) * m * n + (BY_COLUMNS ? column : column * m);
    const Output<bf16> part = {out + size_t(rows.first) * n + column, n, rows.count, int(n - column), 0};
    const Factor<bf16, BY_COLUMNS> b = {own, unsigned(BY_COLUMNS ? n : m), part.columns, int(m), nullptr, 0};
    multiply<bf16, false, BY_COLUMNS>({part, x.factor<false>(size_t(rows.first), m, 0, rows.count, int(m)), b, tiles});
}

// The expert that has this place in a launch. First come those with more than twice the mean of rows: if the longest sums were begun
// last, others would have ended before. Whole warps call it.
__device__ inline int expert_at(const int *offsets, int experts, int place) {
    const int lane = threadIdx.x % WARP, many = unsigned(offsets[experts]) / unsigned(experts) * 2;
    for (int start = 0; start < 2 * experts; start += WARP) {
        // Each expert has two turns, and counts in one.
        const int turn = start + lane, expert = turn < experts ? turn : turn - experts;
        const int rows = expert < experts ? offsets[expert + 1] - offsets[expert] : 0;
        const unsigned counted = __ballot_sync(WHOLE_WARP, expert < experts && (rows > many) == (turn < experts));
        const int before = __popc(counted & ((1u << lane) - 1));
        const unsigned found = __ballot_sync(WHOLE_WARP, (counted >> lane & 1) && before == place);
        if (found != 0) {
            return __shfl_sync(WHOLE_WARP, expert, __ffs(found) - 1);
        }
        place -= __popc(counted);
    }
    return 0;
}

// `out_i [n, m] = [out_i +] dy^T x`, as in `grouped_matmul.cu`. Blocks along x for columns, along y for rows, along z for experts.
template <typename G>
__device__ void grouped_gradient(G *out, ExpertRows<bf16> dy, ExpertRows<bf16> x, const int *offsets, size_t n, size_t m,
                                 int accumulate, int tiles) {
    const int expert = expert_at(offsets, int(gridDim.z), int(blockIdx.z));
    const size_t first = offsets[expert], row = size_t(blockIdx.y) * ROWS;
    const size_t column = size_t(blockIdx.x) * tiles * COLUMNS;
    const int depth = offsets[expert + 1] - int(first);
    if (depth <= 0 && accumulate) {
        return;
    }
    G *own = out + (size_t(expert) * n + row) * m + column;
    const Output<G> part = {own, m, int(n - row), int(m - column), accumulate};
    multiply<G, true, true>({part, dy.factor<true>(first, n, row, part.rows, depth),
                             x.factor<true>(first, m, column, part.columns, depth), tiles});
}

#define PRODUCT(name, by_columns)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                   \
        name(bf16 *out, const bf16 *x, const int *row_token, const bf16 *weights, const int *offsets,          \
             int experts, size_t m, size_t n, int tiles) {                                                     \
        grouped_matmul<by_columns>(out, {x, row_token}, weights, offsets, experts, m, n, tiles);               \
    }                                                                                                          \
    EXPORT(name)

PRODUCT(grouped_matmul_sm90_bf16, false);
PRODUCT(grouped_matmul_by_columns_sm90_bf16, true);

#define GRADIENT(G, name)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                   \
        name(G *out, const bf16 *dy, const int *dy_token, const bf16 *x, const int *x_token,                   \
             const int *offsets, size_t n, size_t m, int accumulate, int tiles) {                              \
        grouped_gradient<G>(out, {dy, dy_token}, {x, x_token}, offsets, n, m, accumulate, tiles);              \
    }                                                                                                          \
    EXPORT(name)

GRADIENT(float, grouped_gradient_sm90_f32_bf16);
GRADIENT(bf16, grouped_gradient_sm90_bf16_bf16);
