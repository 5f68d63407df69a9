// Latent attention (DeepSeek-V2, 2024): heads that are turned in part, and keys and values of one latent. A block works on
// one token.
#include "rotary.cuh"

// Turns the `pack`-th pack of pairs of neighbours of a head, in place.
template <typename T> __device__ void turn_neighbours(T *x, int pack, const Angles &angles) {
    const int half = angles.half, first = pack * PACK, next = 2 * first + PACK;
    const Pack cosine = load(angles.cosines, first, half), sine = load(angles.sines, first, half);
    Pack parts[2] = {load(x, 2 * first, 2 * half), load(x, next, 2 * half)};
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        float *pair = &parts[i / (PACK / 2)].at[2 * i % PACK];
        const float a = pair[0], b = pair[1];
        pair[0] = a * cosine.at[i] - b * angles.sign * sine.at[i];
        pair[1] = b * cosine.at[i] + a * angles.sign * sine.at[i];
    }
    store(x, 2 * first, 2 * half, parts[0]);
    store(x, next, 2 * half, parts[1]);
}

// Turns the last columns of each head, a pack of pairs a thread.
template <typename T>
__device__ void rotary_tail(T *x, const float *table, size_t table_rows, const int *positions, size_t seq, int heads,
                            int head_dim, int half, int are_neighbours, float sign) {
    const size_t token = blockIdx.x;
    const Angles angles = angles_of(token, table, table_rows, positions, seq, half, sign);
    const int packs = packs_of(half);
    for (int pack = threadIdx.x; pack < heads * packs; pack += blockDim.x) {
        T *const tail = x + (token * heads + pack / packs + 1) * head_dim - 2 * half;
        if (are_neighbours) {
            turn_neighbours(tail, pack % packs, angles);
        } else {
            turn_pairs(tail, tail, pack % packs, angles);
        }
    }
}

// The columns of a head: of keys without a position, of keys with one, and of values.
struct Columns {
    int unturned, turned, value;
};

// Makes keys and values a pack a thread. What is null is left out.
template <typename T>
__device__ void expand_keys(T *k, T *v, const T *kv, const T *k_rotary, int heads, Columns columns) {
    const size_t token = blockIdx.x;
    const int turned = packs_of(columns.unturned), values = turned + packs_of(columns.turned);
    const int packs = values + packs_of(columns.value), key = columns.unturned + columns.turned;
    for (int pack = threadIdx.x; pack < heads * packs; pack += blockDim.x) {
        const int own = pack % packs;
        const size_t head = token * heads + pack / packs;
        const T *from = kv + head * (columns.unturned + columns.value);
        if (own >= values && v != nullptr) {
            move_pack(v + head * columns.value, from + columns.unturned, own - values, columns.value);
        } else if (own < turned && k != nullptr) {
            move_pack(k + head * key, from, own, columns.unturned);
        } else if (own < values && k != nullptr) {
            T *to = k + head * key + columns.unturned;
            move_pack(to, k_rotary + token * columns.turned, own - turned, columns.turned);
        }
    }
}

// The gradients of `expand_keys`. A thread adds up a pack of the shared columns over the heads, in order.
template <typename T>
__device__ void expand_keys_backward(T *dkv, T *dk_rotary, const T *dk, const T *dv, int heads, Columns columns) {
    const size_t token = blockIdx.x;
    const int values = packs_of(columns.unturned), packs = values + packs_of(columns.value);
    const int key = columns.unturned + columns.turned, all = heads * packs;
    for (int pack = threadIdx.x; pack < all + packs_of(columns.turned); pack += blockDim.x) {
        if (pack >= all) {
            const size_t first = (pack - all) * PACK;
            const T *from = dk + token * heads * key + columns.unturned;
            Pack sum = {};
            for (int head = 0; head < heads; head++) {
                add(sum, load(from + size_t(head) * key, first, columns.turned));
            }
            store(dk_rotary + token * columns.turned, first, columns.turned, sum);
            continue;
        }
        const int own = pack % packs;
        const size_t head = token * heads + pack / packs;
        T *to = dkv + head * (columns.unturned + columns.value);
        if (own < values) {
            move_pack(to, dk + head * key, own, columns.unturned);
        } else {
            move_pack(to + columns.unturned, dv + head * columns.value, own - values, columns.value);
        }
    }
}

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void rotary_tail_##name(T *x, const float *table, size_t table_rows,                 \
                                                  const int *positions, size_t seq, int heads, int head_dim,   \
                                                  int half, int are_neighbours, float sign) {                  \
        rotary_tail(x, table, table_rows, positions, seq, heads, head_dim, half, are_neighbours, sign);        \
    }                                                                                                          \
    EXPORT(rotary_tail_##name);                                                                                \
    extern "C" __global__ void expand_keys_##name(T *k, T *v, const T *kv, const T *k_rotary, int heads,       \
                                                  int unturned, int turned, int value) {                       \
        expand_keys(k, v, kv, k_rotary, heads, {unturned, turned, value});                                     \
    }                                                                                                          \
    EXPORT(expand_keys_##name);                                                                                \
    extern "C" __global__ void expand_keys_backward_##name(T *dkv, T *dk_rotary, const T *dk, const T *dv,     \
                                                           int heads, int unturned, int turned, int value) {   \
        expand_keys_backward(dkv, dk_rotary, dk, dv, heads, {unturned, turned, value});                        \
    }                                                                                                          \
    EXPORT(expand_keys_backward_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
