#pragma once

#include "product.h"

namespace stand_in {

// Takes the memory that a product's code needs, if no such product was computed before. Whether there was room.
bool load_product(const Product &product, const uint32_t (&alignment_bytes)[4]);

}  // namespace stand_in
