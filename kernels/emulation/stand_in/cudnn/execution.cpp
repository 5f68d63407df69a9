#include "execution.h"
#include "../settings.h"
#include "driver.h"

#include <algorithm>
#include <cstring>

namespace stand_in {

namespace {

// Bytes from an address on.
struct Span {
    std::string name;
    uintptr_t begin, end;
};

Span span_of(const std::string &name, const void *memory, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    return {name, begin, begin + bytes};
}

void check_apart(const Span &a, const Span &b) {
    if (a.begin < b.end && b.begin < a.end) {
        refuse(CUDNN_STATUS_BAD_PARAM, "%s and %s lie in the same memory", a.name.c_str(), b.name.c_str());
    }
}

void check_live(const Tensor &tensor, const void *memory, size_t bytes, cudaStream_t stream) {
    if (!is_on_device(memory, bytes, stream)) {
        refuse(CUDNN_STATUS_EXECUTION_FAILED, "tensor %d, %zu bytes at %p, is not within a live block, or the stream does not exist",
               int(tensor.uid), bytes, memory);
    }
}

void check_pointer(const Tensor &tensor, const void *memory, cudaStream_t stream) {
    const int uid = int(tensor.uid);
    if (memory == nullptr) {
        refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "tensor %d is at no address", uid);
    }
    if (tensor.is_by_value) {
        if (is_device_memory(memory)) {
            refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d is passed by value, and its address is the device's", uid);
        }
        return;
    }
    if (reinterpret_cast<uintptr_t>(memory) % uintptr_t(tensor.alignment_bytes) != 0) {
        refuse(CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER, "tensor %d is at %p, which is not aligned to %d bytes", uid, memory,
               int(tensor.alignment_bytes));
    }
    // Where a ragged one ends is known when the graph is computed.
    check_live(tensor, memory, tensor.offsets ? 1 : tensor.span_bytes(), stream);
}

// That the pack has all that lies in memory, and nothing else.
void check_pack(const Graph &graph, const Pack &pack, cudaStream_t stream) {
    for (const auto &[uid, tensor] : graph.tensors) {
        const auto found = pack.pointers.find(uid);
        if (tensor.is_virtual == (found != pack.pointers.end())) {
            refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d is %s", int(uid), tensor.is_virtual ? "virtual, and in the pack" : "not in the pack");
        }
        if (!tensor.is_virtual) {
            check_pointer(tensor, found->second, stream);
        }
    }
    for (const auto &[uid, memory] : pack.pointers) {
        if (graph.tensors.count(uid) == 0) {
            refuse(CUDNN_STATUS_BAD_PARAM, "the pack has tensor %d, which the graph has not", int(uid));
        }
    }
}

// Adds the addresses of a tensor's neighbouring elements, run by run.
void add_runs(std::vector<Span> &runs, const Tensor &tensor, const void *memory) {
    size_t inner = tensor.dims.size() - 1;
    for (size_t axis = 0; axis < tensor.dims.size(); axis++) {
        const bool is_longer = tensor.strides[inner] != 1 || tensor.dims[axis] > tensor.dims[inner];
        inner = tensor.strides[axis] == 1 && is_longer ? axis : inner;
    }
    std::vector<int64_t> starts = {0};
    for (size_t axis = 0; axis < tensor.dims.size(); axis++) {
        std::vector<int64_t> further;
        for (const int64_t start : starts) {
            for (int64_t place = 0; place < (axis == inner ? 1 : tensor.dims[axis]); place++) {
                further.push_back(start + place * tensor.strides[axis]);
            }
        }
        starts = std::move(further);
    }
    for (const int64_t start : starts) {
        const char *first = static_cast<const char *>(memory) + size_t(start) * tensor.element_bytes();
        runs.push_back(span_of("tensor " + std::to_string(tensor.uid), first, size_t(tensor.dims[inner]) * tensor.element_bytes()));
    }
}

// That no element of two outputs is the same.
void check_elements_apart(const Tensor &a, const Tensor &b, const Pack &pack) {
    std::vector<Span> runs;
    add_runs(runs, a, pack.pointers.at(a.uid));
    add_runs(runs, b, pack.pointers.at(b.uid));
    std::sort(runs.begin(), runs.end(), [](const Span &one, const Span &other) { return one.begin < other.begin; });
    for (size_t next = 1; next < runs.size(); next++) {
        check_apart(runs[next - 1], runs[next]);
    }
}

// What is written lies apart from what is read and from the workspace. Outputs may be interleaved, as columns of one tensor.
void check_overlaps(const Graph &graph, const Pack &pack, const Span &workspace, const Sequences &sequences) {
    std::vector<Span> read = {workspace}, written;
    std::vector<Tensor> outputs;
    for (const auto &[uid, tensor] : graph.tensors) {
        if (tensor.is_in_memory()) {
            auto &spans = graph.writes(uid) ? written : read;
            spans.push_back(span_of("tensor " + std::to_string(uid), pack.pointers.at(uid), sequences.span_bytes(tensor)));
            if (graph.writes(uid)) {
                outputs.push_back(tensor);
            }
        }
    }
    for (size_t one = 1; one < read.size(); one++) {
        check_apart(workspace, read[one]);
    }
    for (size_t one = 0; one < written.size(); one++) {
        for (const Span &other : read) {
            check_apart(written[one], other);
        }
        for (size_t other = 0; other < one; other++) {
            if (!sequences.lengths.empty()) {
                check_apart(written[one], written[other]);
            } else if (written[one].begin < written[other].end && written[other].begin < written[one].end) {
                check_elements_apart(outputs[one], outputs[other], pack);
            }
        }
    }
}

void check_workspace(const Plan &plan, const Pack &pack, cudaStream_t stream) {
    if (plan.workspace_bytes == 0) {
        return;
    }
    if (pack.workspace == nullptr || reinterpret_cast<uintptr_t>(pack.workspace) % 16 != 0) {
        refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "the workspace of %d bytes is at %p: it must be aligned to 16", int(plan.workspace_bytes),
               pack.workspace);
    }
    if (!is_on_device(pack.workspace, size_t(plan.workspace_bytes), stream)) {
        refuse(CUDNN_STATUS_EXECUTION_FAILED, "the workspace, %d bytes at %p, is not within a live block, or the stream does not exist",
               int(plan.workspace_bytes), pack.workspace);
    }
}

// Unordered blocks come in another order at every second execution. If a test says that long sequences are not ordered,
// theirs come in another order at every third.
Order order_of(const Plan &plan) {
    static const auto unordered_from = number_setting("STAND_IN_CUDNN_UNORDERED", UINT64_MAX);
    static unsigned executions = 0;
    if (plan.is_ordered && uint64_t(plan.queries) < unordered_from) {
        return Order::KEPT;
    }
    const bool is_other = executions++ % (plan.is_ordered ? 3 : 2) == 0;
    return is_other ? Order::REVERSED_IN_PARTS : Order::FORWARD_IN_PARTS;
}

}  // namespace

std::shared_ptr<const Pack> pack_of(const Descriptor &descriptor) {
    auto pack = std::make_shared<Pack>();
    const std::vector<int64_t> uids = descriptor.numbers(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const std::vector<void *> pointers = descriptor.pointers(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    if (uids.size() != pointers.size()) {
        refuse(CUDNN_STATUS_BAD_PARAM, "a pack has %zu numbers and %zu addresses", uids.size(), pointers.size());
    }
    for (size_t index = 0; index < uids.size(); index++) {
        if (!pack->pointers.emplace(uids[index], pointers[index]).second) {
            refuse(CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES, "a pack has tensor %d twice", int(uids[index]));
        }
    }
    const bool has_workspace = descriptor.has(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    pack->workspace = has_workspace ? descriptor.pointers(CUDNN_ATTR_VARIANT_PACK_WORKSPACE)[0] : nullptr;
    return pack;
}

// What is passed by value is read when the call is made, whenever the graph is computed.
static std::map<int64_t, float> scalars(const Graph &graph, const Pack &pack) {
    std::map<int64_t, float> found;
    for (const auto &[uid, tensor] : graph.tensors) {
        if (tensor.is_by_value) {
            found[uid] = *static_cast<const float *>(pack.pointers.at(uid));
        }
    }
    return found;
}

// Numbers of the device.
static std::vector<int64_t> numbers_of(const Tensor &tensor, const Pack &pack) {
    const auto *numbers = static_cast<const int32_t *>(pack.pointers.at(tensor.uid));
    return {numbers, numbers + tensor.elements()};
}

// By how much the numbers that say where sequences begin are multiplied: a gradient of every query head has those of the
// gradient that its heads are added up to.
static int64_t multiplier(const Graph &graph, const Tensor &tensor) {
    for (const SharedOperation &operation : graph.operations) {
        if (operation->is_reduction && operation->reads[0] == tensor && operation->writes[0].offsets) {
            return tensor.dims[1] / operation->writes[0].dims[1];
        }
    }
    return 1;
}

// How long sequences are and where they begin, as memory says now: one after the other, none longer than there is room for.
static Sequences sequences_of(const Graph &graph, const Pack &pack) {
    Sequences found;
    for (const SharedOperation &operation : graph.operations) {
        if (!operation->lengths.empty()) {
            found.lengths = numbers_of(operation->lengths[0], pack);
        }
    }
    for (const auto &[uid, tensor] : graph.tensors) {
        if (!tensor.offsets) {
            continue;
        }
        std::vector<int64_t> begins = numbers_of(*tensor.offsets, pack);
        const size_t axis = tensor.token_axis();
        for (int64_t &begin : begins) {
            begin *= multiplier(graph, tensor);
        }
        for (size_t number = 0; number < found.lengths.size(); number++) {
            const int64_t length = found.lengths[number];
            const bool is_within = length >= 0 && length <= tensor.dims[axis] && begins[number] >= 0 &&
                                   begins[number] + length * tensor.strides[axis] <= begins[number + 1];
            if (!is_within) {
                refuse(CUDNN_STATUS_EXECUTION_FAILED, "sequence %zu of tensor %d has %d tokens from element %d on, and the next begins at %d",
                       number, int(uid), int(length), int(begins[number]), int(begins[number + 1]));
            }
        }
        found.begins[uid] = std::move(begins);
    }
    return found;
}

// What can only be known of ragged tensors once memory has the numbers.
static void check_sequences(const Plan &plan, const Pack &pack, const Sequences &sequences, cudaStream_t stream) {
    for (const auto &[uid, begins] : sequences.begins) {
        const Tensor &tensor = plan.graph->tensors.at(uid);
        if (tensor.is_in_memory()) {
            check_live(tensor, pack.pointers.at(uid), sequences.span_bytes(tensor), stream);
        }
    }
    check_overlaps(*plan.graph, pack, span_of("the workspace", pack.workspace, size_t(plan.workspace_bytes)), sequences);
}

static void compute(const Plan &plan, const Pack &pack, std::map<int64_t, float> by_value, cudaStream_t stream) {
    Sequences sequences = sequences_of(*plan.graph, pack);
    if (!sequences.begins.empty()) {
        check_sequences(plan, pack, sequences, stream);
    }
    // Overwrite the workspace, as the real library would.
    if (plan.workspace_bytes > 0) {
        std::memset(pack.workspace, 0xff, size_t(plan.workspace_bytes));
    }
    std::map<int64_t, void *> pointers = pack.pointers;
    for (auto &[uid, value] : by_value) {
        pointers[uid] = &value;
    }
    Values values(std::move(pointers), std::move(sequences));
    const Order order = order_of(plan);
    for (const SharedOperation &operation : plan.graph->operations) {
        operation->compute(values, order);
    }
}

void execute(std::shared_ptr<const Plan> plan, const Pack &pack, cudaStream_t stream) {
    if (plan->is_described) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "a plan for a device that is described, and not there");
    }
    if (plan->capability != current_capability()) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH, "a plan for capability %d on a device of %d", plan->capability, current_capability());
    }
    check_pack(*plan->graph, pack, stream);
    check_workspace(*plan, pack, stream);
    if (!plan->is_ragged) {
        check_overlaps(*plan->graph, pack, span_of("the workspace", pack.workspace, size_t(plan->workspace_bytes)), {});
    }
    if (is_idle()) {
        return;
    }
    const auto work = [plan, pack, stream, by_value = scalars(*plan->graph, pack)] { compute(*plan, pack, by_value, stream); };
    if (!captures(stream, work)) {
        work();
    }
}

}  // namespace stand_in
