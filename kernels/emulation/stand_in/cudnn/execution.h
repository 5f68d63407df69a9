// Executing a plan: what a variant pack hands over is checked, then the graph is computed.
#pragma once

#include "plan.h"

struct cudnnContext {
    cudaStream_t stream = nullptr;
};

namespace stand_in {

struct Pack : Made {
    std::map<int64_t, void *> pointers;
    void *workspace;
};

std::shared_ptr<const Pack> pack_of(const Descriptor &descriptor);

void execute(std::shared_ptr<const Plan> plan, const Pack &pack, cudaStream_t stream);

}  // namespace stand_in
