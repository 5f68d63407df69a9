// Queries, keys and values of one product: apart for attention, and their gradients together again. Queries and keys are
// turned on the way, as `rotary.cu` turns them.
#include "rotary.cuh"

// A block works on one token: a pack a thread, or a pack of pairs in the first 2 `half` columns of a head, which are turned by
// the table of queries or of keys. Without tables no columns are. A part that is null is left out. With `FINDS` a block writes
// the largest magnitude of what it stores into its element of `parts`.
template <bool JOINS, bool FINDS, typename T>
__device__ void move_row(T *qkv, T *q, T *k, T *v, int q_width, int k_width, int v_width, const float *q_table,
                         const float *k_table, size_t table_rows, const int *positions, size_t seq, int head_dim, int half,
                         int *parts) {
    const size_t token = blockIdx.x;
    T *const row = qkv + token * (size_t(q_width) + size_t(k_width) + size_t(v_width));
    const bool turns = k_table != nullptr;
    const float sign = JOINS ? -1.0f : 1.0f;
    // Where a table's cosines of the token's position begin.
    const size_t row_of_table = turns ? position_of(token, positions, seq) * half : 0;
    const int turning = packs_of(half), of_head = turning + packs_of(head_dim - 2 * half);
    const auto packs = [&](int width) { return turns ? width / head_dim * of_head : packs_of(width); };
    const int keys = packs(q_width), values = keys + packs(k_width), end = values + packs_of(v_width);
    int largest = 0;
    for (int pack = threadIdx.x; pack < end; pack += blockDim.x) {
        T *part = q;
        const float *table = q_table;
        int first = 0, column = 0, width = q_width;
        const bool is_value = pack >= values;
        if (is_value) {
            part = v, first = values, column = q_width + k_width, width = v_width;
        } else if (pack >= keys) {
            part = k, first = keys, column = q_width, width = k_width, table = k_table;
        }
        if (part == nullptr) {
            continue;
        }
        part += token * width;
        T *to = JOINS ? row + column : part;
        const T *from = JOINS ? part : row + column;
        int own = pack - first;
        bool is_turned = turns && !is_value;
        if (is_turned) {
            const int head = own / of_head * head_dim;
            to += head, from += head, own %= of_head;
            is_turned = own < turning;
            if (!is_turned) {
                to += 2 * half, from += 2 * half, own -= turning, width = head_dim - 2 * half;
            }
        }
        if (is_turned) {
            const float *cosines = table + row_of_table;
            turn_pairs<FINDS>(largest, to, from, own, {cosines, cosines + table_rows * half, half, sign});
        } else {
            if constexpr (FINDS) {
                largest = Greatest()(largest, largest_of(load(from, size_t(own) * PACK, width)));
            }
            move_pack(to, from, own, width);
        }
    }
    store_largest<FINDS>(parts, largest);
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void split_qkv_##name(const T *qkv, T *q, T *k, T *v, int q_width, int k_width,      \
                                                int v_width, const float *q_table, const float *k_table,       \
                                                size_t table_rows, const int *positions, size_t seq,           \
                                                int head_dim, int half) {                                      \
        move_row<false, false>(const_cast<T *>(qkv), q, k, v, q_width, k_width, v_width, q_table, k_table,     \
                               table_rows, positions, seq, head_dim, half, nullptr);                           \
    }                                                                                                          \
    EXPORT(split_qkv_##name);                                                                                  \
    extern "C" __global__ void join_qkv_##name(T *qkv, const T *q, const T *k, const T *v, int q_width,        \
                                               int k_width, int v_width, const float *q_table,                 \
                                               const float *k_table, size_t table_rows, const int *positions,  \
                                               size_t seq, int head_dim, int half) {                           \
        move_row<true, false>(qkv, const_cast<T *>(q), const_cast<T *>(k), const_cast<T *>(v), q_width,        \
                              k_width, v_width, q_table, k_table, table_rows, positions, seq, head_dim, half,  \
                              nullptr);                                                                        \
    }                                                                                                          \
    EXPORT(join_qkv_##name);                                                                                   \
    extern "C" __global__ void join_qkv_largest_##name(T *qkv, const T *q, const T *k, const T *v,             \
                                                       int q_width, int k_width, int v_width,                  \
                                                       const float *q_table, const float *k_table,             \
                                                       size_t table_rows, const int *positions, size_t seq,    \
                                                       int head_dim, int half, int *parts) {                   \
        move_row<true, true>(qkv, const_cast<T *>(q), const_cast<T *>(k), const_cast<T *>(v), q_width,         \
                             k_width, v_width, q_table, k_table, table_rows, positions, seq, head_dim, half,   \
                             parts);                                                                           \
    }                                                                                                          \
    EXPORT(join_qkv_largest_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
