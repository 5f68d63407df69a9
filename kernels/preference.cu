// The loss of preferences, with its gradient.
#include "logarithm.cuh"
#include "reduce.cuh"

// A thread works on a pair: its chosen sequence, and its rejected one.
__device__ inline void preference_loss(float *factors, float *marks, const float *policy, const float *reference,
                                       const float *scale, float beta, size_t pairs) {
    const size_t pair = own_row();
    if (pair >= pairs) {
        return;
    }
    const float chosen = beta * (reference[2 * pair] - policy[2 * pair]);
    const float rejected = beta * (reference[2 * pair + 1] - policy[2 * pair + 1]);
    const float margin = chosen - rejected;
    // Both stay exact where the margin is large.
    const float tail = expf(-fabsf(margin));
    const float missed = (margin > 0.0f ? tail : 1.0f) / (1.0f + tail);
    const float factor = beta * missed * scale[0];
    factors[2 * pair] = factor;
    factors[2 * pair + 1] = -factor;
    marks[pair] = fmaxf(-margin, 0.0f) + log_1_plus(tail);
    marks[pairs + pair] = chosen;
    marks[2 * pairs + pair] = rejected;
    marks[3 * pairs + pair] = chosen > rejected ? 1.0f : 0.0f;
}

extern "C" __global__ void preference_loss_f32(float *factors, float *marks, const float *policy,
                                               const float *reference, const float *scale, float beta,
                                               size_t pairs) {
    preference_loss(factors, marks, policy, reference, scale, beta, pairs);
}
EXPORT(preference_loss_f32);
