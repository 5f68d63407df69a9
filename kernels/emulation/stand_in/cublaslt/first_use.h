#pragma once

#include "product.h"

#include <functional>

namespace stand_in {

// Takes the memory that a product's code needs, if no such product was computed before. Whether there was room.
bool load_product(const Product &product, const uint32_t (&alignment_bytes)[4]);

// Whether a stream captures: then `work` runs whenever the graph is launched.
bool captures(cudaStream_t stream, std::function<void()> work);

}  // namespace stand_in
