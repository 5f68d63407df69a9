// The router of a mixture of experts. A warp works on a token: a lane has the experts of its number, of its number plus
// 32, and so on, one in each of its slots.
#include "reduce.cuh"

// As in `operation/router.rs`.
constexpr int EXPERTS_MAX = 512;
constexpr int SLOTS = EXPERTS_MAX / WARP;
// Tokens of a block.
constexpr int TOKENS = 8;

// Added to each sum of scores before anything is divided by it, so that no division is by 0.
constexpr float TINY = 1e-20f;

// What a lane has of a token: a number an expert.
struct Slots {
    float at[SLOTS];
};

__device__ inline int expert_of(int slot) { return slot * WARP + threadIdx.x; }

// Calls `body` with each slot.
template <typename Body> __device__ void each_slot(Body body) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
        body(slot);
    }
}

__device__ inline Slots load_slots(const float *row, int experts, float missing) {
    Slots own;
    each_slot([&](int slot) { own.at[slot] = expert_of(slot) < experts ? row[expert_of(slot)] : missing; });
    return own;
}

// The sum of a term of every slot; every lane receives it.
template <typename Term> __device__ float slots_sum(Term term) {
    float sum = 0.0f;
    each_slot([&](int slot) { sum += term(slot); });
    return warp_reduce(sum, Sum());
}

// Logits become their softmax. Returns the logarithm of the sum of their exponentials. Missing ones are minus infinity.
__device__ inline float softmax(Slots &x) {
    float largest = -INFINITY;
    each_slot([&](int slot) { largest = fmaxf(largest, x.at[slot]); });
    largest = warp_reduce(largest, Largest());
    each_slot([&](int slot) { x.at[slot] = expf(x.at[slot] - largest); });
    const float sum = slots_sum([&](int slot) { return x.at[slot]; });
    each_slot([&](int slot) { x.at[slot] /= sum; });
    return largest + logf(sum);
}

// Logits become scores. Missing ones become zero.
__device__ inline void score(Slots &x, int is_sigmoid) {
    if (is_sigmoid) {
        each_slot([&](int slot) { x.at[slot] = 1.0f / (1.0f + expf(-x.at[slot])); });
    } else {
        softmax(x);
    }
}

// The divisor of the scores that the loss of balance sees: sigmoids are divided by their sum, softmaxes by nothing.
__device__ inline float sum_of_balanced(const Slots &scores, int is_sigmoid) {
    return is_sigmoid ? slots_sum([&](int slot) { return scores.at[slot]; }) + TINY : 1.0f;
}

// Whether a token is padding: in its sequence of `seq` it comes after as many as `lengths` has. Null: none is.
__device__ inline bool is_padding(const int *lengths, size_t seq, size_t token) {
    return lengths != nullptr && token % seq >= size_t(lengths[token / seq]);
}

// A factor, divided by the number of tokens that are not padding if there is some.
__device__ inline float share_of(float factor, const int *lengths, size_t sequences) {
    if (lengths == nullptr) {
        return factor;
    }
    int count = 0;
    for (size_t sequence = threadIdx.x; sequence < sequences; sequence += WARP) {
        count += lengths[sequence];
    }
    return factor / float(warp_reduce(count, Sum()));
}

// The keys by which experts are chosen: greater ones are taken first. These stand for no number.
constexpr unsigned ABSENT = 0, OF_NAN = 1;

// Ordered like the numbers. Both zeros are equal, and a NaN is less than any.
__device__ inline unsigned key_of(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f);
    const unsigned key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return value == value ? key : OF_NAN;
}

struct Greater {
    __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

// Takes the `count` greatest keys, of equal ones the lowest, and returns a bit for each slot of this lane that was taken.
__device__ inline unsigned choose(unsigned (&keys)[SLOTS], int count) {
    unsigned chosen = 0;
    for (int i = 0; i < count; i++) {
        uint64_t best = 0;
        each_slot([&](int slot) {
            best = Greater()(best, uint64_t(keys[slot]) << 32 | ~unsigned(expert_of(slot)));
        });
        const unsigned id = ~unsigned(warp_reduce(best, Greater()));
        each_slot([&](int slot) {
            if (id == unsigned(expert_of(slot))) {
                keys[slot] = ABSENT;
                chosen |= 1u << slot;
            }
        });
    }
    return chosen;
}

// Takes away the keys of experts that are not in the best groups. `values` has room for a token's experts.
__device__ inline void leave_groups(unsigned (&keys)[SLOTS], SharedArray<float> values, int start, const Slots &own,
                                    int experts, int groups, int chosen_groups, int best) {
    const int size = experts / groups;
    each_slot([&](int slot) {
        if (expert_of(slot) < experts) {
            values[start + expert_of(slot)] = own.at[slot];
        }
    });
    __syncwarp();
    unsigned of_groups[SLOTS];
    each_slot([&](int slot) {
        of_groups[slot] = ABSENT;
        if (expert_of(slot) < groups) {
            float first = NAN, second = NAN;
            for (int i = 0; i < size; i++) {
                const float value = values[start + expert_of(slot) * size + i];
                if (key_of(value) > key_of(first)) {
                    second = first;
                    first = value;
                } else if (key_of(value) > key_of(second)) {
                    second = value;
                }
            }
            of_groups[slot] = key_of(best == 2 ? first + second : first);
        }
    });
    const unsigned chosen = choose(of_groups, chosen_groups);
    each_slot([&](int slot) {
        const int group = expert_of(slot) / size;
        const unsigned of_lane = __shfl_sync(WHOLE_WARP, chosen, group % WARP);
        if (group >= groups || !(of_lane >> group / WARP & 1)) {
            keys[slot] = ABSENT;
        }
    });
}

// Without groups there are 0 of them. What is null is left out.
extern "C" __global__ void route_f32(int *ids, float *weights, float *all_scores, const float *logits,
                                     const float *bias, const int *lengths, size_t tokens, size_t seq, int experts,
                                     int choices, int is_sigmoid, int is_normed, float factor, int groups,
                                     int chosen_groups, int best) {
    SHARED(float, values, TOKENS * EXPERTS_MAX);
    const size_t token = own_row();
    if (token >= tokens) {
        return;
    }
    const Slots own = load_slots(logits + token * experts, experts, -INFINITY);
    Slots scores = own;
    score(scores, is_sigmoid);
    Slots choosing = own;
    if (bias != nullptr) {
        const Slots biases = load_slots(bias, experts, 0.0f);
        each_slot([&](int slot) { choosing.at[slot] = scores.at[slot] + biases.at[slot]; });
    } else if (best == 2) {
        choosing = scores;
    }
    unsigned keys[SLOTS];
    each_slot([&](int slot) { keys[slot] = expert_of(slot) < experts ? key_of(choosing.at[slot]) : ABSENT; });
    if (groups > 0) {
        leave_groups(keys, values, threadIdx.y * EXPERTS_MAX, choosing, experts, groups, chosen_groups, best);
    }
    const unsigned chosen = choose(keys, choices);
    const float sum = slots_sum([&](int slot) { return chosen >> slot & 1 ? scores.at[slot] : 0.0f; });
    const float divisor = is_normed ? sum + TINY : 1.0f, of_all = sum_of_balanced(scores, is_sigmoid);
    const bool is_seen = !is_padding(lengths, seq, token);
    int before = 0;
    each_slot([&](int slot) {
        const bool is_chosen = chosen >> slot & 1;
        const unsigned of_warp = __ballot_sync(WHOLE_WARP, is_chosen);
        const size_t at = token * choices + before + __popc(of_warp & ((1u << threadIdx.x) - 1));
        before += __popc(of_warp);
        if (is_chosen && ids != nullptr) {
            ids[at] = expert_of(slot);
        }
        if (is_chosen && weights != nullptr) {
            weights[at] = scores.at[slot] / divisor * factor;
        }
        if (all_scores != nullptr && expert_of(slot) < experts) {
            all_scores[token * experts + expert_of(slot)] = is_seen ? scores.at[slot] / of_all : 0.0f;
        }
    });
}
EXPORT(route_f32);

// Sets the gradients of the chosen scores; the others are zero.
__device__ inline Slots weights_backward(const Slots &scores, const float *dweights, const int *ids, int choices,
                                         int is_normed, float factor) {
    Slots dscores = {};
    unsigned chosen = 0;
    for (int choice = 0; choice < choices; choice++) {
        const int id = ids[choice];
        const float dweight = dweights[choice];
        each_slot([&](int slot) {
            if (id == expert_of(slot)) {
                dscores.at[slot] = dweight;
                chosen |= 1u << slot;
            }
        });
    }
    float mean = 0.0f, divisor = 1.0f;
    if (is_normed) {
        divisor = TINY + slots_sum([&](int slot) { return chosen >> slot & 1 ? scores.at[slot] : 0.0f; });
        mean = slots_sum([&](int slot) { return dscores.at[slot] * scores.at[slot]; }) / divisor;
    }
    each_slot([&](int slot) {
        if (chosen >> slot & 1) {
            dscores.at[slot] = (dscores.at[slot] - mean) / divisor * factor;
        }
    });
    return dscores;
}

// The row of `balance` belongs to as many tokens as a sequence has. Without it that is null, without the other loss `z_loss`
// is 0.
template <typename T>
__device__ void route_backward(T *dlogits, const float *dweights, const float *logits, const int *ids,
                               const float *balance, const int *lengths, size_t tokens, size_t seq, int experts,
                               int choices, int is_sigmoid, int is_normed, float factor, float z_loss) {
    const size_t token = own_row();
    if (token >= tokens) {
        return;
    }
    Slots own = load_slots(logits + token * experts, experts, -INFINITY);
    Slots scores = own;
    score(scores, is_sigmoid);
    const size_t first = token * choices;
    Slots dscores = weights_backward(scores, dweights + first, ids + first, choices, is_normed, factor);
    const bool is_seen = !is_padding(lengths, seq, token);
    if (balance != nullptr && is_seen) {
        const Slots rows = load_slots(balance + token / seq * experts, experts, 0.0f);
        const float of_all = sum_of_balanced(scores, is_sigmoid);
        float mean = 0.0f;
        if (is_sigmoid) {
            mean = slots_sum([&](int slot) { return rows.at[slot] * scores.at[slot]; }) / of_all;
        }
        each_slot([&](int slot) { dscores.at[slot] += (rows.at[slot] - mean) / of_all; });
    }
    float mean = 0.0f;
    if (!is_sigmoid) {
        mean = slots_sum([&](int slot) { return dscores.at[slot] * scores.at[slot]; });
    }
    each_slot([&](int slot) {
        const float score = scores.at[slot];
        dscores.at[slot] = is_sigmoid ? dscores.at[slot] * score * (1.0f - score) : (dscores.at[slot] - mean) * score;
    });
    if (z_loss != 0.0f && is_seen) {
        const float share = share_of(z_loss, lengths, tokens / seq), lse = softmax(own);
        each_slot([&](int slot) { dscores.at[slot] += 2.0f * share * lse * own.at[slot]; });
    }
    each_slot([&](int slot) {
        if (expert_of(slot) < experts) {
            dlogits[token * experts + expert_of(slot)] = narrow<T>(dscores.at[slot]);
        }
    });
}

#define BACKWARD(T, name)                                                                                      \
    extern "C" __global__ void route_backward_##name(                                                          \
        T *dlogits, const float *dweights, const float *logits, const int *ids, const float *balance,          \
        const int *lengths, size_t tokens, size_t seq, int experts, int choices, int is_sigmoid,               \
        int is_normed, float factor, float z_loss) {                                                           \
        route_backward(dlogits, dweights, logits, ids, balance, lengths, tokens, seq, experts, choices,        \
                       is_sigmoid, is_normed, factor, z_loss);                                                 \
    }                                                                                                          \
    EXPORT(route_backward_##name)

BACKWARD(float, f32);
BACKWARD(bf16, bf16);

extern "C" __global__ void router_z_loss_f32(float *losses, const float *logits, const int *lengths,
                                             size_t tokens, size_t seq, int experts, float factor) {
    const size_t token = own_row();
    if (token >= tokens) {
        return;
    }
    Slots own = load_slots(logits + token * experts, experts, -INFINITY);
    const float share = share_of(factor, lengths, tokens / seq), lse = softmax(own);
    if (threadIdx.x == 0) {
        losses[token] = is_padding(lengths, seq, token) ? 0.0f : share * lse * lse;
    }
}
EXPORT(router_z_loss_f32);

// Threads of a block that groups, or that sums.
constexpr int THREADS = 512;

// A block places the rows of one expert. It reads all ids twice: what comes before its rows are the ids that are less, and
// then each of its own follows those before it. No atomics, no scratch. What is null is left out.
extern "C" __global__ void group_by_expert_i32(int *offsets, int *row_token, int *row_slot, int *slot_row,
                                               const int *ids, size_t slots, int choices) {
    SHARED(int, of_warps, THREADS / WARP);
    const int expert = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int less = 0;
    for (size_t slot = threadIdx.x; slot < slots; slot += THREADS) {
        less += ids[slot] < expert;
    }
    int next = block_sum(less);
    if (offsets != nullptr && threadIdx.x == 0) {
        offsets[expert] = next;
        if (blockIdx.x == gridDim.x - 1) {
            offsets[expert + 1] = int(slots);
        }
    }
    for (size_t start = 0; start < slots; start += THREADS) {
        const size_t slot = start + threadIdx.x;
        const bool is_own = slot < slots && ids[slot] == expert;
        // Whoever still reads the counts of earlier ids comes first.
        if (!__syncthreads_or(is_own)) {
            continue;
        }
        const unsigned of_warp = __ballot_sync(WHOLE_WARP, is_own);
        if (lane == 0) {
            of_warps[warp] = __popc(of_warp);
        }
        __syncthreads();
        int row = next + __popc(of_warp & ((1u << lane) - 1));
        for (int other = 0; other < THREADS / WARP; other++) {
            const int count = of_warps[other];
            row += other < warp ? count : 0;
            next += count;
        }
        if (is_own && row_token != nullptr) {
            row_token[row] = int(slot / choices);
        }
        if (is_own && row_slot != nullptr) {
            row_slot[row] = int(slot);
        }
        if (is_own && slot_row != nullptr) {
            slot_row[slot] = row;
        }
    }
}
EXPORT(group_by_expert_i32);

// A block counts one expert of one sequence of `slots` ids, `choices` of each token.
extern "C" __global__ void count_choices_f32(float *counts, const int *ids, const int *lengths, size_t slots,
                                             size_t experts, size_t choices) {
    const size_t row = blockIdx.x;
    const int *own = ids + row / experts * slots;
    const int expert = int(row % experts);
    const size_t end = lengths == nullptr ? slots : size_t(lengths[row / experts]) * choices;
    int count = 0;
    for (size_t slot = threadIdx.x; slot < end; slot += THREADS) {
        count += own[slot] == expert;
    }
    count = block_sum(count);
    if (threadIdx.x == 0) {
        counts[row] = float(count);
    }
}
EXPORT(count_choices_f32);

// One block; a thread takes an expert of one group of sequences after the other. Nothing was counted where there is only
// padding, and nothing is divided there.
extern "C" __global__ void balance_loss_f32(float *loss, float *gradient, const float *counts, const float *sums,
                                            const int *lengths, size_t groups, size_t experts, size_t pooled,
                                            size_t sequences, float factor, int accumulate) {
    double total = 0.0;
    for (size_t own = threadIdx.x; own < groups * experts; own += THREADS) {
        const size_t start = own / experts * pooled, first = start * experts + own % experts;
        double count = 0.0, sum = 0.0, tokens = 0.0;
        for (size_t row = 0; row < pooled; row++) {
            count += double(counts[first + row * experts]);
            sum += double(sums[first + row * experts]);
            tokens += lengths == nullptr ? 0.0 : double(lengths[(start + row) % sequences]);
        }
        if (tokens > 0.0) {
            sum /= tokens * tokens;
        }
        total += count * sum;
        if (tokens > 0.0) {
            count /= tokens * tokens;
        }
        for (size_t row = 0; row < pooled; row++) {
            gradient[first + row * experts] = float(double(factor) * count);
        }
    }
    total = block_sum(total);
    if (threadIdx.x == 0) {
        const double before = accumulate ? double(loss[0]) : 0.0;
        loss[0] = float(before + double(factor) * total);
    }
}
EXPORT(balance_loss_f32);

// One block. Counts are whole numbers, so that their sum and its comparison with a multiple of each are exact.
extern "C" __global__ void step_router_bias_f32(float *bias, const float *counts, const float *clip, size_t experts,
                                                float rate) {
    if (isnan(clip[1])) {
        return;
    }
    double total = 0.0;
    for (size_t expert = threadIdx.x; expert < experts; expert += THREADS) {
        total += double(counts[expert]);
    }
    total = block_sum(total);
    for (size_t expert = threadIdx.x; expert < experts; expert += THREADS) {
        const double of_all = double(counts[expert]) * double(experts);
        if (of_all != total) {
            bias[expert] += of_all < total ? rate : -rate;
        }
    }
}
EXPORT(step_router_bias_f32);
