#pragma once

#include "product.h"

#include <functional>

namespace stand_in {

// Takes the memory that a product's code needs, if no such product was computed by the algorithm before. Whether there was
// room.
bool load_product(const Product &product, const uint32_t (&alignment_bytes)[4], uint64_t algorithm);

// Lets the time of a product pass on the clock of events, where STAND_IN_ALGORITHM_US says what an algorithm takes.
void pass_time(uint64_t algorithm);

// Compute capability of the current context's device, 90 for 9.0; 0 without one.
int current_capability();

// Whether a stream captures: then `work` runs whenever the graph is launched.
bool captures(cudaStream_t stream, std::function<void()> work);

}  // namespace stand_in
