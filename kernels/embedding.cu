// Token embedding.
#include "pack.cuh"
#include "reduce.cuh"

// A block copies the row of one token.
template <typename T> __device__ void embedding(T *out, const T *table, const int *ids, size_t width) {
    const size_t token = blockIdx.x, id = ids[token];
    const T *row = table + id * width;
    for (size_t first = threadIdx.x * PACK; first < width; first += blockDim.x * PACK) {
        store(out + token * width, first, width, load(row, first, width));
    }
}

// The first token of an id adds up the rows of all tokens of that id, in their order, and writes the sum once: no
// atomics, no scratch, and one rounding. Blocks along y share the columns; a block's threads look for the tokens of
// its id together, so the search costs tokens^2 / 256 reads of a cached id in the worst case. Rows of an id that often
// repeats, such as padding, are loaded ahead. ROWS_AHEAD keeps registers low enough for four blocks a multiprocessor, since
// most blocks only search.
constexpr int SEARCHERS = 256;
template <typename T> constexpr int ROWS_AHEAD = 16 / sizeof(T);

__device__ inline bool has_earlier(const int *ids, size_t token, int id) {
    for (size_t start = 0; start < token; start += SEARCHERS) {
        const size_t other = start + threadIdx.x;
        if (__syncthreads_or(other < token && ids[other] == id)) {
            return true;
        }
    }
    return false;
}

template <typename G, typename T>
__device__ void embedding_backward(G *dtable, const T *dout, const int *ids, size_t tokens, size_t width,
                                   int accumulate) {
    SHARED(unsigned, matches, SEARCHERS / WARP);
    SHARED(int, places, SEARCHERS);
    const size_t token = blockIdx.x;
    const int id = ids[token];
    if (has_earlier(ids, token, id)) {
        return;
    }
    const size_t first = (size_t(blockIdx.y) * SEARCHERS + threadIdx.x) * PACK;
    Pack sum = {};
    for (size_t start = token; start < tokens; start += SEARCHERS) {
        const size_t other = start + threadIdx.x;
        const bool match = other < tokens && ids[other] == id;
        if (!__syncthreads_or(match)) {
            continue;
        }
        const unsigned of_warp = __ballot_sync(WHOLE_WARP, match);
        const int own_warp = threadIdx.x / WARP;
        if (threadIdx.x % WARP == 0) {
            matches[own_warp] = of_warp;
        }
        __syncthreads();
        // Where in the list of matches this warp's begin, and how many there are.
        int place = 0, count = 0;
        for (int warp = 0; warp < SEARCHERS / WARP; warp++) {
            place = warp == own_warp ? count : place;
            count += __popc(matches[warp]);
        }
        if (match) {
            places[place + __popc(of_warp & ((1u << threadIdx.x % WARP) - 1))] = threadIdx.x;
        }
        __syncthreads();
        knowing(are_wide(width, dout) && first < width, [&](auto wide) {
            constexpr bool WIDE = decltype(wide)();
            for (int next = 0; next < count; next += ROWS_AHEAD<T>) {
                Held<T> rows[ROWS_AHEAD<T>];
#pragma unroll
                for (int row = 0; row < ROWS_AHEAD<T>; row++) {
                    // Beyond the last, zeros: added to a sum, they change no bit.
                    const bool exists = next + row < count;
                    const T *of = dout + (start + (exists ? places[next + row] : 0)) * width;
                    rows[row] = hold_if<WIDE>(exists, of, first, width);
                }
#pragma unroll
                for (int row = 0; row < ROWS_AHEAD<T>; row++) {
                    add(sum, widen(rows[row]));
                }
            }
        });
    }
    if (first < width) {
        store_or_add(dtable + size_t(id) * width, first, width, sum, accumulate);
    }
}

#define FORWARD(T, name)                                                                                       \
    extern "C" __global__ void embedding_##name(T *out, const T *table, const int *ids, size_t width) {        \
        embedding(out, table, ids, width);                                                                     \
    }                                                                                                          \
    EXPORT(embedding_##name)

FORWARD(float, f32);
FORWARD(bf16, bf16);

#define BACKWARD(G, T, name)                                                                                   \
    extern "C" __global__ void __launch_bounds__(SEARCHERS)                                                    \
        embedding_backward_##name(G *dtable, const T *dout, const int *ids, size_t tokens, size_t width,       \
                                  int accumulate) {                                                            \
        embedding_backward(dtable, dout, ids, tokens, width, accumulate);                                      \
    }                                                                                                          \
    EXPORT(embedding_backward_##name)

BACKWARD(float, float, f32_f32);
BACKWARD(float, bf16, f32_bf16);
BACKWARD(bf16, float, bf16_f32);
BACKWARD(bf16, bf16, bf16_bf16);
