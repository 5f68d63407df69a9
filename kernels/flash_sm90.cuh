// What flash attention on Hopper knows in both passes: heads in panels of shared memory, and how a block of groups goes over them.
#pragma once

#include "flash_attention.cuh"
#ifndef EMULATION
#include "hopper.cuh"
#endif

#ifdef EMULATION

// The emulation has no products of groups: a thread takes whole rows.
struct PlainHead {
    const Attention &a;
    Head head;
    const bf16 *q, *k, *v;

    static float dot(const bf16 *x, const bf16 *y, size_t dim) {
        float sum = 0.0f;
        for (size_t i = 0; i < dim; i++) {
            sum += widen(x[i]) * widen(y[i]);
        }
        return sum;
    }
    const bf16 *query(int at) const { return head.of_queries(a, q, a.qk_dim).row(at); }
    const bf16 *key(int at) const { return head.of_keys(a, k, a.qk_dim).row(at); }
    const bf16 *value(int at) const { return head.of_keys(a, v, a.own_v_dim).row(at); }
    // Of a query and a key that it sees.
    float score(int query_at, int key_at) const { return dot(query(query_at), key(key_at), a.qk_dim) * a.scale; }
    bool is_kept(int query_at, int key_at) const {
        const uint64_t element = (head.statistics(a) + query_at) * a.seq + key_at;
        return a.threshold == 0 || a.is_kept(read_key(a.key), element);
    }
};

#else

// ROWS rows of a head padded to D, in panels of 64 columns.
template <int ROWS, int D> struct HeadPanels {
    static constexpr int PANEL_BYTES = ROWS * LINE_BYTES, BYTES = D / LINE_ELEMENTS * PANEL_BYTES;
    static_assert(PANEL_BYTES % 1024 == 0, "panels begin at multiples of 1,024 bytes");

    uint32_t address;

    // As a factor whose depth are columns: rows from `row` on, at sixteen columns from `column` on.
    __device__ uint64_t by_columns(int row, int column) const {
        const int panel = column / LINE_ELEMENTS, element = column % LINE_ELEMENTS;
        return from(panel * PANEL_BYTES + row * LINE_BYTES + element * int(sizeof(bf16)));
    }
    // As a factor whose depth are rows: all columns, at sixteen rows from `row` on.
    __device__ uint64_t by_rows(int row) const { return from(row * LINE_BYTES); }
    // The descriptor of what begins so many bytes behind: one addition to that of the first.
    __device__ uint64_t from(int offset) const { return descriptor(address, PANEL_BYTES) + (offset >> 4); }

    // The copying group copies `count` rows from row `first` on, and zeros where there are fewer or the head is narrower, and arrives at
    // a barrier when they are there.
    __device__ void fill(const HeadRows<const bf16> &rows, int first, int count, uint32_t full_barrier) const {
        constexpr int STEP = GROUP / LINE_CHUNKS;
        static_assert(ROWS % STEP == 0, "every thread has as many lines as the others");
        int thread = int(threadIdx.x) % GROUP;
        unsigned step = STEP * rows.stride;
        // Hides both from the compiler, which would otherwise keep addresses from tile to tile and spill.
        asm volatile("" : "+r"(thread), "+r"(step));
        const int line = thread / LINE_CHUNKS, chunk = thread % LINE_CHUNKS, column = 8 * chunk;
        const bf16 *from = rows.row(first + line) + column;
        uint32_t to = address + panel_offset(line, chunk);
        if (rows.in_chunks()) {
#pragma unroll 2
            for (int row = line; row < line + ROWS; row += STEP, from += step, to += STEP * LINE_BYTES) {
#pragma unroll
                for (int panel = 0; panel < D / LINE_ELEMENTS; panel++) {
                    const bool exists = row < count && panel * LINE_ELEMENTS + column < rows.width;
                    copy_chunk(to + panel * PANEL_BYTES, from + panel * LINE_ELEMENTS, exists);
                }
            }
            arrive_with_copies(full_barrier);
        } else {
#pragma unroll 1
            for (int row = line; row < line + ROWS; row += STEP, from += step, to += STEP * LINE_BYTES) {
#pragma unroll 1
                for (int i = 0; i < D / LINE_CHUNKS; i++) {
                    // One element at a time: a whole chunk would need registers that the copying group has given away.
                    const int panel = i / 8, element = panel * LINE_ELEMENTS + i % 8;
                    const bool exists = row < count && element + column < rows.width;
                    store_element(to + panel * PANEL_BYTES + i % 8 * sizeof(bf16), exists ? from[element] : narrow<bf16>(0.0f));
                }
            }
            fence_async_proxy();
            arrive(full_barrier);
        }
    }
};

// Stages of such rows.
template <int STAGES, int ROWS, int D> struct RowRing : Ring<STAGES, HeadPanels<ROWS, D>::BYTES> {
    __device__ HeadPanels<ROWS, D> rows() const { return {this->address()}; }
    // What the copying group waits for, and the multiplying ones.
    __device__ void wait_until_free() const { wait_for_phase(this->free_barrier(), this->parity ^ 1); }
    __device__ void wait_until_full() const {
        wait_for_phase(this->full_barrier(), this->parity);
        fence_async_proxy();
    }
};

// Asks for products [64, 8 N] = a [64 rows from `row`, D] b [8 N, D]^T of both factors.
template <int N, int A_ROWS, int D>
__device__ void ask_for_scores(float (&products)[N][4], HeadPanels<A_ROWS, D> a, int row, HeadPanels<8 * N, D> b) {
    pin(products);
    // Hides both from the compiler, which would otherwise keep the descriptors of all steps from tile to tile and spill.
    asm volatile("" : "+r"(a.address), "+r"(b.address));
    wgmma_fence();
#pragma unroll
    for (int column = 0; column < D; column += 16) {
        wgmma<false, false>(products, a.by_columns(row, column), b.by_columns(0, column), column > 0);
    }
    wgmma_commit();
}

// Asks for sums [64, D] += weights [64, 16 N] b [16 N, D].
template <int C, int N>
__device__ void ask_for_weighted(float (&sums)[C][4], Sixteen (&weights)[N], HeadPanels<16 * N, 8 * C> b) {
    pin(sums);
    pin(weights);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < N; n++) {
        wgmma<true>(sums, weights[n], b.by_rows(16 * n));
    }
    wgmma_commit();
}

// Rounds weights to bf16, as a left factor.
template <int N> __device__ void round_weights(Sixteen (&to)[N], const float (&weights)[2 * N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&eight)[4] = weights[2 * n + i / 2];
            to[n][i] = bf16_pair(eight[i % 2 * 2], eight[i % 2 * 2 + 1]);
        }
    }
}

// What all lanes have, so that the compiler knows it too: what follows from it needs no vector registers.
__device__ inline int same_in_warp(int x) { return __shfl_sync(WHOLE_WARP, x, 0); }

// The keys that a block goes over, tile by tile: from the first that any of its queries sees to its last query's.
struct Keys {
    int first, tiles;

    template <int QUERIES, int KEYS>
    __device__ static Keys of_block(const Attention &a, const Head &head, int first_query) {
        const int queries = rows_left(a, first_query, QUERIES);
        const unsigned first = unsigned(same_in_warp(head.first_key(a, first_query, queries))) / KEYS * KEYS;
        return {int(first), int((unsigned(first_query + queries) - first + KEYS - 1) / KEYS)};
    }
};

// The first of a warp's sixteen rows of its group's 64.
__device__ inline int row_of_warp() { return int(threadIdx.x) % GROUP / WARP * 16; }

#endif
