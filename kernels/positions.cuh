// Where tokens stand in their sequence or document.
#pragma once

#include "pack.cuh"

// The position of a token: the one that is given, or else its place in whole sequences of `seq` tokens.
__device__ inline size_t position_of(size_t token, const int *positions, size_t seq) {
    return positions == nullptr ? token % seq : size_t(positions[token]);
}
