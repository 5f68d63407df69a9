// The gated delta rule (Yang et al. 2025), a chunk of tokens at a time.
#include "logarithm.cuh"
#include "reduce.cuh"
#include "sigmoid.cuh"

// Tokens of a chunk, value columns of a block, and warps of a block.
constexpr int CHUNK = 64;
constexpr int VALUE_TILE = 32;
constexpr int DELTA_WARPS = 8;

// Distances between rows in shared memory, at which a warp reads a column without conflicts.
constexpr int SCORE_STRIDE = CHUNK + 1;
constexpr int TILE_STRIDE = VALUE_TILE + 1;

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
// at the end, and each document's running sums of decays in f64, since they may be large and small differences of them count.
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
        const int token = threadIdx.x;
        const size_t at = chunk.first + token;
        const bool exists = token < chunk.tokens;
        if (exists) {
            sums[token] = double(of.decay(of.gate(at, head), head));
            beta[token] = widen(narrow<T>(sigmoid(widen(of.b[at * of.b_stride + head]))));
            documents[token] = of.documents == nullptr ? 0 : of.documents[at];
        }
        __syncthreads();
        if (token == 0) {
            const int first = int(chunk.first % of.seq);
            double sum = 0.0;
            for (int i = 0; i < chunk.tokens; i++) {
                const double own = sums[i];
                const int document = documents[i];
                sum = document == first + i ? own : sum + own;
                sums[i] = sum;
            }
        }
        __syncthreads();
        if (exists) {
            const double sum = sums[token];
            // Whether the token's document began before the chunk.
            const int document = documents[token];
            front[token] = document < int(chunk.first % of.seq) ? expf(float(sum)) : 0.0f;
            to_end[token] = decay(chunk.tokens - 1, token);
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

// A warp writes a normed row of queries or keys, times `factor`, to shared memory.
template <typename T>
__device__ void load_normed(SharedArray<float> shared, int place, const T *x, int width, float factor) {
    float squares = 0.0f;
    for (int column = threadIdx.x % WARP; column < width; column += WARP) {
        squares += widen(x[column]) * widen(x[column]);
    }
    const float scale = factor / sqrtf(warp_reduce(squares, Sum()) + 1e-6f);
    for (int column = threadIdx.x % WARP; column < width; column += WARP) {
        shared[place + column] = widen(x[column]) * scale;
    }
}

// The product of rows of shared memory, elements `a_step` and `b_step` apart.
__device__ inline float shared_dot(SharedArray<float> shared, int a, int b, int n, int a_step = 1, int b_step = 1) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) {
        const float x = shared[a + i * a_step], y = shared[b + i * b_step];
        sum += x * y;
    }
    return sum;
}

// A block with a tile of a value head's columns, which no others change. First in shared memory is the tile of the state, or of its
// gradient, then keys, scores, and a row of each token's columns, N or dN.
template <typename T> struct DeltaTile {
    const Delta<T> &of;
    SharedArray<float> shared;
    Gates gates;
    int head, column, columns;

    __device__ DeltaTile(const Delta<T> &of, SharedArray<float> shared, const Gates &gates)
        : of(of), shared(shared), gates(gates), head(blockIdx.x % of.value_heads), column(blockIdx.y * VALUE_TILE),
          columns(of.value_dim - column < VALUE_TILE ? of.value_dim - column : VALUE_TILE) {}

    __device__ size_t sequence() const { return blockIdx.x / of.value_heads; }
    __device__ int key(int token) const { return of.key_dim * VALUE_TILE + token * (of.key_dim + 1); }
    __device__ int scores(int token) const { return key(CHUNK) + token * SCORE_STRIDE; }
    __device__ int row(int token) const { return scores(CHUNK) + token * TILE_STRIDE; }
    __device__ int end() const { return row(CHUNK); }

    // The tile of a state, or zeros.
    __device__ void load_state(const float *state) const {
        const float *const own = state + column;
        for (int i = threadIdx.x; i < of.key_dim * VALUE_TILE; i += blockDim.x) {
            const bool is_there = state != nullptr && i % VALUE_TILE < columns;
            shared[i] = is_there ? own[size_t(i / VALUE_TILE) * of.value_dim + i % VALUE_TILE] : 0.0f;
        }
    }
    // The place of the head's state, by its number among states of all heads; none where there are no states.
    template <typename U> __device__ U *state_of(U *states, size_t number) const {
        return states == nullptr ? nullptr : states + (number * of.value_heads + head) * of.key_dim * of.value_dim;
    }
    // Keys and gates. All threads of the block take part, and may read when it is over.
    __device__ void load(const DeltaChunk &chunk) const {
        __syncthreads();
        for (int token = threadIdx.x / WARP; token < chunk.tokens; token += DELTA_WARPS) {
            load_normed(shared, key(token), of.key(chunk.first + token, head), of.key_dim, 1.0f);
        }
        gates.find(of, chunk, head);
    }
    __device__ void load_query(const DeltaChunk &chunk, int token, int place) const {
        load_normed(shared, place, of.query(chunk.first + token, head), of.key_dim, 1.0f / sqrtf(float(of.key_dim)));
    }
    __device__ void store_state(float *state) const {
        float *const own = state + column;
        for (int i = threadIdx.x; i < of.key_dim * VALUE_TILE; i += blockDim.x) {
            if (i % VALUE_TILE < columns) {
                own[size_t(i / VALUE_TILE) * of.value_dim + i % VALUE_TILE] = shared[i];
            }
        }
    }
    // A, in rows `step` apart whose elements are `from_step` apart.
    __device__ void find_a(const DeltaChunk &chunk, int step, int from_step) const {
        for (int i = threadIdx.x; i < CHUNK * CHUNK; i += blockDim.x) {
            const int token = i / CHUNK, from = i % CHUNK;
            if (token < chunk.tokens && from < token) {
                const float product = shared_dot(shared, key(token), key(from), of.key_dim), beta = gates.beta[token];
                shared[scores(0) + token * step + from * from_step] = beta * product * gates.decay(token, from);
            }
        }
    }
    // A lane's scores of a query.
    __device__ void find_scores(int token, int query, int place) const {
        const int thread = threadIdx.x;
        for (int from = thread % WARP; from <= token; from += WARP) {
            shared[place + from] = shared_dot(shared, query, key(from), of.key_dim) * gates.decay(token, from);
        }
    }
    // The product of a row of queries or keys and of a column of the state.
    __device__ float times_state(int place, int own) const { return shared_dot(shared, place, own, of.key_dim, 1, VALUE_TILE); }
    __device__ size_t output(size_t token) const { return (token * of.value_heads + head) * of.value_dim + column; }
};

// `N` of a chunk with the state in front: (1 + A) N = R, a column a lane.
template <typename T> __device__ void solve(const DeltaTile<T> &tile, const DeltaChunk &chunk) {
    const SharedArray<float> shared = tile.shared;
    for (int i = threadIdx.x; i < chunk.tokens * VALUE_TILE; i += blockDim.x) {
        const int token = i / VALUE_TILE, own = i % VALUE_TILE;
        const float v = own < tile.columns ? widen(tile.of.value(chunk.first + token, tile.head)[tile.column + own]) : 0.0f;
        const float beta = tile.gates.beta[token], front = tile.gates.front[token];
        shared[tile.row(token) + own] = beta * (v - front * tile.times_state(tile.key(token), own));
    }
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    for (int token = 1; threadIdx.x < WARP && token < chunk.tokens; token++) {
        float sum = shared[tile.row(token) + lane];
        for (int from = 0; from < token; from++) {
            const float factor = shared[tile.scores(token) + from], before = shared[tile.row(from) + lane];
            sum -= factor * before;
        }
        shared[tile.row(token) + lane] = sum;
    }
    __syncthreads();
}

// O = e Q S + P N: a token a warp, a column a lane.
template <typename T> __device__ void store_outputs(T *out, const DeltaTile<T> &tile, const DeltaChunk &chunk) {
    const SharedArray<float> shared = tile.shared;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // A query for each warp, then its scores.
    const int query = tile.end() + warp * tile.of.key_dim, p = tile.end() + DELTA_WARPS * tile.of.key_dim + warp * CHUNK;
    for (int token = warp; token < chunk.tokens; token += DELTA_WARPS) {
        tile.load_query(chunk, token, query);
        __syncwarp();
        tile.find_scores(token, query, p);
        __syncwarp();
        const float front = tile.gates.front[token];
        float sum = front * tile.times_state(query, lane);
        for (int from = 0; from <= token; from++) {
            const float score = shared[p + from], before = shared[tile.row(from) + lane];
            sum += score * before;
        }
        if (lane < tile.columns) {
            out[tile.output(chunk.first + token) + lane] = narrow<T>(sum);
        }
        __syncwarp();
    }
}

// A block goes through a segment of a sequence, from `first_states [sequences, stride of states, ...]`, which are zero if there are none.
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
        tile.find_a(chunk, SCORE_STRIDE, 1);
        solve(tile, chunk);
        if (out != nullptr) {
            store_outputs(out, tile, chunk);
        }
        __syncthreads();
        const float all = gates.front[chunk.tokens - 1];
        for (int i = threadIdx.x; i < of.key_dim * VALUE_TILE; i += blockDim.x) {
            const float state = shared[i];
            float sum = all * state;
            for (int token = 0; token < chunk.tokens; token++) {
                const float kept = gates.to_end[token], key = shared[tile.key(token) + i / VALUE_TILE];
                const float value = shared[tile.row(token) + i % VALUE_TILE];
                sum += kept * key * value;
            }
            shared[i] = sum;
        }
    }
}

// dO behind the rows of dN, r K dS in these, and A transposed, above the diagonal.
template <typename T> __device__ void begin_back(const T *dout, const DeltaTile<T> &tile, const DeltaChunk &chunk) {
    tile.find_a(chunk, 1, SCORE_STRIDE);
    for (int i = threadIdx.x; i < chunk.tokens * VALUE_TILE; i += blockDim.x) {
        const int token = i / VALUE_TILE, own = i % VALUE_TILE;
        const float gradient = own < tile.columns ? widen(dout[tile.output(chunk.first + token) + own]) : 0.0f;
        tile.shared[tile.end() + token * TILE_STRIDE + own] = gradient;
        const float to_end = tile.gates.to_end[token];
        tile.shared[tile.row(token) + own] = to_end * tile.times_state(tile.key(token), own);
    }
    __syncthreads();
}

// dS = e^(c_C) dS + (e Q)^T dO, some queries at a time, and P.
template <typename T> __device__ void add_queries(const DeltaTile<T> &tile, const DeltaChunk &chunk) {
    const SharedArray<float> shared = tile.shared;
    const int width = tile.of.key_dim, gradients = tile.end(), queries = gradients + CHUNK * TILE_STRIDE;
    const float all = tile.gates.front[chunk.tokens - 1];
    for (int i = threadIdx.x; i < width * VALUE_TILE; i += blockDim.x) {
        const float state = shared[i];
        shared[i] = all * state;
    }
    for (int first = 0; first < chunk.tokens; first += DELTA_WARPS) {
        const int warp = threadIdx.x / WARP, token = first + warp;
        if (token < chunk.tokens) {
            tile.load_query(chunk, token, queries + warp * width);
            __syncwarp();
            tile.find_scores(token, queries + warp * width, tile.scores(token));
        }
        __syncthreads();
        for (int i = threadIdx.x; i < width * VALUE_TILE; i += blockDim.x) {
            const float state = shared[i];
            float sum = state;
            for (int other = 0; other < DELTA_WARPS && first + other < chunk.tokens; other++) {
                const float front = tile.gates.front[first + other], query = shared[queries + other * width + i / VALUE_TILE];
                const float gradient = shared[gradients + (first + other) * TILE_STRIDE + i % VALUE_TILE];
                sum += front * query * gradient;
            }
            shared[i] = sum;
        }
        __syncthreads();
    }
}

// dN = P^T dO + r K dS, then (1 + A)^T dR = dN, a column a lane.
template <typename T> __device__ void solve_back(const DeltaTile<T> &tile, const DeltaChunk &chunk) {
    const SharedArray<float> shared = tile.shared;
    for (int i = threadIdx.x; i < chunk.tokens * VALUE_TILE; i += blockDim.x) {
        const int from = i / VALUE_TILE, own = i % VALUE_TILE;
        float sum = shared[tile.row(from) + own];
        for (int token = from; token < chunk.tokens; token++) {
            const float score = shared[tile.scores(token) + from], gradient = shared[tile.end() + token * TILE_STRIDE + own];
            sum += score * gradient;
        }
        shared[tile.row(from) + own] = sum;
    }
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    for (int token = chunk.tokens - 1; threadIdx.x < WARP && token > 0; token--) {
        const float own = shared[tile.row(token) + lane];
        for (int from = 0; from < token; from++) {
            const float factor = shared[tile.scores(from) + token], before = shared[tile.row(from) + lane];
            shared[tile.row(from) + lane] = before - factor * own;
        }
    }
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
        begin_back(dout, tile, chunk);
        add_queries(tile, chunk);
        solve_back(tile, chunk);
        for (int i = threadIdx.x; i < chunk.tokens * VALUE_TILE; i += blockDim.x) {
            const int token = i / VALUE_TILE, own = i % VALUE_TILE;
            const float beta = gates.beta[token], dr = shared[tile.row(token) + own];
            if (own < tile.columns) {
                dmixed[of.value(chunk.first + token, tile.head) - of.mixed + tile.column + own] = narrow<T>(beta * dr);
            }
        }
        // dS -= (e K)^T dV.
        for (int i = threadIdx.x; i < of.key_dim * VALUE_TILE; i += blockDim.x) {
            const float state = shared[i];
            float sum = state;
            for (int token = 0; token < chunk.tokens; token++) {
                const float front = gates.front[token], beta = gates.beta[token], key = shared[tile.key(token) + i / VALUE_TILE];
                const float dr = shared[tile.row(token) + i % VALUE_TILE];
                sum -= front * key * beta * dr;
            }
            shared[i] = sum;
        }
    }
    if (segment.first > 0) {
        tile.store_state(between_of_head);
    }
}

// Value columns at a time of `gated_delta_gradients`, and the distance between rows of them.
constexpr int NARROW_TILE = 4;
constexpr int NARROW_STRIDE = NARROW_TILE + 1;

// Threads that share a row of a chunk, key columns of each, and scores of each.
constexpr int ROW_THREADS = DELTA_WARPS * WARP / CHUNK;
constexpr int KEY_DIM_MAX = 128;
constexpr int OWN_KEYS = KEY_DIM_MAX / ROW_THREADS;
constexpr int OWN_SCORES = CHUNK * CHUNK / (DELTA_WARPS * WARP);

// The sum over the threads of a row.
__device__ inline float sum_of_row(float x) {
#pragma unroll
    for (int distance = ROW_THREADS / 2; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    }
    return x;
}

// A block's chunk of a key head. A row of the chunk has some threads, each with some of its key columns and, of a tile, a value column.
template <typename T> struct ChunkGradients {
    const Delta<T> &of;
    SharedArray<float> shared;
    Gates gates;
    Segment segment;
    DeltaChunk chunk;
    int thread, row, lane, first_head;
    bool exists;
    float dq[OWN_KEYS] = {}, dk[OWN_KEYS] = {};
    // For one value head: gradients of A and P, of the row's `beta`, of its factor at the end, and of the state.
    float da[OWN_SCORES], dp[OWN_SCORES];
    float beta, front, to_end, dbeta, of_front, of_end, of_state;

    __device__ ChunkGradients(const Delta<T> &of, SharedArray<float> shared, const Gates &gates, const Segment &segment)
        : of(of), shared(shared), gates(gates), segment(segment),
          chunk(of, blockIdx.x / segment.count, segment.first + blockIdx.x % segment.count), thread(threadIdx.x),
          row(thread / ROW_THREADS), lane(thread % ROW_THREADS), first_head(blockIdx.y * (of.value_heads / of.key_heads)),
          exists(row < chunk.tokens) {}

    // Keys, queries; P, and above its diagonal the inverse of 1 + A transposed; tiles of the state and its gradient, of N, R / beta, dO and dR.
    __device__ int key(int token) const { return token * (of.key_dim + 1); }
    __device__ int query(int token) const { return key(CHUNK + token); }
    __device__ int score(int token, int from) const { return query(CHUNK) + token * SCORE_STRIDE + from; }
    __device__ int state(int k) const { return score(CHUNK, 0) + k * NARROW_STRIDE; }
    __device__ int dstate(int k) const { return state(of.key_dim + k); }
    __device__ int n(int token) const { return dstate(of.key_dim) + token * NARROW_STRIDE; }
    __device__ int rest(int token) const { return n(CHUNK + token); }
    __device__ int dout(int token) const { return n(2 * CHUNK + token); }
    __device__ int dn(int token) const { return n(3 * CHUNK + token); }

    __device__ float root() const { return sqrtf(float(of.key_dim)); }
    // The token and the one it sees of a thread's scores.
    __device__ int token_of(int i) const { return (thread + i * DELTA_WARPS * WARP) / CHUNK; }
    __device__ int from_of(int i) const { return (thread + i * DELTA_WARPS * WARP) % CHUNK; }

    __device__ void load_keys() const;
    __device__ void find_scores() const;
    __device__ void invert() const;
    __device__ void begin_head();
    __device__ void load_tile(int head, int first, const T *dout_of_all, const float *states, const float *dstates);
    __device__ void solve_tile(int head, int first);
    __device__ void add_scores_of_tile();
    __device__ void add_keys_of_tile();
    __device__ float find_products();
    __device__ void add_scores_to_keys();
    __device__ void store_keys(T *dmixed) const;
};

template <typename T> __device__ void ChunkGradients<T>::load_keys() const {
    for (int token = thread / WARP; token < chunk.tokens; token += DELTA_WARPS) {
        load_normed(shared, key(token), of.key(chunk.first + token, first_head), of.key_dim, 1.0f);
        load_normed(shared, query(token), of.query(chunk.first + token, first_head), of.key_dim, 1.0f / root());
    }
}

// P and A.
template <typename T> __device__ void ChunkGradients<T>::find_scores() const {
    for (int i = thread; i < CHUNK * CHUNK; i += blockDim.x) {
        const int token = i / CHUNK, from = i % CHUNK;
        if (token < chunk.tokens && from <= token) {
            const float decay = gates.decay(token, from), own_beta = gates.beta[token];
            shared[score(token, from)] = decay * shared_dot(shared, query(token), key(from), of.key_dim);
            if (from < token) {
                shared[score(from, token)] = own_beta * decay * shared_dot(shared, key(token), key(from), of.key_dim);
            }
        }
    }
    __syncthreads();
}

// The inverse, row by row in the place of A: a column a thread.
template <typename T> __device__ void ChunkGradients<T>::invert() const {
    for (int token = 1; token < chunk.tokens; token++) {
        float sum = 0.0f;
        if (thread < token) {
            const float own = shared[score(thread, token)];
            sum = -own;
            for (int from = thread + 1; from < token; from++) {
                const float factor = shared[score(from, token)], before = shared[score(thread, from)];
                sum -= factor * before;
            }
        }
        __syncthreads();
        if (thread < token) {
            shared[score(thread, token)] = sum;
        }
        __syncthreads();
    }
}

template <typename T> __device__ void ChunkGradients<T>::begin_head() {
#pragma unroll
    for (int i = 0; i < OWN_SCORES; i++) {
        da[i] = dp[i] = 0.0f;
    }
    dbeta = of_front = of_end = of_state = 0.0f;
    beta = exists ? float(gates.beta[row]) : 0.0f;
    front = exists ? float(gates.front[row]) : 0.0f;
    to_end = exists ? float(gates.to_end[row]) : 0.0f;
}

template <typename T>
__device__ void ChunkGradients<T>::load_tile(int head, int first, const T *dout_of_all, const float *states, const float *dstates) {
    __syncthreads();
    const size_t state_number = segment.state(chunk.sequence, chunk.index);
    const size_t place = (state_number * of.value_heads + head) * of.key_dim * of.value_dim + first;
    for (int i = thread; i < of.key_dim * NARROW_TILE; i += blockDim.x) {
        const int k = i / NARROW_TILE, own = i % NARROW_TILE;
        const bool is_there = first + own < of.value_dim;
        const size_t at = place + size_t(k) * of.value_dim + own;
        const float in_front = is_there ? states[at] : 0.0f, behind = is_there ? dstates[at] : 0.0f;
        shared[state(k) + own] = in_front;
        shared[dstate(k) + own] = behind;
        of_state += in_front * behind;
    }
    const bool is_there = exists && first + lane < of.value_dim;
    const size_t at = ((chunk.first + row) * of.value_heads + head) * of.value_dim + first + lane;
    shared[dout(row) + lane] = is_there ? widen(dout_of_all[at]) : 0.0f;
    __syncthreads();
}

// N, and dR, by the inverse.
template <typename T> __device__ void ChunkGradients<T>::solve_tile(int head, int first) {
    float of_row = 0.0f, own_dn = 0.0f;
    for (int k = 0; exists && k < of.key_dim; k++) {
        const float own_key = shared[key(row) + k], in_front = shared[state(k) + lane], behind = shared[dstate(k) + lane];
        of_row += own_key * in_front;
        own_dn += own_key * behind;
    }
    own_dn *= to_end;
    for (int token = row; token < chunk.tokens; token++) {
        const float p = shared[score(token, row)], gradient = shared[dout(token) + lane];
        own_dn += p * gradient;
    }
    const bool is_there = exists && first + lane < of.value_dim;
    const float v = is_there ? widen(of.value(chunk.first + row, head)[first + lane]) : 0.0f;
    const float own_rest = exists ? v - front * of_row : 0.0f;
    shared[rest(row) + lane] = own_rest;
    shared[dn(row) + lane] = exists ? own_dn : 0.0f;
    __syncthreads();
    float own_n = beta * own_rest, dr = exists ? own_dn : 0.0f;
    for (int from = 0; exists && from < row; from++) {
        const float factor = shared[score(from, row)], before = shared[rest(from) + lane], beta_before = gates.beta[from];
        own_n += factor * beta_before * before;
    }
    for (int token = row + 1; token < chunk.tokens; token++) {
        const float factor = shared[score(row, token)], behind = shared[dn(token) + lane];
        dr += factor * behind;
    }
    __syncthreads();
    shared[n(row) + lane] = own_n;
    shared[dn(row) + lane] = dr;
    dbeta += dr * own_rest;
    __syncthreads();
}

// Adds to dP = dO N^T and dA = -dR N^T.
template <typename T> __device__ void ChunkGradients<T>::add_scores_of_tile() {
#pragma unroll
    for (int i = 0; i < OWN_SCORES; i++) {
        const int token = token_of(i), from = from_of(i);
        for (int own = 0; token < chunk.tokens && from <= token && own < NARROW_TILE; own++) {
            const float value = shared[n(from) + own], gradient = shared[dout(token) + own], dr = shared[dn(token) + own];
            dp[i] += gradient * value;
            da[i] -= from < token ? dr * value : 0.0f;
        }
    }
}

// Adds to dQ = e dO S^T, dK = -e dV S^T + r N dS^T, and to what these give for the decays.
template <typename T> __device__ void ChunkGradients<T>::add_keys_of_tile() {
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++) {
        const int k = lane + i * ROW_THREADS;
        if (exists && k < of.key_dim) {
            float qe = 0.0f, ke = 0.0f, kr = 0.0f;
            for (int own = 0; own < NARROW_TILE; own++) {
                const float in_front = shared[state(k) + own], behind = shared[dstate(k) + own];
                const float gradient = shared[dout(row) + own], value = shared[n(row) + own], dr = shared[dn(row) + own];
                qe += gradient * in_front;
                ke -= beta * dr * in_front;
                kr += value * behind;
            }
            const float own_query = shared[query(row) + k], own_key = shared[key(row) + k];
            dq[i] += front * qe;
            dk[i] += front * ke + to_end * kr;
            of_front += front * (qe * own_query + ke * own_key);
            of_end += to_end * kr * own_key;
        }
    }
}

// X = dA A + dP P in the place of the inverse, and dA A / beta in that of P.
template <typename T> __device__ float ChunkGradients<T>::find_products() {
    of_front = sum_of_row(of_front);
    of_end = sum_of_row(of_end);
    dbeta = sum_of_row(dbeta);
    const float whole = block_sum(of_state) * gates.front[chunk.tokens - 1];
#pragma unroll
    for (int i = 0; i < OWN_SCORES; i++) {
        const int token = token_of(i), from = from_of(i);
        if (token < chunk.tokens && from < token) {
            const float product = shared_dot(shared, key(token), key(from), of.key_dim) * gates.decay(token, from);
            const float p = shared[score(token, from)], own_beta = gates.beta[token];
            shared[score(from, token)] = da[i] * own_beta * product + dp[i] * p;
            shared[score(token, from)] = da[i] * product;
        }
    }
    return whole;
}

// dQ += L K, dK += (M + M^T) K + L^T Q: L = dP D, and above its diagonal M = beta dA D transposed.
template <typename T> __device__ void ChunkGradients<T>::add_scores_to_keys() {
#pragma unroll
    for (int i = 0; i < OWN_SCORES; i++) {
        const int token = token_of(i), from = from_of(i);
        if (token < chunk.tokens && from <= token) {
            const float decay = gates.decay(token, from), own_beta = gates.beta[token];
            shared[score(token, from)] = dp[i] * decay;
            if (from < token) {
                shared[score(from, token)] = own_beta * da[i] * decay;
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++) {
        const int k = lane + i * ROW_THREADS;
        for (int other = 0; exists && k < of.key_dim && other < chunk.tokens; other++) {
            const float of_key = shared[key(other) + k], of_query = shared[query(other) + k];
            const float low = shared[score(row, other)], high = shared[score(other, row)];
            // Below the diagonal L of this row and M of it; above, L and M of the others.
            dq[i] += other <= row ? low * of_key : 0.0f;
            dk[i] += other < row ? high * of_key : other == row ? low * of_query : high * of_query + low * of_key;
        }
    }
}

// Through the norms.
template <typename T> __device__ void ChunkGradients<T>::store_keys(T *dmixed) const {
    for (int of_key = 0; of_key < 2; of_key++) {
        const float factor = of_key ? 1.0f : root();
        const int shared_row = of_key ? key(row) : query(row);
        const T *const x = exists ? of_key ? of.key(chunk.first + row, first_head) : of.query(chunk.first + row, first_head) : of.mixed;
        float squares = 0.0f, along = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN_KEYS; i++) {
            const int k = lane + i * ROW_THREADS;
            if (exists && k < of.key_dim) {
                const float y = shared[shared_row + k], gradient = of_key ? dk[i] : dq[i];
                squares += widen(x[k]) * widen(x[k]);
                along += y * gradient;
            }
        }
        const float norm = 1.0f / sqrtf(sum_of_row(squares) + 1e-6f) / factor;
        along = sum_of_row(along) * factor * factor;
#pragma unroll
        for (int i = 0; i < OWN_KEYS; i++) {
            const int k = lane + i * ROW_THREADS;
            if (exists && k < of.key_dim) {
                const float y = shared[shared_row + k], gradient = of_key ? dk[i] : dq[i];
                dmixed[x - of.mixed + k] = narrow<T>(norm * (gradient - y * along));
            }
        }
    }
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
    if (from.lane == 0 && from.exists) {
        to.dbeta[from.row] = from.dbeta;
        to.dc[from.row] = from.of_front - from.of_end;
        to.of_end[from.row] = from.of_end;
    }
    __syncthreads();
    if (thread < from.chunk.tokens) {
        float change = to.dc[thread], of_beta = to.dbeta[thread];
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
    const DecayGradients decays = {dbetas, dc, of_ends};
    ChunkGradients<T> block(of, shared, gates, segment);
    block.load_keys();
    for (int head = block.first_head; head < block.first_head + of.value_heads / of.key_heads; head++) {
        __syncthreads();
        gates.find(of, block.chunk, head);
        block.find_scores();
        block.invert();
        block.begin_head();
        for (int first = 0; first < of.value_dim; first += NARROW_TILE) {
            block.load_tile(head, first, dout, states, dstates);
            block.solve_tile(head, first);
            block.add_scores_of_tile();
            block.add_keys_of_tile();
        }
        const float whole = block.find_products();
        add_products(decays, block);
        store_gates(into, decays, block, head, whole);
        block.add_scores_to_keys();
    }
    block.store_keys(dmixed);
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
