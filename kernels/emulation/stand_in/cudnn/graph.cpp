#include "graph.h"

#include <algorithm>
#include <set>

namespace stand_in {

static void add_tensors(Graph &graph, const std::vector<Tensor> &tensors) {
    for (const Tensor &tensor : tensors) {
        const auto [known, is_new] = graph.tensors.emplace(tensor.uid, tensor);
        if (!is_new && !(known->second == tensor)) {
            refuse(CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES, "two tensors have the number %d: %s and %s", int(tensor.uid),
                   written(known->second.dims).c_str(), written(tensor.dims).c_str());
        }
        if (tensor.offsets) {
            add_tensors(graph, {*tensor.offsets});
        }
    }
}

// Each after those that write what it reads, whatever their order was.
static std::vector<SharedOperation> in_order(std::vector<SharedOperation> left) {
    std::set<int64_t> unwritten;
    for (const SharedOperation &operation : left) {
        for (const Tensor &tensor : operation->writes) {
            if (tensor.is_by_value || !unwritten.insert(tensor.uid).second) {
                refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d is written twice, or passed by value", int(tensor.uid));
            }
        }
    }
    std::vector<SharedOperation> ordered;
    while (!left.empty()) {
        const auto next = std::find_if(left.begin(), left.end(), [&](const SharedOperation &operation) {
            return std::none_of(operation->reads.begin(), operation->reads.end(),
                                [&](const Tensor &tensor) { return unwritten.count(tensor.uid) != 0; });
        });
        if (next == left.end()) {
            refuse(CUDNN_STATUS_BAD_PARAM, "%d operations wait for each other", int(left.size()));
        }
        for (const Tensor &tensor : (*next)->writes) {
            unwritten.erase(tensor.uid);
        }
        ordered.push_back(*next);
        left.erase(next);
    }
    return ordered;
}

bool Graph::writes(int64_t uid) const {
    return std::any_of(operations.begin(), operations.end(), [&](const SharedOperation &operation) {
        return std::any_of(operation->writes.begin(), operation->writes.end(), [&](const Tensor &tensor) { return tensor.uid == uid; });
    });
}

std::shared_ptr<const Graph> graph_of(const Descriptor &descriptor) {
    auto graph = std::make_shared<Graph>();
    std::vector<SharedOperation> operations;
    for (const Shared &named : descriptor.descriptors(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
        const auto operation = std::dynamic_pointer_cast<const Operation>(named->made);
        if (!operation) {
            refuse(CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE, "a %s is no operation", name_of(named->kind).c_str());
        }
        add_tensors(*graph, operation->reads);
        add_tensors(*graph, operation->writes);
        operations.push_back(operation);
    }
    graph->operations = in_order(std::move(operations));
    return graph;
}

void check_written(const Graph &graph, int64_t from_without) {
    for (const auto &[uid, tensor] : graph.tensors) {
        if (tensor.is_virtual && uid != from_without && !graph.writes(uid)) {
            refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d is virtual, and nothing writes it", int(uid));
        }
    }
}

}  // namespace stand_in
