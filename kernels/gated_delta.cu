// The gated delta rule (Yang et al. 2025), a chunk of tokens at a time.
#include "logarithm.cuh"
#include "product.cuh"
#include "sigmoid.cuh"

// Tokens of a chunk, queries of it in shared memory at a time, value columns of a block, and warps of a block.
constexpr int CHUNK = 64;
constexpr int QUERIES = 32;
constexpr int VALUE_TILE = 32;
constexpr int DELTA_WARPS = 8;
constexpr int KEY_DIM_MAX = 128;

// Distances between rows in shared memory, at which most factors of products are read without conflicts.
constexpr int KEY_STRIDE = KEY_DIM_MAX + 4;
constexpr int SCORE_STRIDE = CHUNK + 4;
constexpr int TILE_STRIDE = VALUE_TILE + 8;

// A layer of the gated delta rule. Of a row of `mixed`, `width` elements, queries of all heads come first, then keys, then values.
template <typename T> struct Delta {
    const T *mixed;
    const T *b, *a;
    size_t b_stride, a_stride;
    const float *a_log, *dt_bias;
    const int *documents;
    size_t seq;
    int key_heads, value_heads, key_dim, value_dim;

    __device__ size_t width() const { return size_t(2 * key_heads) * key_dim + size_t(value_heads) * value_dim; }
    __device__ size_t chunks() const { return (seq + CHUNK - 1) / CHUNK; }
    __device__ int key_head(int head) const { return head / (value_heads / key_heads); }
    __device__ const T *query(size_t token, int head) const { return mixed + token * width() + size_t(key_head(head)) * key_dim; }
    __device__ const T *key(size_t token, int head) const { return query(token, head) + size_t(key_heads) * key_dim; }
    __device__ const T *value(size_t token, int head) const {
        return mixed + token * width() + size_t(2 * key_heads) * key_dim + size_t(head) * value_dim;
    }
    __device__ float gate(size_t token, int head) const { return widen(a[token * a_stride + head]) + dt_bias[head]; }
    // The logarithm of a decay.
    __device__ float decay(float gate, int head) const { return -expf(a_log[head]) * (fmaxf(gate, 0.0f) + log_1_plus(expf(-fabsf(gate)))); }
};

// Neighbouring chunks, the same of every sequence, of which every `interval`-th has a state in memory.
struct Segment {
    size_t first, count, interval;

    __device__ bool has_state(size_t index) const { return (index - first) % interval == 0; }
    // The number of a chunk's state among those of all sequences.
    __device__ size_t state(size_t sequence, size_t index) const {
        return sequence * ((count + interval - 1) / interval) + (index - first) / interval;
    }
};

// A chunk of a sequence: its first token of all, and its number in the sequence.
struct DeltaChunk {
    size_t sequence, first, index;
    int tokens;

    template <typename T>
    __device__ DeltaChunk(const Delta<T> &of, size_t sequence, size_t index)
        : sequence(sequence), first(sequence * of.seq + index * CHUNK), index(index),
          tokens(of.seq - index * CHUNK < CHUNK ? int(of.seq - index * CHUNK) : CHUNK) {}
};

// The gates of a chunk for a value head, in shared memory: `beta`, what is left of the state in front at each token and of each token
// at the end, and each document's running sums of decays in f64, since they may be large and small differences of them count. Tokens
// behind the sequence are of a document of their own, and leave nothing.
struct Gates {
    SharedArray<float> beta, front, to_end;
    SharedArray<double> sums;
    SharedArray<int> documents;

    // The factor on token `from` at `token`; 0 if it is of another document.
    __device__ float decay(int token, int from) const {
        const int document = documents[token], other = documents[from];
        const double sum = sums[token], before = sums[from];
        return document == other ? expf(float(sum - before)) : 0.0f;
    }

    // All threads of the block take part, and may read when it is over.
    template <typename T> __device__ void find(const Delta<T> &of, const DeltaChunk &chunk, int head) const {
        const int token = threadIdx.x, first = int(chunk.first % of.seq);
        const size_t at = chunk.first + token;
        const bool exists = token < chunk.tokens;
        const int document = !exists ? -1 : of.documents == nullptr ? 0 : of.documents[at];
        if (token < CHUNK) {
            documents[token] = document;
            sums[token] = exists ? double(of.decay(of.gate(at, head), head)) : 0.0;
            beta[token] = exists ? widen(narrow<T>(sigmoid(widen(of.b[at * of.b_stride + head])))) : 0.0f;
        }
        __syncthreads();
        // From its document's first token in the chunk on.
        double sum = 0.0;
        for (int i = document > first ? document - first : 0; exists && i <= token; i++) {
            const double own = sums[i];
            sum += own;
        }
        __syncthreads();
        if (token < CHUNK) {
            sums[token] = sum;
            // Whether the token's document began before the chunk.
            front[token] = exists && document < first ? expf(float(sum)) : 0.0f;
        }
        __syncthreads();
        if (token < CHUNK) {
            to_end[token] = exists ? decay(chunk.tokens - 1, token) : 0.0f;
        }
        __syncthreads();
    }
};

// Those of a kernel.
__device__ inline Gates shared_gates() {
    SHARED(float, betas, CHUNK);
    SHARED(float, fronts, CHUNK);
    SHARED(float, to_ends, CHUNK);
    SHARED(double, sums, CHUNK);
    SHARED(int, of_documents, CHUNK);
    return {betas, fronts, to_ends, sums, of_documents};
}

// A warp writes a normed row of queries or keys, times `factor`, to shared memory, and zeros where there is none. Its scale.
template <typename T>
__device__ float load_normed(SharedArray<float> shared, int place, const T *x, int width, float factor) {
    float squares = 0.0f;
    for (int column = threadIdx.x % WARP; column < width; column += WARP) {
        squares += widen(x[column]) * widen(x[column]);
    }
    const float scale = factor / sqrtf(warp_reduce(squares, Sum()) + 1e-6f);
    for (int column = threadIdx.x % WARP; column < KEY_DIM_MAX; column += WARP) {
        shared[place + column] = column < width ? widen(x[column]) * scale : 0.0f;
    }
    return scale;
}

// What all kernels know of a chunk, first in shared memory: its keys, and a matrix with P, and above its diagonal A, later the inverse of
// 1 + A, transposed.
template <typename T> struct ChunkScores {
    const Delta<T> &of;
    SharedArray<float> shared;
    Gates gates;

    __device__ int key(int token) const { return token * KEY_STRIDE; }
    __device__ int score(int row, int column) const { return key(CHUNK) + row * SCORE_STRIDE + column; }
    __device__ int end() const { return score(CHUNK, 0); }
    // Columns of keys, and zeros up to whole steps of a product.
    __device__ int depth() const { return (of.key_dim + 15) / 16 * 16; }

    __device__ float load_key(const DeltaChunk &chunk, int head, int token) const {
        return load_normed(shared, key(token), of.key(chunk.first + token, head), token < chunk.tokens ? of.key_dim : 0, 1.0f);
    }
    __device__ float load_query(const DeltaChunk &chunk, int head, int token, int place) const {
        const int width = token < chunk.tokens ? of.key_dim : 0;
        return load_normed(shared, place, of.query(chunk.first + token, head), width, 1.0f / sqrtf(float(of.key_dim)));
    }
    __device__ auto keys() const {
        return [this](int token, int k) -> float { return shared[key(token) + k]; };
    }
    __device__ auto keys_transposed() const {
        return [this](int k, int token) -> float { return shared[key(token) + k]; };
    }
    // Rows of shared memory.
    __device__ auto rows(int first, int stride) const {
        return [=](int row, int column) -> float { return shared[first + row * stride + column]; };
    }
    __device__ float p(int token, int from) const { return from <= token ? float(shared[score(token, from)]) : 0.0f; }
    __device__ float inverse(int token, int from) const {
        return from < token ? float(shared[score(from, token)]) : from == token ? 1.0f : 0.0f;
    }

    // A, of 16 x 32 each warp, and its inverse. All threads of the block take part, and may read when it is over.
    __device__ void find_inverse() const {
        const int warp = threadIdx.x / WARP, row = warp / 2 * 16, column = warp % 2 * 32;
        float sums[1][4][4] = {};
        add_product(T(), Parts<1, 1>(), sums, row, column, 0, depth(), keys(), keys_transposed());
        for_sums(sums, row, column, [&](int token, int from, float sum) {
            if (from < token) {
                const float beta = gates.beta[token];
                shared[score(from, token)] = beta * sum * gates.decay(token, from);
            }
        });
        __syncthreads();
        invert_blocks();
        join<16>();
        join<32>();
    }
    // Of the blocks of 16 on the diagonal, a column a thread, from the diagonal down.
    __device__ void invert_blocks() const {
        const int column = threadIdx.x, left = column < CHUNK ? 16 - column % 16 : 0;
        float own[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            own[i] = i == 0 ? 1.0f : 0.0f;
#pragma unroll
            for (int k = 0; k < i; k++) {
                const float a = i < left ? float(shared[score(column + k, column + i)]) : 0.0f;
                own[i] -= a * own[k];
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 1; i < 16; i++) {
            if (i < left) {
                shared[score(column, column + i)] = own[i];
            }
        }
        __syncthreads();
    }
    // Of blocks whose halves are inverted: what is between these becomes -(1 + A'')^-1 A (1 + A')^-1.
    template <int HALF> __device__ void join() const {
        constexpr int ACROSS = HALF / 8, TILES = ACROSS * (HALF / 16);
        const int warp = threadIdx.x / WARP, first = warp / TILES * 2 * HALF, middle = first + HALF;
        const int row = middle + warp % TILES / ACROSS * 16, column = first + warp % ACROSS * 8;
        const bool takes_part = first < CHUNK;
        const auto between = [this](int token, int from) -> float { return shared[score(from, token)]; };
        const auto inverted = [this](int token, int from) { return inverse(token, from); };
        const auto store = [&](int token, int from, float sum) { shared[score(from, token)] = sum; };
        float sums[1][1][4] = {}, joined[1][1][4] = {};
        if (takes_part) {
            add_product(float(), Parts<1, 1>(), sums, row, column, first, middle, between, inverted);
        }
        __syncthreads();
        if (takes_part) {
            for_sums(sums, row, column, store);
        }
        __syncthreads();
        if (takes_part) {
            const auto negative = [this](int token, int from) { return -inverse(token, from); };
            add_product(float(), Parts<1, 1>(), joined, row, column, middle, middle + HALF, negative, between);
        }
        __syncthreads();
        if (takes_part) {
            for_sums(joined, row, column, store);
        }
        __syncthreads();
    }
    // P of a warp's 16 tokens, whose queries lie from `query` on, and of 8 N that they may see.
    template <int N> __device__ void find_p(int row, int column, int query) const {
        float sums[1][N][4] = {};
        add_product(T(), Parts<1, 1>(), sums, 0, column, 0, depth(), rows(query, KEY_STRIDE), keys_transposed());
        for_sums(sums, row, column, [&](int token, int from, float sum) {
            if (from <= token) {
                shared[score(token, from)] = sum * gates.decay(token, from);
            }
        });
    }
};

// A block with a tile of a value head's columns, which no others change. Behind keys and scores are the tile of the state, or of its
// gradient, a row of each token's columns, N or dR, and some queries. A warp has 16 tokens and 16 columns.
template <typename T> struct DeltaTile : ChunkScores<T> {
    using ChunkScores<T>::of;
    using ChunkScores<T>::shared;
    using ChunkScores<T>::gates;
    int head, column, columns, warp, own_token, own_column;

    __device__ DeltaTile(const Delta<T> &of, SharedArray<float> shared, const Gates &gates)
        : ChunkScores<T>{of, shared, gates}, head(blockIdx.x % of.value_heads), column(blockIdx.y * VALUE_TILE),
          columns(of.value_dim - column < VALUE_TILE ? of.value_dim - column : VALUE_TILE), warp(threadIdx.x / WARP),
          own_token(warp / 2 * 16), own_column(warp % 2 * 16) {}

    __device__ size_t sequence() const { return blockIdx.x / of.value_heads; }
    __device__ int state(int k) const { return this->end() + k * TILE_STRIDE; }
    __device__ int row(int token) const { return state(KEY_DIM_MAX) + token * TILE_STRIDE; }
    __device__ int query(int place) const { return row(CHUNK) + place * KEY_STRIDE; }
    __device__ auto states() const { return this->rows(state(0), TILE_STRIDE); }
    __device__ auto values() const { return this->rows(row(0), TILE_STRIDE); }

    // The tile of a state, or zeros.
    __device__ void load_state(const float *from) const {
        for (int i = threadIdx.x; i < KEY_DIM_MAX * VALUE_TILE; i += blockDim.x) {
            const int k = i / VALUE_TILE, own = i % VALUE_TILE;
            const bool is_there = from != nullptr && k < of.key_dim && own < columns;
            shared[state(k) + own] = is_there ? from[size_t(k) * of.value_dim + column + own] : 0.0f;
        }
    }
    // The head's state of a number among those of all heads; none where there are no states.
    template <typename F> __device__ F *state_of(F *states, size_t number) const {
        return states == nullptr ? nullptr : states + (number * of.value_heads + head) * of.key_dim * of.value_dim;
    }
    // Keys and gates. All threads of the block take part, and may read when it is over.
    __device__ void load(const DeltaChunk &chunk) const {
        __syncthreads();
        for (int token = warp; token < CHUNK; token += DELTA_WARPS) {
            this->load_key(chunk, head, token);
        }
        gates.find(of, chunk, head);
    }
    // Some queries, and P of them: 16 x 16 each warp. All threads of the block take part, and may read when it is over.
    __device__ void load_queries(const DeltaChunk &chunk, int first) const {
        __syncthreads();
        for (int i = warp; i < QUERIES; i += DELTA_WARPS) {
            this->load_query(chunk, head, first + i, query(i));
        }
        __syncthreads();
        const int own = warp / 4 * 16;
        this->template find_p<2>(first + own, warp % 4 * 16, query(own));
        __syncthreads();
    }
    __device__ void store_state(float *to) const {
        float *const own = to + column;
        for (int i = threadIdx.x; i < of.key_dim * VALUE_TILE; i += blockDim.x) {
            if (i % VALUE_TILE < columns) {
                own[size_t(i / VALUE_TILE) * of.value_dim + i % VALUE_TILE] = shared[state(i / VALUE_TILE) + i % VALUE_TILE];
            }
        }
    }
    // The state times `factor`, and the product of rows of `count` keys or queries, from `place` on, and of tokens' values.
    template <typename Values> __device__ void add_to_state(float factor, int place, int count, const Values &values) const {
        const auto transposed = [&](int k, int token) -> float { return shared[place + token * KEY_STRIDE + k]; };
        if (const int k = warp * 16; k < of.key_dim) {
            float sums[1][VALUE_TILE / 8][4] = {};
            add_product(T(), Parts<1, 1>(), sums, k, 0, 0, count, transposed, values);
            for_sums(sums, k, 0, [&](int k, int own, float sum) {
                const float before = shared[state(k) + own];
                shared[state(k) + own] = factor * before + sum;
            });
        }
    }
    __device__ float value(const DeltaChunk &chunk, int token, int own) const {
        return token < chunk.tokens && own < columns ? widen(of.value(chunk.first + token, head)[column + own]) : 0.0f;
    }
    __device__ size_t output(size_t token) const { return (token * of.value_heads + head) * of.value_dim + column; }
};

// `N` of a chunk with the state in front: (1 + A) N = R.
template <typename T> __device__ void solve(const DeltaTile<T> &tile, const DeltaChunk &chunk) {
    const SharedArray<float> shared = tile.shared;
    const int token = tile.own_token, column = tile.own_column;
    const auto store = [&](int token, int own, float sum) { shared[tile.row(token) + own] = sum; };
    float of_state[1][2][4] = {}, n[1][2][4] = {};
    add_product(T(), Parts<1, 2>(), of_state, token, column, 0, tile.depth(), tile.keys(), tile.states());
    for_sums(of_state, token, column, [&](int token, int own, float sum) {
        const float beta = tile.gates.beta[token], front = tile.gates.front[token];
        store(token, own, beta * (tile.value(chunk, token, own) - front * sum));
    });
    __syncthreads();
    const auto inverse = [&](int token, int from) { return tile.inverse(token, from); };
    add_product(T(), Parts<2, 2>(), n, token, column, 0, token + 16, inverse, tile.values());
    __syncthreads();
    for_sums(n, token, column, store);
    __syncthreads();
}

// O = e Q S + P N, some queries at a time: 16 tokens and 8 columns each warp.
template <typename T> __device__ void store_outputs(T *out, const DeltaTile<T> &tile, const DeltaChunk &chunk) {
    const auto p = [&](int token, int from) { return tile.p(token, from); };
    for (int first = 0; first < chunk.tokens; first += QUERIES) {
        tile.load_queries(chunk, first);
        const int own = tile.warp / 4 * 16, column = tile.warp % 4 * 8, token = first + own;
        float sums[1][1][4] = {};
        add_product(T(), Parts<1, 2>(), sums, own, column, 0, tile.depth(), tile.rows(tile.query(0), KEY_STRIDE), tile.states());
        for_sums(sums, token, column, [&](int token, int, float &sum) { sum *= tile.gates.front[token]; });
        add_product(T(), Parts<1, 1>(), sums, token, column, 0, token + 16, p, tile.values());
        for_sums(sums, token, column, [&](int token, int own, float sum) {
            if (token < chunk.tokens && own < tile.columns) {
                out[tile.output(chunk.first + token) + own] = narrow<T>(sum);
            }
        });
    }
}

// A block goes through a segment of a sequence, from `first_states`, `first_stride` of them a sequence, or from zeros.
template <typename T>
__device__ void gated_delta(T *out, float *states, const float *first_states, size_t first_stride, const Segment &segment,
                            const Delta<T> &of) {
    DYNAMIC_SHARED(float, shared);
    const Gates gates = shared_gates();
    const DeltaTile<T> tile(of, shared, gates);
    tile.load_state(tile.state_of(first_states, tile.sequence() * first_stride));
    for (size_t index = segment.first; index < segment.first + segment.count; index++) {
        const DeltaChunk chunk(of, tile.sequence(), index);
        tile.load(chunk);
        if (states != nullptr && segment.has_state(index)) {
            tile.store_state(tile.state_of(states, segment.state(tile.sequence(), index)));
        }
        tile.find_inverse();
        solve(tile, chunk);
        if (out != nullptr) {
            store_outputs(out, tile, chunk);
        }
        __syncthreads();
        const float all = gates.front[chunk.tokens - 1];
        tile.add_to_state(all, tile.key(0), CHUNK, [&](int token, int own) {
            const float kept = gates.to_end[token], value = shared[tile.row(token) + own];
            return kept * value;
        });
    }
}

// dR of a chunk in the rows: dN = P^T dO + r K dS, and (1 + A)^T dR = dN. On the way dS = e^(c_C) dS + (e Q)^T dO.
template <typename T> __device__ void solve_back(const T *dout, const DeltaTile<T> &tile, const DeltaChunk &chunk) {
    const SharedArray<float> shared = tile.shared;
    const int token = tile.own_token, column = tile.own_column;
    const auto gradient = [&](int token, int own) {
        return token < chunk.tokens && own < tile.columns ? widen(dout[tile.output(chunk.first + token) + own]) : 0.0f;
    };
    float dn[1][2][4] = {}, dr[1][2][4] = {};
    add_product(T(), Parts<1, 2>(), dn, token, column, 0, tile.depth(), tile.keys(), tile.states());
    for_sums(dn, token, column, [&](int token, int, float &sum) { sum *= tile.gates.to_end[token]; });
    for (int first = 0; first < CHUNK; first += QUERIES) {
        tile.load_queries(chunk, first);
        const float all = tile.gates.front[chunk.tokens - 1];
        tile.add_to_state(first == 0 ? all : 1.0f, tile.query(0), QUERIES, [&](int place, int own) {
            const float front = tile.gates.front[first + place];
            return front * gradient(first + place, own);
        });
    }
    const auto p = [&](int from, int token) { return tile.p(token, from); };
    const auto inverse = [&](int from, int token) { return tile.inverse(token, from); };
    const auto store = [&](int token, int own, float sum) { shared[tile.row(token) + own] = sum; };
    add_product(T(), Parts<1, 1>(), dn, token, column, token, CHUNK, p, gradient);
    for_sums(dn, token, column, store);
    __syncthreads();
    add_product(T(), Parts<2, 2>(), dr, token, column, token, CHUNK, inverse, tile.values());
    __syncthreads();
    for_sums(dr, token, column, store);
    __syncthreads();
}

// The same blocks, from a segment's last chunk to its first: the gradient of values, and for each chunk that of the state behind it,
// `dstates`. `between [sequences, value_heads, key_dim, value_dim]` has that of the state behind the segment, which is zero behind a
// sequence, and then that of the state in front.
template <typename T>
__device__ void gated_delta_states(T *dmixed, float *dstates, float *between, const T *dout, const Segment &segment, const Delta<T> &of) {
    DYNAMIC_SHARED(float, shared);
    const Gates gates = shared_gates();
    const DeltaTile<T> tile(of, shared, gates);
    float *const between_of_head = tile.state_of(between, tile.sequence());
    tile.load_state(segment.first + segment.count == of.chunks() ? nullptr : between_of_head);
    for (size_t behind = 0; behind < segment.count; behind++) {
        const DeltaChunk chunk(of, tile.sequence(), segment.first + segment.count - 1 - behind);
        tile.load(chunk);
        tile.store_state(tile.state_of(dstates, segment.state(tile.sequence(), chunk.index)));
        tile.find_inverse();
        solve_back(dout, tile, chunk);
        for (int i = threadIdx.x; i < chunk.tokens * VALUE_TILE; i += blockDim.x) {
            const int token = i / VALUE_TILE, own = i % VALUE_TILE;
            const float beta = gates.beta[token], dr = shared[tile.row(token) + own];
            if (own < tile.columns) {
                dmixed[of.value(chunk.first + token, tile.head) - of.mixed + tile.column + own] = narrow<T>(beta * dr);
            }
        }
        // dS -= (e K)^T dV.
        tile.add_to_state(1.0f, tile.key(0), CHUNK, [&](int token, int own) {
            const float front = gates.front[token], beta = gates.beta[token], dr = shared[tile.row(token) + own];
            return -front * beta * dr;
        });
    }
    if (segment.first > 0) {
        __syncthreads();
        tile.store_state(between_of_head);
    }
}

// Value columns at a time of `gated_delta_gradients`, and the distance between rows of them.
constexpr int NARROW_TILE = 16;
constexpr int NARROW_STRIDE = NARROW_TILE + 4;

// Sixteens of a chunk's tokens.
constexpr int SIXTEENS = CHUNK / 16;

// Value columns of the states of a head, and of rows of a tensor of tokens, from `first` on.
template <typename T> struct ChunkValues {
    const float *states, *dstates;
    const T *v, *dout;
    size_t v_stride, dout_stride;
    int tokens, key_dim, value_dim, first;

    __device__ float of_state(const float *states, int k, int own) const {
        return k < key_dim && first + own < value_dim ? states[size_t(k) * value_dim + first + own] : 0.0f;
    }
    __device__ float of_row(const T *x, size_t stride, int token, int own) const {
        return token < tokens && first + own < value_dim ? widen(x[token * stride + first + own]) : 0.0f;
    }
    __device__ float in_front(int k, int own) const { return of_state(states, k, own); }
    __device__ float behind(int k, int own) const { return of_state(dstates, k, own); }
    __device__ float value(int token, int own) const { return of_row(v, v_stride, token, own); }
    __device__ float gradient(int token, int own) const { return of_row(dout, dout_stride, token, own); }
};

// A block's chunk of a key head. A warp has 16 columns of the gradients of all its queries and keys, 16 rows and 32 columns of those of its
// scores, and of a tile 16 tokens and 8 columns.
template <typename T> struct ChunkGradients : ChunkScores<T> {
    using ChunkScores<T>::of;
    using ChunkScores<T>::shared;
    using ChunkScores<T>::gates;
    Segment segment;
    DeltaChunk chunk;
    int warp, first_head, own_key, own_token, own_from, own_column;
    float dq[SIXTEENS][2][4] = {}, dk[SIXTEENS][2][4] = {};
    // For one value head: gradients of A and P, and for each row those of `beta`, of the factor in front, by queries and by keys, and of
    // that at the end.
    float da[1][4][4], dp[1][4][4], dbeta[1][2], of_queries[SIXTEENS][2], of_keys[1][2], of_end[1][2];

    __device__ ChunkGradients(const Delta<T> &of, SharedArray<float> shared, const Gates &gates, const Segment &segment)
        : ChunkScores<T>{of, shared, gates}, segment(segment),
          chunk(of, blockIdx.x / segment.count, segment.first + blockIdx.x % segment.count), warp(threadIdx.x / WARP),
          first_head(blockIdx.y * (of.value_heads / of.key_heads)), own_key(warp * 16), own_token(warp / 2 * 16),
          own_from(warp % 2 * 32), own_column(warp % 2 * 8) {}

    // Behind keys and scores: queries, and of a tile's columns R, then N, and dN, then dR. Sums over warps take their place.
    __device__ int query(int token) const { return this->end() + token * KEY_STRIDE; }
    __device__ int n(int token) const { return query(CHUNK) + token * NARROW_STRIDE; }
    __device__ int dr(int token) const { return n(CHUNK + token); }
    __device__ int sum(int part, int token) const { return n(0) + part * CHUNK + token; }

    __device__ void load_keys(SharedArray<float> scales) const;
    __device__ void begin_head();
    __device__ float of_state(const ChunkValues<T> &values) const;
    __device__ void solve_tile(const ChunkValues<T> &values);
    __device__ void add_scores_of_tile(const ChunkValues<T> &values);
    __device__ void add_keys_of_tile(const ChunkValues<T> &values);
    __device__ void find_products();
    __device__ void add_scores_to_keys();
    __device__ void store_keys(T *dmixed, SharedArray<float> scales);

    // Adds a factor times the sums of gradients along rows of queries or keys, which lie from `x` on.
    __device__ void add_along(float (&sums)[SIXTEENS][2], float factor, const float (&gradients)[SIXTEENS][2][4], int x) const {
#pragma unroll
        for (int i = 0; i < SIXTEENS * 8; i++) {
            const int token = i / 8 * 16 + lane_row(i % 4), k = own_key + i / 4 % 2 * 8 + lane_column(i % 4);
            const float y = shared[x + token * KEY_STRIDE + k];
            sums[i / 8][i % 4 / 2] += factor * y * gradients[i / 8][i / 4 % 2][i % 4];
        }
    }
    template <int F> __device__ void store_sums(int part, int row, float (&own)[F][2]) const {
#pragma unroll
        for (int i = 0; i < 2 * F; i++) {
            const float sum = row_reduce(own[i / 2][i % 2], Sum());
            if (threadIdx.x % 4 == 0) {
                shared[this->sum(part, row + i / 2 * 16 + lane_row(i % 2 * 2))] = sum;
            }
        }
    }
    __device__ float sum_of(int first, int parts, int token) const {
        float total = 0.0f;
        for (int part = first; part < first + parts; part++) {
            const float own = shared[sum(part, token)];
            total += own;
        }
        return total;
    }
};

// `scales` are of queries, then of keys.
template <typename T> __device__ void ChunkGradients<T>::load_keys(SharedArray<float> scales) const {
    for (int token = warp; token < CHUNK; token += DELTA_WARPS) {
        const float of_key = this->load_key(chunk, first_head, token);
        const float of_query = this->load_query(chunk, first_head, token, query(token));
        if (threadIdx.x % WARP == 0) {
            scales[token] = of_query;
            scales[CHUNK + token] = of_key;
        }
    }
}

template <typename T> __device__ void ChunkGradients<T>::begin_head() {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        da[0][i / 4][i % 4] = dp[0][i / 4][i % 4] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2 * SIXTEENS; i++) {
        of_queries[i / 2][i % 2] = of_keys[0][i % 2] = of_end[0][i % 2] = dbeta[0][i % 2] = 0.0f;
    }
    add_along(of_queries, -1.0f, dq, query(0));
}

// The product of the state and its gradient.
template <typename T> __device__ float ChunkGradients<T>::of_state(const ChunkValues<T> &values) const {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < of.key_dim * of.value_dim; i += blockDim.x) {
        sum += values.states[i] * values.dstates[i];
    }
    return block_sum(sum);
}

// N, and dR, by the inverse, and what N and dR give for `beta` and the decays.
template <typename T> __device__ void ChunkGradients<T>::solve_tile(const ChunkValues<T> &values) {
    const auto in_front = [&](int k, int own) { return values.in_front(k, own); };
    const auto behind = [&](int k, int own) { return values.behind(k, own); };
    const auto gradient = [&](int token, int own) { return values.gradient(token, own); };
    const auto p = [&](int from, int token) { return this->p(token, from); };
    float e_k_s[1][1][4] = {}, r_k_ds[1][1][4] = {}, dn[1][1][4] = {}, own_n[1][1][4] = {}, own_dr[1][1][4] = {};
    add_product(T(), Parts<1, 2>(), e_k_s, own_token, own_column, 0, this->depth(), this->keys(), in_front);
    add_product(T(), Parts<1, 2>(), r_k_ds, own_token, own_column, 0, this->depth(), this->keys(), behind);
    add_product(T(), Parts<1, 1>(), dn, own_token, own_column, own_token, CHUNK, p, gradient);
    const auto rest = [&](int i) { return values.value(own_token + lane_row(i), own_column + lane_column(i)) - e_k_s[0][0][i]; };
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = own_token + lane_row(i), own = own_column + lane_column(i);
        const float beta = gates.beta[token], front = gates.front[token], to_end = gates.to_end[token];
        e_k_s[0][0][i] *= front;
        r_k_ds[0][0][i] *= to_end;
        shared[n(token) + own] = beta * rest(i);
        shared[dr(token) + own] = dn[0][0][i] + r_k_ds[0][0][i];
    }
    __syncthreads();
    const auto inverse = [&](int token, int from) { return this->inverse(token, from); };
    const auto transposed = [&](int from, int token) { return this->inverse(token, from); };
    add_product(T(), Parts<2, 2>(), own_n, own_token, own_column, 0, own_token + 16, inverse, this->rows(n(0), NARROW_STRIDE));
    add_product(T(), Parts<2, 2>(), own_dr, own_token, own_column, own_token, CHUNK, transposed, this->rows(dr(0), NARROW_STRIDE));
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = own_token + lane_row(i), own = own_column + lane_column(i);
        const float beta = gates.beta[token], gradient = own_dr[0][0][i];
        shared[n(token) + own] = own_n[0][0][i];
        shared[dr(token) + own] = gradient;
        dbeta[0][i / 2] += gradient * rest(i);
        of_keys[0][i / 2] -= beta * gradient * e_k_s[0][0][i];
        of_end[0][i / 2] += own_n[0][0][i] * r_k_ds[0][0][i];
    }
    __syncthreads();
}

// Adds to dP = dO N^T and dA = -dR N^T.
template <typename T> __device__ void ChunkGradients<T>::add_scores_of_tile(const ChunkValues<T> &values) {
    const auto gradient = [&](int token, int own) { return values.gradient(token, own); };
    const auto negative = [&](int token, int own) -> float { return -shared[dr(token) + own]; };
    const auto transposed = [&](int own, int token) -> float { return shared[n(token) + own]; };
    add_product(T(), Parts<1, 2>(), dp, own_token, own_from, 0, NARROW_TILE, gradient, transposed);
    add_product(T(), Parts<2, 2>(), da, own_token, own_from, 0, NARROW_TILE, negative, transposed);
}

// Adds to dQ = e dO S^T, dK = -e dV S^T + r N dS^T.
template <typename T> __device__ void ChunkGradients<T>::add_keys_of_tile(const ChunkValues<T> &values) {
    const auto in_front = [&](int own, int k) { return values.in_front(k, own); };
    const auto behind = [&](int own, int k) { return values.behind(k, own); };
    const auto gradient = [&](int token, int own) {
        const float front = gates.front[token];
        return front * values.gradient(token, own);
    };
    const auto dv = [&](int token, int own) {
        const float front = gates.front[token], beta = gates.beta[token], own_dr = shared[dr(token) + own];
        return -front * beta * own_dr;
    };
    const auto kept = [&](int token, int own) {
        const float to_end = gates.to_end[token], own_n = shared[n(token) + own];
        return to_end * own_n;
    };
    add_product(T(), Parts<1, 2>(), dq, 0, own_key, 0, NARROW_TILE, gradient, in_front);
    add_product(T(), Parts<1, 2>(), dk, 0, own_key, 0, NARROW_TILE, dv, in_front);
    add_product(T(), Parts<1, 2>(), dk, 0, own_key, 0, NARROW_TILE, kept, behind);
}

// X = dA A + dP P in the place of the inverse, and dA A / beta in that of P; sums over rows.
template <typename T> __device__ void ChunkGradients<T>::find_products() {
    float products[1][4][4] = {};
    add_product(T(), Parts<1, 1>(), products, own_token, own_from, 0, this->depth(), this->keys(), this->keys_transposed());
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int token = own_token + lane_row(i % 4), from = own_from + i / 4 * 8 + lane_column(i % 4);
        if (from < token) {
            const float product = products[0][i / 4][i % 4] * gates.decay(token, from), beta = gates.beta[token];
            const float p = shared[this->score(token, from)], own_da = da[0][i / 4][i % 4];
            shared[this->score(from, token)] = own_da * beta * product + dp[0][i / 4][i % 4] * p;
            shared[this->score(token, from)] = own_da * product;
        }
    }
    // What the head has added to dQ, along Q.
    add_along(of_queries, 1.0f, dq, query(0));
    store_sums(warp, 0, of_queries);
    store_sums(DELTA_WARPS + warp % 2, own_token, of_keys);
    store_sums(DELTA_WARPS + 2 + warp % 2, own_token, of_end);
    store_sums(DELTA_WARPS + 4 + warp % 2, own_token, dbeta);
    __syncthreads();
}

// dQ += L K, dK += (M + M^T) K + L^T Q: L = dP D, and above its diagonal M = beta dA D transposed.
template <typename T> __device__ void ChunkGradients<T>::add_scores_to_keys() {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int token = own_token + lane_row(i % 4), from = own_from + i / 4 * 8 + lane_column(i % 4);
        if (from <= token) {
            const float decay = gates.decay(token, from), beta = gates.beta[token];
            shared[this->score(token, from)] = dp[0][i / 4][i % 4] * decay;
            if (from < token) {
                shared[this->score(from, token)] = beta * da[0][i / 4][i % 4] * decay;
            }
        }
    }
    __syncthreads();
    const auto l = [&](int token, int from) { return this->p(token, from); };
    const auto l_transposed = [&](int from, int token) { return this->p(token, from); };
    const auto m = [&](int token, int other) -> float {
        const int at = token < other ? this->score(token, other) : this->score(other, token);
        return token == other ? 0.0f : float(shared[at]);
    };
    add_product(T(), Parts<1, 1>(), dq, 0, own_key, 0, CHUNK, l, this->keys());
    add_product(T(), Parts<1, 1>(), dk, 0, own_key, 0, CHUNK, m, this->keys());
    add_product(T(), Parts<1, 1>(), dk, 0, own_key, 0, CHUNK, l_transposed, this->rows(query(0), KEY_STRIDE));
}

// Through the norms.
template <typename T> __device__ void ChunkGradients<T>::store_keys(T *dmixed, SharedArray<float> scales) {
    const auto store = [&](auto &gradients, int x, int first_scale, float square, T *to) {
        float along[SIXTEENS][2] = {};
        __syncthreads();
        add_along(along, 1.0f, gradients, x);
        store_sums(warp, 0, along);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2 * SIXTEENS; i++) {
            const int token = i / 2 * 16 + lane_row(i % 2 * 2);
            const float scale = scales[first_scale + token], all = square * sum_of(0, DELTA_WARPS, token);
            T *const row = to + token * of.width();
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int k = own_key + j / 2 * 8 + lane_column(j), e = i % 2 * 2 + j % 2;
                if (token < chunk.tokens && k < of.key_dim) {
                    const float y = shared[x + token * KEY_STRIDE + k];
                    row[k] = narrow<T>(scale * (gradients[i / 2][j / 2][e] - y * all));
                }
            }
        }
    };
    T *const queries = dmixed + chunk.first * of.width() + size_t(of.key_head(first_head)) * of.key_dim;
    store(dq, query(0), 0, float(of.key_dim), queries);
    store(dk, this->key(0), CHUNK, 1.0f, queries + size_t(of.key_heads) * of.key_dim);
}

// Where the gradients of gates go; `a_log_parts` and `dt_bias_parts` are [chunks, value_heads].
template <typename T> struct GateGradients {
    T *db, *da;
    size_t db_stride, da_stride;
    float *a_log_parts, *dt_bias_parts;
};

// Gradients for each token: of `beta`, of the running sum of decays, and of its factor at the end.
struct DecayGradients {
    SharedArray<float> dbeta, dc, of_end;
};

// Adds rows and columns of X, and rows of dA A / beta.
template <typename T> __device__ void add_products(const DecayGradients &to, const ChunkGradients<T> &from) {
    const int thread = threadIdx.x;
    if (thread < from.chunk.tokens) {
        const float own_end = from.sum_of(DELTA_WARPS + 2, 2, thread);
        float change = from.sum_of(0, DELTA_WARPS + 2, thread) - own_end, of_beta = from.sum_of(DELTA_WARPS + 4, 2, thread);
        for (int other = 0; other < thread; other++) {
            const float x = from.shared[from.score(other, thread)], through = from.shared[from.score(thread, other)];
            change += x;
            of_beta += through;
        }
        for (int token = thread + 1; token < from.chunk.tokens; token++) {
            const float x = from.shared[from.score(thread, token)];
            change -= x;
        }
        to.dc[thread] = change;
        to.of_end[thread] = own_end;
        to.dbeta[thread] = of_beta;
    }
    __syncthreads();
}

// Gradients of decays are the sums of those of running sums from the last token of a document to the first; `whole` is that of the state.
template <typename T>
__device__ void store_gates(const GateGradients<T> &into, const DecayGradients &of, const ChunkGradients<T> &from, int head, float whole) {
    const Delta<T> &layer = from.of;
    const DeltaChunk &chunk = from.chunk;
    const int thread = threadIdx.x;
    if (thread == 0) {
        float sum = whole, of_g = 0.0f, of_a = 0.0f;
        for (int token = 0; token < chunk.tokens; token++) {
            const float own = of.of_end[token];
            sum += own;
        }
        for (int token = chunk.tokens - 1; token >= 0; token--) {
            const float own = of.dc[token];
            const int document = from.gates.documents[token], behind = from.gates.documents[token + 1 < chunk.tokens ? token + 1 : token];
            sum = document == behind ? sum + own : own;
            of.dc[token] = sum;
            const float x = layer.gate(chunk.first + token, head);
            of_g += sum * layer.decay(x, head);
            of_a -= sum * expf(layer.a_log[head]) * sigmoid(x);
        }
        const size_t part = (chunk.sequence * layer.chunks() + chunk.index) * layer.value_heads + head;
        into.a_log_parts[part] = of_g;
        into.dt_bias_parts[part] = of_a;
    }
    __syncthreads();
    if (thread < chunk.tokens) {
        const size_t at = chunk.first + thread;
        const float x = layer.gate(at, head), own_beta = sigmoid(widen(layer.b[at * layer.b_stride + head]));
        const float dg = of.dc[thread], own_dbeta = of.dbeta[thread];
        into.da[at * into.da_stride + head] = narrow<T>(-dg * expf(layer.a_log[head]) * sigmoid(x));
        into.db[at * into.db_stride + head] = narrow<T>(own_dbeta * own_beta * (1.0f - own_beta));
    }
}

// A block has a chunk of a key head: gradients of queries and keys, to which its value heads add in order, and of their gates.
template <typename T>
__device__ void gated_delta_gradients(T *dmixed, const GateGradients<T> &into, const T *dout, const float *states, const float *dstates,
                                      const Segment &segment, const Delta<T> &of) {
    DYNAMIC_SHARED(float, shared);
    const Gates gates = shared_gates();
    SHARED(float, dbetas, CHUNK);
    SHARED(float, dc, CHUNK);
    SHARED(float, of_ends, CHUNK);
    SHARED(float, scales, 2 * CHUNK);
    const DecayGradients decays = {dbetas, dc, of_ends};
    ChunkGradients<T> block(of, shared, gates, segment);
    const DeltaChunk &chunk = block.chunk;
    block.load_keys(scales);
    for (int head = block.first_head; head < block.first_head + of.value_heads / of.key_heads; head++) {
        __syncthreads();
        gates.find(of, chunk, head);
        block.template find_p<4>(block.own_token, block.own_from, block.query(block.own_token));
        block.find_inverse();
        block.begin_head();
        const size_t number = segment.state(chunk.sequence, chunk.index);
        const size_t state = (number * of.value_heads + head) * of.key_dim * of.value_dim;
        const size_t row = size_t(of.value_heads) * of.value_dim;
        const T *const gradients = dout + chunk.first * row + size_t(head) * of.value_dim;
        ChunkValues<T> values = {states + state, dstates + state, of.value(chunk.first, head), gradients,
                                 of.width(), row, chunk.tokens, of.key_dim, of.value_dim, 0};
        for (; values.first < of.value_dim; values.first += NARROW_TILE) {
            block.solve_tile(values);
            block.add_scores_of_tile(values);
            block.add_keys_of_tile(values);
        }
        const float whole = block.of_state(values) * gates.front[chunk.tokens - 1];
        block.find_products();
        add_products(decays, block);
        store_gates(into, decays, block, head, whole);
        block.add_scores_to_keys();
    }
    block.store_keys(dmixed, scales);
}

#define LAYER_PARAMETERS(T)                                                                                                    \
    const T *mixed, const T *b, size_t b_stride, const T *a, size_t a_stride, const float *a_log, const float *dt_bias,        \
        const int *documents, size_t seq, int key_heads, int value_heads, int key_dim, int value_dim

#define LAYER(T)                                                                                                               \
    Delta<T>{mixed, b, a, b_stride, a_stride, a_log, dt_bias, documents, seq, key_heads, value_heads, key_dim, value_dim}

#define OF_ONE_TYPE(T, name)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(DELTA_WARPS *WARP, 1)                                                         \
        gated_delta_##name(T *out, float *states, const float *first_states, size_t first_stride, size_t first, size_t count,  \
                           size_t interval, LAYER_PARAMETERS(T)) {                                                             \
        gated_delta(out, states, first_states, first_stride, Segment{first, count, interval}, LAYER(T));                       \
    }                                                                                                                          \
    EXPORT(gated_delta_##name);                                                                                                \
    extern "C" __global__ void __launch_bounds__(DELTA_WARPS *WARP, 1)                                                         \
        gated_delta_states_##name(T *dmixed, float *dstates, float *between, const T *dout, size_t first, size_t count,        \
                                  LAYER_PARAMETERS(T)) {                                                                       \
        gated_delta_states(dmixed, dstates, between, dout, Segment{first, count, 1}, LAYER(T));                                \
    }                                                                                                                          \
    EXPORT(gated_delta_states_##name);                                                                                         \
    extern "C" __global__ void __launch_bounds__(DELTA_WARPS *WARP, 1)                                                         \
        gated_delta_gradients_##name(T *dmixed, T *db, size_t db_stride, T *da, size_t da_stride, float *a_log_parts,          \
                                     float *dt_bias_parts, const T *dout, const float *states, const float *dstates,           \
                                     size_t first, size_t count, LAYER_PARAMETERS(T)) {                                        \
        const GateGradients<T> into{db, da, db_stride, da_stride, a_log_parts, dt_bias_parts};                                 \
        gated_delta_gradients(dmixed, into, dout, states, dstates, Segment{first, count, 1}, LAYER(T));                        \
    }                                                                                                                          \
    EXPORT(gated_delta_gradients_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
