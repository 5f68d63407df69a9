// Logarithms of sums with 1.
#pragma once
#include "kernel.cuh"

// ln(1 + x) for x from 0 to 1, exact where x is small: what the sum rounds away is in the quotient (Kahan).
__device__ inline float log_1_plus(float x) {
    const float sum = 1.0f + x;
    return sum == 1.0f ? x : logf(sum) * (x / (sum - 1.0f));
}
