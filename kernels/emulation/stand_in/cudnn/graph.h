// A graph of operations in the order in which it is computed.
#pragma once

#include "operation.h"

namespace stand_in {

struct Graph : Made {
    std::vector<SharedOperation> operations;
    // Every tensor by its number.
    std::map<int64_t, Tensor> tensors;

    // Whether an operation of this graph writes a tensor.
    bool writes(int64_t uid) const;
};

std::shared_ptr<const Graph> graph_of(const Descriptor &descriptor);

// Refuses a graph that reads a tensor that no operation writes and that is not in memory. One such tensor may come from
// outside.
const int64_t NONE = -1;
void check_written(const Graph &graph, int64_t from_without);

}  // namespace stand_in
