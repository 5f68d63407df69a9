// The loss of a policy gradient, with its gradient.
#include "reduce.cuh"

struct PolicyTokens {
    const float *losses, *old, *reference, *advantages, *weights;

    __device__ float log_ratio(size_t at) const { return -losses[at] - old[at]; }
};

// `weight * x`, and 0 where the weight is 0, even if x is infinite.
__device__ inline float times(float weight, float x) { return weight == 0.0f ? 0.0f : weight * x; }

// exp(x) - x - 1, exact where x is small: there it is a series.
__device__ inline float exp_beyond_line(float x) {
    if (fabsf(x) > 0.5f) {
        return expf(x) - 1.0f - x;
    }
    float series = 1.0f;
#pragma unroll
    for (int n = 8; n > 2; n--) {
        series = 1.0f + x * (1.0f / n) * series;
    }
    return 0.5f * x * x * series;
}

// A block works on a sequence. A thread writes the factors of the tokens that it reads, so they need no barrier.
__device__ inline void policy_loss(float *factors, float *marks, const PolicyTokens &tokens, float lowest, float highest,
                                   float beta, bool by_sequence, size_t rows, size_t seq) {
    const size_t row = blockIdx.x, first = row * seq + threadIdx.x, end = (row + 1) * seq;
    float total = 0.0f, logarithms = 0.0f;
    for (size_t at = first; at < end; at += blockDim.x) {
        const float weight = tokens.weights[at];
        if (weight != 0.0f) {
            total += weight;
            logarithms += weight * tokens.log_ratio(at);
        }
    }
    total = block_sum(total);
    const float shared_ratio = expf(block_sum(logarithms) / total);
    // Of losses, of what holds the model near the reference, of clipped weights, and of slopes.
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (size_t at = first; at < end; at += blockDim.x) {
        const float weight = tokens.weights[at];
        if (weight == 0.0f) {
            factors[at] = 0.0f;
            continue;
        }
        const float ratio = by_sequence ? shared_ratio : expf(tokens.log_ratio(at)), advantage = tokens.advantages[at];
        const bool is_clipped = advantage > 0.0f ? ratio > highest : advantage < 0.0f && ratio < lowest;
        const float bounded = is_clipped ? (advantage > 0.0f ? highest : lowest) : ratio;
        const float slope = is_clipped ? 0.0f : times(advantage, ratio);
        const float apart = tokens.reference == nullptr ? 0.0f : tokens.reference[at] + tokens.losses[at];
        const float kl = exp_beyond_line(apart), pull = kl + apart;
        sums[0] += weight * (times(beta, kl) - times(advantage, bounded));
        sums[1] += weight * kl;
        sums[2] += is_clipped ? weight : 0.0f;
        sums[3] += weight * slope;
        factors[at] = weight * ((by_sequence ? 0.0f : slope) + times(beta, pull));
    }
    row_sums(sums, 0);
    const float of_weight = sums[3] / total;
    for (size_t at = first; by_sequence && at < end; at += blockDim.x) {
        if (tokens.weights[at] != 0.0f) {
            factors[at] += tokens.weights[at] * of_weight;
        }
    }
    if (threadIdx.x == 0) {
        marks[row] = sums[0];
        marks[rows + row] = sums[1];
        marks[2 * rows + row] = sums[2];
        marks[3 * rows + row] = total;
    }
}

extern "C" __global__ void policy_loss_f32(float *factors, float *marks, const float *losses, const float *old,
                                           const float *reference, const float *advantages, const float *weights,
                                           float clip_low, float clip_high, float beta, int by_sequence, size_t rows,
                                           size_t seq) {
    const PolicyTokens tokens{losses, old, reference, advantages, weights};
    policy_loss(factors, marks, tokens, 1.0f - clip_low, 1.0f + clip_high, beta, by_sequence != 0, rows, seq);
}
EXPORT(policy_loss_f32);
