// The operations of a graph: what each reads and writes, and how it is computed.
#pragma once

#include "tensor.h"

namespace stand_in {

// In which order parts of a sum are added up.
enum class Order {
    // Always the same.
    KEPT,
    // As unordered blocks of a device: in another order at every second execution. Parts are kept in bf16, so that the
    // difference shows even in rounded results.
    REVERSED_IN_PARTS,
    FORWARD_IN_PARTS,
};

struct Operation : Made {
    std::vector<Tensor> reads, writes;
    // Products of matrices, of which a pattern has a certain number.
    bool is_product = false;
    // Whether it gathers, over heads, what a product made.
    bool is_reduction = false;
    // Of a product's result.
    int64_t rows = 0, columns = 0;
    // A whole attention.
    bool is_attention = false;
    // How long the sequences are whose tokens are its rows, its columns or what it adds up; among what is read.
    std::vector<Tensor> lengths;
    std::function<void(Values &, Order)> compute;
};

using SharedOperation = std::shared_ptr<const Operation>;

// From complete descriptors of their kinds.
SharedOperation matmul_of(const Descriptor &descriptor);
SharedOperation pointwise_of(const Descriptor &descriptor);
SharedOperation reduction_of(const Descriptor &descriptor);
SharedOperation reshape_of(const Descriptor &descriptor);
SharedOperation band_mask_of(const Descriptor &descriptor);
SharedOperation attention_of(const Descriptor &descriptor);

// The operation of an attention on scores; not an operation by itself.
struct Softmax : Made {
    std::vector<Tensor> x, y;
    // None, or one.
    std::vector<Tensor> stats;
};
std::shared_ptr<const Softmax> softmax_of(const Descriptor &descriptor);

// Batches of matrices; a batch of `a` or `b` that is smaller is shared by neighbours.
Dense product(const Sizes &a_dims, const Dense &a, const Sizes &b_dims, const Dense &b, const Sizes &c_dims, Order order);

}  // namespace stand_in
