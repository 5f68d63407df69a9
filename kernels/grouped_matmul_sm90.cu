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
    __device__ void advance() {
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
    for (; tiles.is_left(); tiles.advance()) {
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
    static constexpr int BYTES = LONG * DEPTH * sizeof(bf16), PANEL_BYTES = DEPTH * LINE_BYTES;

    uint32_t address;

    // The rows from `row` on, a multiple of 64, at places from `place` on.
    __device__ uint64_t descriptor_from(int row, int place) const {
        const int offset = BY_DEPTH ? row / LINE_ELEMENTS * PANEL_BYTES + place * LINE_BYTES
                                    : row * LINE_BYTES + place * int(sizeof(bf16));
        return descriptor(address + offset, PANEL_BYTES);
    }
};

// What a thread of the copying group copies of a factor to each stage: a chunk of some lines, in all panels. What does not exist
// becomes zeros. So rows of the next expert are not multiplied, not even by zeros: they might be NaN.
template <int LONG, bool BY_DEPTH> struct Copies {
    typedef Panels<LONG, BY_DEPTH> To;
    // Lines that the group copies at a time, and how many a thread copies; panels, which are side by side where lines are places.
    static constexpr int STEP = GROUP / LINE_CHUNKS, COUNT = (BY_DEPTH ? DEPTH : LONG) / STEP;
    static constexpr int PANELS = BY_DEPTH ? LONG / LINE_ELEMENTS : 1;
    static constexpr unsigned NONE = ~0u;

    Factor<bf16, BY_DEPTH> factor;
    // Numbers of this thread's lines in memory.
    unsigned lines[COUNT];

    static __device__ int line() { return int(threadIdx.x) % GROUP / LINE_CHUNKS; }
    static __device__ int chunk() { return int(threadIdx.x) % LINE_CHUNKS; }

    __device__ unsigned find_line(int i, int place) const {
        const int own = line() + i * STEP, number = (BY_DEPTH ? place : 0) + own;
        if (own >= factor.line_count(place)) {
            return NONE;
        }
        return factor.table != nullptr ? factor.table[factor.entry + number] : number;
    }
    // Finds the lines of a stage that begins at a place. Rows are the same at every place.
    __device__ void find_lines(int place) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            lines[i] = find_line(i, place);
        }
    }
    // This thread's chunk of a line in the first panel.
    __device__ const bf16 *chunk_of(unsigned line, int place, unsigned stride_bytes) const {
        const char *first = reinterpret_cast<const char *>(factor.first + (BY_DEPTH ? 0 : place) + 8 * chunk());
        return reinterpret_cast<const bf16 *>(first + size_t(line) * stride_bytes);
    }
    // The elements that there are from this thread's chunk of a panel on.
    __device__ int given(int panel, int place) const {
        return (BY_DEPTH ? factor.count : factor.depth - place) - panel * LINE_ELEMENTS - 8 * chunk();
    }
    static __device__ uint32_t target(To to, int i, int panel) {
        return to.address + panel_offset(line(), chunk()) + i * STEP * LINE_BYTES + panel * To::PANEL_BYTES;
    }
    // Copies lines that have been found.
    __device__ void copy(To to, int place) const {
        unsigned stride_bytes = factor.stride * sizeof(bf16);
        // Else the compiler keeps the addresses of all rows from stage to stage, and registers do not suffice.
        asm volatile("" : "+r"(stride_bytes));
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const bool exists = lines[i] != NONE;
            const bf16 *from = chunk_of(exists ? lines[i] : 0, place, stride_bytes);
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                copy_chunk(target(to, i, panel), from + panel * LINE_ELEMENTS, exists && given(panel, place) > 0);
            }
        }
    }
    // The same where lines are no whole chunks.
    __device__ void store(To to, int place) const {
#pragma unroll 1
        for (int i = 0; i < COUNT; i++) {
            const unsigned found = find_line(i, place);
            const bf16 *from = chunk_of(found != NONE ? found : 0, place, factor.stride * sizeof(bf16));
#pragma unroll 1
            for (int panel = 0; panel < PANELS; panel++) {
                const int count = found != NONE ? given(panel, place) : 0;
                store_chunk(target(to, i, panel), partial_chunk(from + panel * LINE_ELEMENTS, count));
            }
        }
    }
};

// The stages of both factors. The copying group fills one when the multiplying ones have freed it.
template <bool A_BY_DEPTH, bool B_BY_DEPTH>
struct Stages : Ring<STAGES, Panels<ROWS, A_BY_DEPTH>::BYTES + Panels<COLUMNS, B_BY_DEPTH>::BYTES> {
    __device__ Panels<ROWS, A_BY_DEPTH> left() const { return {this->address()}; }
    __device__ Panels<COLUMNS, B_BY_DEPTH> right() const { return {this->address() + Panels<ROWS, A_BY_DEPTH>::BYTES}; }
};

// The copying group's work.
template <typename O, bool A_BY_DEPTH, bool B_BY_DEPTH>
__device__ void copy_tiles(Tiles<O, A_BY_DEPTH, B_BY_DEPTH> tiles, Stages<A_BY_DEPTH, B_BY_DEPTH> ring) {
    const bool in_chunks = tiles.a.in_chunks() && tiles.b.in_chunks();
    for (; tiles.is_left(); tiles.advance()) {
        Copies<ROWS, A_BY_DEPTH> a = {tiles.a};
        Copies<COLUMNS, B_BY_DEPTH> b = {tiles.b};
        a.find_lines(0);
        b.find_lines(0);
        for (int place = 0; place < tiles.a.depth; place += DEPTH, ring.advance()) {
            wait_for_phase(ring.free_barrier(), ring.parity ^ 1);
            if (in_chunks) {
                a.copy(ring.left(), place);
                b.copy(ring.right(), place);
                arrive_with_copies(ring.full_barrier());
            } else {
                a.store(ring.left(), place);
                b.store(ring.right(), place);
                fence_async_proxy();
                arrive(ring.full_barrier());
            }
            // The next stage's, while it is waited for.
            if (A_BY_DEPTH) {
                a.find_lines(place + DEPTH);
            }
            if (B_BY_DEPTH) {
                b.find_lines(place + DEPTH);
            }
        }
    }
    // No thread ends with a copy under way.
    wait_for_copies();
}

// A multiplying group's sums.
typedef float Sums[COLUMNS / 8][4];

// Two lanes, whose numbers differ in one bit, have COUNT elements of each of two parts. One keeps the first part whole, the other the
// second.
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

// Sums of one row that lie side by side in the output and are 16 bytes there. Four lanes have a row's sums in pairs; they exchange those
// of EIGHTS eights of columns, from `n` on.
template <typename O> struct Collected;

template <> struct Collected<float> {
    static constexpr int COUNT = 4, EIGHTS = 2;
    float values[COUNT];

    __device__ Collected(const Sums &sums, int n, int half) {
        exchange<2>(values, &sums[n][2 * half], &sums[n + 1][2 * half], 1);
    }
    static __device__ int column(int n, int lane) { return 8 * (n + lane % 2) + 4 * (lane % 4 / 2); }
};

template <> struct Collected<bf16> {
    static constexpr int COUNT = 8, EIGHTS = 4;
    float values[COUNT];

    __device__ Collected(const Sums &sums, int n, int half) {
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
template <typename O> __device__ void store(const Output<O> &out, const Sums &sums, int row) {
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
                        to[column + i] = sum(i, out.accumulate ? to[column + i] : narrow<O>(0.0f));
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
__device__ void multiply_tiles(Tiles<O, A_BY_DEPTH, B_BY_DEPTH> tiles, Stages<A_BY_DEPTH, B_BY_DEPTH> ring, int row) {
    Sums sums;
    for (; tiles.is_left(); tiles.advance()) {
#pragma unroll
        for (int n = 0; n < 32; n++) {
            sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
        }
        // The barrier of the stage before this one, which products still read.
        uint32_t read = 0;
        for (int place = 0; place < tiles.a.depth; place += DEPTH, ring.advance()) {
            wait_for_phase(ring.full_barrier(), ring.parity);
            fence_async_proxy();
            pin(sums);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < DEPTH; k += 16) {
                wgmma<A_BY_DEPTH, B_BY_DEPTH>(sums, ring.left().descriptor_from(row, k), ring.right().descriptor_from(0, k));
            }
            wgmma_commit();
            wgmma_wait<1>();
            pin(sums);
            if (place > 0) {
                free_stage(read);
            }
            read = ring.free_barrier();
        }
        wgmma_wait<0>();
        pin(sums);
        if (tiles.a.depth > 0) {
            free_stage(read);
        }
        store(tiles.out, sums, row + int(threadIdx.x) % GROUP / WARP * 16);
    }
}

// Computes tiles by all groups of the block.
template <typename O, bool A_BY_DEPTH, bool B_BY_DEPTH>
__device__ void multiply(const Tiles<O, A_BY_DEPTH, B_BY_DEPTH> &tiles) {
    extern __shared__ __align__(1024) Chunk stages[];
    Stages<A_BY_DEPTH, B_BY_DEPTH> ring;
    ring.stages = shared_address(stages), ring.barriers = ring.stages + ring.BYTES;
    if (threadIdx.x == 0) {
        ring.init_barriers(GROUP, 2 * GROUP / WARP);
    }
    __syncthreads();
    // The same for all lanes, as the compiler has to know to keep descriptors in uniform registers.
    const int group = __shfl_sync(WHOLE_WARP, int(threadIdx.x) / GROUP, 0);
    // Threads are launched with 168 registers each.
    if (group == 0) {
        shrink_registers<104>();
        copy_tiles(tiles, ring);
    } else {
        grow_registers<200>();
        multiply_tiles(tiles, ring, (group - 1) * ROWS / 2);
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

// The expert that is number `place` of a launch. First come those with more than twice the mean of rows, whose sums take longest: a
// block that begins one of them last would run on alone. Whole warps call it.
__device__ inline int expert_at(const int *offsets, int experts, int place) {
    const int lane = threadIdx.x % WARP, twice_the_mean = unsigned(offsets[experts] - offsets[0]) / unsigned(experts) * 2;
    for (int start = 0; start < 2 * experts; start += WARP) {
        // The first turn of every expert is for those with many rows, the second for the others.
        const int turn = start + lane, expert = turn < experts ? turn : turn - experts;
        const int rows = expert < experts ? offsets[expert + 1] - offsets[expert] : 0;
        const unsigned counted = __ballot_sync(WHOLE_WARP, expert < experts && (rows > twice_the_mean) == (turn < experts));
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
