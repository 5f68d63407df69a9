// Products of column-major matrices by loops.
#pragma once

#include "library_api.h"

namespace stand_in {

struct Description {
    cublasComputeType_t compute;
    cudaDataType scale;
    bool a_transposed, b_transposed;
    // The bias's; without one nothing is added.
    bool has_bias;
    cudaDataType bias_type;
    const void *bias;
    // An f32 each, on the device, for matrices of FP8.
    const void *a_scale, *b_scale;
    // Not 0: sums of products of FP8 may be kept in fewer bits.
    int8_t fast_accumulation;
};

struct Layout {
    cudaDataType type;
    uint64_t rows, columns;
    // Elements from a column to the next, and from a matrix of the batch to the next.
    int64_t leading;
    int32_t batch;
    int64_t batch_stride;

    bool is_fp8() const { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
    size_t element_bytes() const { return is_fp8() ? 1 : type == CUDA_R_16BF ? 2 : 4; }
    bool operator==(const Layout &other) const;
};

// `d = alpha a b + beta c`, and the bias, an element for each row of `d`, is added to every column; `c` is not read where
// beta is 0.
struct Product {
    Description description;
    Layout a, b, c, d;
};

// Matrices of FP8 are multiplied by their scales, which are read now. Sums are f32, in the order of k, and rounded once; of `parts` parts side by side, which are added up in their order.
void compute(const Product &product, size_t parts, float alpha, const void *a, const void *b, float beta, const void *c, void *d);

}  // namespace stand_in
