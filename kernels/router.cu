// The router of a mixture of experts: choices, weights, tables by expert, and losses of balance.
#include "reduce.cuh"

// Most experts, and how many of them a lane has: those whose number is its own plus a multiple of 32.
constexpr int EXPERTS_MAX = 512;
constexpr int PER_LANE = EXPERTS_MAX / WARP;

// Tokens of a block, a warp each, and threads of blocks that work on tables.
constexpr int TOKENS = 8;
constexpr int THREADS = 256;

// How a router chooses and weighs; `groups` is 1 where it chooses from all.
struct Routing {
    int experts, choices, is_sigmoid, is_normed, groups, chosen_groups, best;
    float factor;
};

// A token's numbers, one for each expert of a lane.
struct Numbers {
    float at[PER_LANE];
};

__device__ inline int expert_of(int i) { return i * WARP + int(threadIdx.x); }

__device__ inline Numbers load_numbers(const float *from, int experts) {
    Numbers numbers = {};
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (expert_of(i) < experts) {
            numbers.at[i] = from[expert_of(i)];
        }
    }
    return numbers;
}

__device__ inline float sum_of(const Numbers &numbers) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        sum += numbers.at[i];
    }
    return warp_reduce(sum, Sum());
}

// The largest logit and the sum of exponentials of what is below it.
__device__ inline void exponentials_of(Numbers &numbers, int experts, float &largest, float &sum) {
    largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (expert_of(i) < experts) {
            largest = fmaxf(largest, numbers.at[i]);
        }
    }
    largest = warp_reduce(largest, Largest());
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        numbers.at[i] = expert_of(i) < experts ? expf(numbers.at[i] - largest) : 0.0f;
    }
    sum = sum_of(numbers);
}

// Scores in place of logits; 0 beyond the last expert.
__device__ inline void score(Numbers &numbers, const Routing &routing) {
    if (routing.is_sigmoid) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            numbers.at[i] = expert_of(i) < routing.experts ? 1.0f / (1.0f + expf(-numbers.at[i])) : 0.0f;
        }
        return;
    }
    float largest, sum;
    exponentials_of(numbers, routing.experts, largest, sum);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        numbers.at[i] /= sum;
    }
}

// A number as an integer of the same order, and a NaN below them all.
__device__ inline unsigned order_of(float number) {
    // -0 becomes 0, which equals it.
    const unsigned bits = __float_as_uint(number + 0.0f);
    if (number != number) {
        return 0;
    }
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A candidate: its order, and its number; the lower number wins among equals.
struct Candidate {
    unsigned order;
    int number;

    __device__ void meet(unsigned other_order, int other) {
        if (other_order > order || (other_order == order && other < number)) {
            order = other_order;
            number = other;
        }
    }
};

// Every lane receives the best candidate of all lanes.
__device__ inline Candidate best_of_warp(Candidate best) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const unsigned order = __shfl_xor_sync(WHOLE_WARP, best.order, distance);
        const int number = __shfl_xor_sync(WHOLE_WARP, best.number, distance);
        best.meet(order, number);
    }
    return best;
}

constexpr int NONE = 0x7fffffff;

// The best of a lane's numbers that are open, a bit each.
__device__ inline Candidate best_of_lane(const Numbers &numbers, unsigned open) {
    Candidate best = {0, NONE};
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (open >> i & 1) {
            best.meet(order_of(numbers.at[i]), expert_of(i));
        }
    }
    return best;
}

// A bit for each of a lane's first `count` numbers of all lanes.
__device__ inline unsigned bits_below(int count) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        bits |= unsigned(expert_of(i) < count) << i;
    }
    return bits;
}

// Takes the `count` best of the open numbers, and gives a bit for each of a lane's that was taken.
__device__ inline unsigned take_best(const Numbers &numbers, unsigned open, int count) {
    unsigned taken = 0;
    for (int n = 0; n < count; n++) {
        const Candidate best = best_of_warp(best_of_lane(numbers, open & ~taken));
        if (best.number % WARP == int(threadIdx.x)) {
            taken |= 1u << best.number / WARP;
        }
    }
    return taken;
}

// What a group is worth: the sum of its best one or two. `choices` has those of all experts.
__device__ inline float rate_of(SharedArray<float> choices, int place, int group, int size, int best) {
    Candidate first = {0, NONE}, second = {0, NONE};
    for (int i = 0; i < size; i++) {
        const float choice = choices[place + group * size + i];
        const unsigned order = order_of(choice);
        if (first.number == NONE || order > first.order) {
            second = first;
            first = {order, group * size + i};
        } else if (second.number == NONE || order > second.order) {
            second = {order, group * size + i};
        }
    }
    const float rate = choices[place + first.number];
    if (best == 1) {
        return rate;
    }
    const float other = choices[place + second.number];
    return rate + other;
}

// A bit for each of a lane's experts that are in the best groups.
__device__ inline unsigned open_experts(const Numbers &choices, SharedArray<float> shared, const Routing &routing) {
    const unsigned all = bits_below(routing.experts);
    if (routing.groups == 1) {
        return all;
    }
    const int size = routing.experts / routing.groups, place = int(threadIdx.y) * EXPERTS_MAX;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        shared[place + expert_of(i)] = choices.at[i];
    }
    __syncwarp();
    Numbers rates = {};
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (expert_of(i) < routing.groups) {
            rates.at[i] = rate_of(shared, place, expert_of(i), size, routing.best);
        }
    }
    const unsigned chosen = take_best(rates, bits_below(routing.groups), routing.chosen_groups);
    unsigned open = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int group = expert_of(i) < routing.experts ? expert_of(i) / size : 0;
        const unsigned of_owner = __shfl_sync(WHOLE_WARP, chosen, group % WARP);
        open |= (of_owner >> group / WARP & 1) << i;
    }
    return open & all;
}

// What scores are divided by for losses of balance.
__device__ inline float seen_sum(const Numbers &scores, const Routing &routing) {
    return routing.is_sigmoid ? sum_of(scores) : 1.0f;
}

// A warp has a token.
__device__ void route(int *ids, float *weights, float *scores, const float *logits, const float *bias, size_t tokens,
                      const Routing &routing) {
    SHARED(float, shared, TOKENS * EXPERTS_MAX);
    const size_t token = own_row();
    if (token >= tokens) {
        return;
    }
    Numbers own = load_numbers(logits + token * routing.experts, routing.experts);
    score(own, routing);
    Numbers choices = own;
    if (bias != nullptr) {
        const Numbers added = load_numbers(bias, routing.experts);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            choices.at[i] += added.at[i];
        }
    }
    const unsigned chosen = take_best(choices, open_experts(choices, shared, routing), routing.choices);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        sum += chosen >> i & 1 ? own.at[i] : 0.0f;
    }
    sum = warp_reduce(sum, Sum());
    const float norm = routing.is_normed ? sum + 1e-20f : 1.0f, of_seen = seen_sum(own, routing);
    size_t place = token * routing.choices;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const unsigned of_warp = __ballot_sync(WHOLE_WARP, chosen >> i & 1);
        if (chosen >> i & 1) {
            const size_t at = place + __popc(of_warp & ((1u << threadIdx.x) - 1));
            if (ids != nullptr) {
                ids[at] = expert_of(i);
            }
            if (weights != nullptr) {
                weights[at] = routing.factor * (own.at[i] / norm);
            }
        }
        place += __popc(of_warp);
        if (scores != nullptr && expert_of(i) < routing.experts) {
            scores[token * routing.experts + expert_of(i)] = own.at[i] / of_seen;
        }
    }
}

// The gradient of the scores of the chosen by that of their weights; 0 of the others.
__device__ inline Numbers chosen_gradient(const Numbers &scores, const int *ids, const float *dweights,
                                          const Routing &routing) {
    Numbers gradient = {};
    float sum = 0.0f, mean = 0.0f;
    for (int choice = 0; choice < routing.choices; choice++) {
        const int id = ids[choice];
        const float dweight = routing.factor * dweights[choice];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (expert_of(i) == id) {
                gradient.at[i] = dweight;
                sum += scores.at[i];
                mean += dweight * scores.at[i];
            }
        }
    }
    if (!routing.is_normed) {
        return gradient;
    }
    sum = warp_reduce(sum, Sum()) + 1e-20f;
    mean = warp_reduce(mean, Sum()) / sum;
    for (int choice = 0; choice < routing.choices; choice++) {
        const int id = ids[choice];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (expert_of(i) == id) {
                gradient.at[i] = (gradient.at[i] - mean) / sum;
            }
        }
    }
    return gradient;
}

// The sum of products of two tokens' numbers.
__device__ inline float product_of(const Numbers &a, const Numbers &b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        sum += a.at[i] * b.at[i];
    }
    return warp_reduce(sum, Sum());
}

// A warp has a token. `balance` has a row for each sequence of `seq` tokens.
template <typename T>
__device__ void route_backward(T *dlogits, const float *dweights, const float *logits, const int *ids,
                               const float *balance, size_t tokens, size_t seq, float z_loss, const Routing &routing) {
    const size_t token = own_row();
    if (token >= tokens) {
        return;
    }
    const int experts = routing.experts;
    const Numbers given = load_numbers(logits + token * experts, experts);
    Numbers scores = given;
    score(scores, routing);
    const size_t place = token * routing.choices;
    Numbers gradient = chosen_gradient(scores, ids + place, dweights + place, routing);
    if (balance != nullptr) {
        const Numbers seen = load_numbers(balance + token / seq * experts, experts);
        const float sum = seen_sum(scores, routing);
        const float mean = routing.is_sigmoid ? product_of(seen, scores) / sum : 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            gradient.at[i] += (seen.at[i] - mean) / sum;
        }
    }
    const float mean = routing.is_sigmoid ? 0.0f : product_of(gradient, scores);
    float largest = 0.0f, sum = 1.0f;
    Numbers exponentials = given;
    if (z_loss != 0.0f) {
        exponentials_of(exponentials, experts, largest, sum);
    }
    const float of_all = 2.0f * z_loss * (largest + logf(sum)) / sum;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        float own = routing.is_sigmoid ? gradient.at[i] * scores.at[i] * (1.0f - scores.at[i])
                                       : scores.at[i] * (gradient.at[i] - mean);
        if (z_loss != 0.0f) {
            own += of_all * exponentials.at[i];
        }
        if (expert_of(i) < experts) {
            dlogits[token * experts + expert_of(i)] = narrow<T>(own);
        }
    }
}

// A warp has a token.
extern "C" __global__ void router_z_loss(float *losses, const float *logits, size_t tokens, int experts,
                                         float factor) {
    const size_t token = own_row();
    if (token >= tokens) {
        return;
    }
    Numbers numbers = load_numbers(logits + token * experts, experts);
    float largest, sum;
    exponentials_of(numbers, experts, largest, sum);
    if (threadIdx.x == 0) {
        const float of_all = largest + logf(sum);
        losses[token] = factor * of_all * of_all;
    }
}
EXPORT(router_z_loss);

// A block has an expert. It counts the rows of those before it, then places its own in the order of tokens.
extern "C" __global__ void __launch_bounds__(THREADS)
    group_by_expert(int *offsets, int *row_token, int *row_slot, int *slot_row, const int *ids, size_t rows,
                    size_t choices) {
    SHARED(int, of_warps, THREADS / WARP);
    const int expert = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int before = 0;
    for (size_t slot = threadIdx.x; slot < rows; slot += THREADS) {
        before += ids[slot] < expert;
    }
    const int first = block_sum(before);
    if (offsets != nullptr && threadIdx.x == 0) {
        offsets[expert] = first;
        if (expert + 1 == int(gridDim.x)) {
            offsets[gridDim.x] = int(rows);
        }
    }
    int next = first;
    for (size_t start = 0; start < rows; start += THREADS) {
        const size_t slot = start + threadIdx.x;
        const int is_own = slot < rows && ids[slot < rows ? slot : 0] == expert;
        const unsigned of_warp = __ballot_sync(WHOLE_WARP, is_own);
        __syncthreads();
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
        if (is_own) {
            if (row_token != nullptr) {
                row_token[row] = int(slot / choices);
            }
            if (row_slot != nullptr) {
                row_slot[row] = int(slot);
            }
            if (slot_row != nullptr) {
                slot_row[slot] = row;
            }
        }
    }
}
EXPORT(group_by_expert);

// A warp has an expert of a sequence of `rows` choices.
extern "C" __global__ void count_choices(float *counts, const int *ids, size_t all, size_t experts, size_t rows) {
    const size_t own = own_row();
    if (own >= all) {
        return;
    }
    const int expert = int(own % experts);
    const int *of_sequence = ids + own / experts * rows;
    int count = 0;
    for (size_t row = threadIdx.x; row < rows; row += WARP) {
        count += of_sequence[row] == expert;
    }
    count = warp_reduce(count, Sum());
    if (threadIdx.x == 0) {
        counts[own] = float(count);
    }
}
EXPORT(count_choices);

// One block; a thread has an expert of a group of `pooled` rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    balance_loss(float *loss, float *gradient, const float *counts, const float *sums, size_t groups, size_t pooled,
                 size_t experts, float factor, int accumulate) {
    float total = 0.0f;
    for (size_t pair = threadIdx.x; pair < groups * experts; pair += THREADS) {
        const size_t first = pair / experts * pooled * experts + pair % experts;
        float count = 0.0f, sum = 0.0f;
        for (size_t row = 0; row < pooled; row++) {
            count += counts[first + row * experts];
            sum += sums[first + row * experts];
        }
        total += count * sum;
        for (size_t row = 0; row < pooled; row++) {
            gradient[first + row * experts] = factor * count;
        }
    }
    total = block_sum(total);
    if (threadIdx.x == 0) {
        *loss = factor * total + (accumulate ? *loss : 0.0f);
    }
}
EXPORT(balance_loss);

// One block. Nothing changes if the factor of clipping is NaN, as in a step that is skipped.
extern "C" __global__ void __launch_bounds__(THREADS)
    step_router_bias(float *bias, const float *counts, const float *clip, size_t experts, float rate) {
    float sum = 0.0f;
    for (size_t expert = threadIdx.x; expert < experts; expert += THREADS) {
        sum += counts[expert];
    }
    const float mean = block_sum(sum) / float(experts);
    if (clip[1] != clip[1]) {
        return;
    }
    for (size_t expert = threadIdx.x; expert < experts; expert += THREADS) {
        const float count = counts[expert];
        bias[expert] += count < mean ? rate : count > mean ? -rate : 0.0f;
    }
}
EXPORT(step_router_bias);

extern "C" __global__ void route_f32(int *ids, float *weights, float *scores, const float *logits, const float *bias,
                                     size_t tokens, int experts, int choices, int is_sigmoid, int is_normed, int groups,
                                     int chosen_groups, int best, float factor) {
    const Routing routing = {experts, choices, is_sigmoid, is_normed, groups, chosen_groups, best, factor};
    route(ids, weights, scores, logits, bias, tokens, routing);
}
EXPORT(route_f32);

#define OF_ONE_TYPE(T, name)                                                                                   \
    extern "C" __global__ void route_backward_##name(                                                          \
        T *dlogits, const float *dweights, const float *logits, const int *ids, const float *balance,          \
        size_t tokens, size_t seq, float z_loss, int experts, int choices, int is_sigmoid, int is_normed,      \
        float factor) {                                                                                        \
        const Routing routing = {experts, choices, is_sigmoid, is_normed, 1, 1, 1, factor};                    \
        route_backward(dlogits, dweights, logits, ids, balance, tokens, seq, z_loss, routing);                 \
    }                                                                                                          \
    EXPORT(route_backward_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
