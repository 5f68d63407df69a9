// Latent attention: the rotary embedding of the last columns of heads, and keys and values from one latent a token.
#include "positions.cuh"

// A block has a token. Its threads turn the pairs of the last columns of its heads.
template <typename T>
__device__ void rotary_tail(T *x, const float *table, size_t table_rows, const int *positions, size_t seq, int heads,
                            int head_dim, int half, int are_neighbours, float sign) {
    const size_t token = blockIdx.x;
    const float *cosines = table + position_of(token, positions, seq) * half, *sines = cosines + table_rows * half;
    for (int pair = threadIdx.x; pair < heads * half; pair += blockDim.x) {
        const int head = pair / half, at = pair % half;
        T *turned = x + (token * heads + head) * head_dim + head_dim - 2 * half;
        const int low = are_neighbours ? 2 * at : at, high = are_neighbours ? 2 * at + 1 : at + half;
        const float a = widen(turned[low]), b = widen(turned[high]);
        const float cosine = cosines[at], sine = sign * sines[at];
        turned[low] = narrow<T>(a * cosine - b * sine);
        turned[high] = narrow<T>(b * cosine + a * sine);
    }
}

// The widths of a head: columns without a position, those with one, and those of a value.
struct Widths {
    int heads, own, turned, value;
};

// A block has a token.
template <typename T>
__device__ void expand_keys(T *k, T *v, const T *kv, const T *k_rotary, const Widths &widths) {
    const size_t token = blockIdx.x;
    const int of_k = widths.own + widths.turned, of_kv = widths.own + widths.value;
    const T *from = kv + token * widths.heads * of_kv;
    for (int at = threadIdx.x; k != nullptr && at < widths.heads * of_k; at += blockDim.x) {
        const int head = at / of_k, column = at % of_k;
        k[token * widths.heads * of_k + at] = column < widths.own ? from[head * of_kv + column]
                                                                  : k_rotary[token * widths.turned + column - widths.own];
    }
    for (int at = threadIdx.x; v != nullptr && at < widths.heads * widths.value; at += blockDim.x) {
        const int head = at / widths.value, column = at % widths.value;
        v[token * widths.heads * widths.value + at] = from[head * of_kv + widths.own + column];
    }
}

// A block has a token; sums over heads are in their order.
template <typename T>
__device__ void expand_keys_backward(T *dkv, T *dk_rotary, const T *dk, const T *dv, const Widths &widths) {
    const size_t token = blockIdx.x;
    const int of_k = widths.own + widths.turned, of_kv = widths.own + widths.value;
    const T *of_keys = dk + token * widths.heads * of_k, *of_values = dv + token * widths.heads * widths.value;
    for (int at = threadIdx.x; at < widths.heads * of_kv; at += blockDim.x) {
        const int head = at / of_kv, column = at % of_kv;
        dkv[token * widths.heads * of_kv + at] = column < widths.own
                                                     ? of_keys[head * of_k + column]
                                                     : of_values[head * widths.value + column - widths.own];
    }
    for (int column = threadIdx.x; column < widths.turned; column += blockDim.x) {
        float sum = 0.0f;
        for (int head = 0; head < widths.heads; head++) {
            sum += widen(of_keys[head * of_k + widths.own + column]);
        }
        dk_rotary[token * widths.turned + column] = narrow<T>(sum);
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
                                                  int own, int turned, int value) {                            \
        expand_keys(k, v, kv, k_rotary, Widths{heads, own, turned, value});                                    \
    }                                                                                                          \
    EXPORT(expand_keys_##name);                                                                                \
    extern "C" __global__ void expand_keys_backward_##name(T *dkv, T *dk_rotary, const T *dk, const T *dv,     \
                                                           int heads, int own, int turned, int value) {        \
        expand_keys_backward(dkv, dk_rotary, dk, dv, Widths{heads, own, turned, value});                       \
    }                                                                                                          \
    EXPORT(expand_keys_backward_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
