// The engines for attention, as cuDNN 9.28 was seen to answer for described devices: which engine and knobs there are for
// which capability, and how much workspace each takes.
#include "plan.h"
#include "device.h"
#include "driver.h"

#include <algorithm>

namespace stand_in {

namespace {

enum class Pattern { FORWARD, BACKWARD };

// What a workspace depends on.
struct Extent {
    int64_t batch, heads, queries, keys;
    // Bytes of the gradients of keys and values of every query head, which a sum over heads makes smaller.
    int64_t full_head_bytes;
    // Whether the gradient of queries is added up in f32 of memory.
    bool accumulates;
    // Whether numbers say where sequences begin, and in how many results of products.
    bool is_ragged;
    int64_t ragged_products;
};

// The alignment of the parts of a workspace.
const int64_t PIECE_BYTES = 128;

int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Where each of so many sequences lies in some tensors, and how long it is.
int64_t described_bytes(const Extent &extent, int64_t tensors, int64_t sequences) {
    return extent.is_ragged ? tensors * up(64 * (sequences + 1), PIECE_BYTES) + up(4 * sequences, PIECE_BYTES) : 0;
}

int64_t hopper_forward(const Extent &extent) { return 256 + described_bytes(extent, 4, std::max<int64_t>(extent.batch, 64)); }

int64_t hopper_backward(const Extent &extent) {
    const int64_t dp_bytes = 2 * extent.batch * extent.heads * up(extent.queries, 64) * up(extent.keys, 128);
    return 256 + extent.full_head_bytes + (extent.accumulates ? 0 : dp_bytes);
}

int64_t hopper_ordered(const Extent &extent) {
    const int64_t turns = up(8 * extent.batch * extent.heads * (up(extent.queries, 64) / 64), PIECE_BYTES);
    return 256 + extent.full_head_bytes + turns + described_bytes(extent, 4 + extent.ragged_products, extent.batch);
}

int64_t blackwell_forward(const Extent &) { return 0; }

int64_t blackwell_ordered(const Extent &extent) { return extent.full_head_bytes == 0 ? 0 : 2 * extent.full_head_bytes + 128; }

// Whether an engine takes graphs that add up the gradient of queries in f32 in memory.
enum class Accumulator { NEEDED, REFUSED, EITHER };

using Knobs = std::map<int, int64_t>;

Knobs knobs(int64_t tile_m, int64_t tile_n, int64_t configuration) {
    return {{CUDNN_KNOB_TYPE_TILE_M, tile_m}, {CUDNN_KNOB_TYPE_TILE_N, tile_n}, {CUDNN_KNOB_TYPE_KERNEL_CFG, configuration},
            {CUDNN_KNOB_TYPE_STREAM_K, 0}, {CUDNN_KNOB_TYPE_TILE_CGA_M, 0}};
}

Knobs staged(Knobs knobs, int64_t stages) {
    knobs[CUDNN_KNOB_TYPE_STAGES] = stages;
    return knobs;
}

// An engine with its knobs, for a pattern.
struct Way {
    Pattern pattern;
    int64_t engine;
    // Major compute capability.
    int capability;
    uint64_t since;
    Knobs knobs;
    Accumulator accumulator;
    bool is_ordered;
    // Whether the heuristic offers it; else a program must ask for it by number.
    bool is_offered;
    int64_t (*workspace_bytes)(const Extent &);
};

const std::vector<Way> &ways() {
    static const std::vector<Way> known = {
        {Pattern::FORWARD, 9, 9, 91300, knobs(3, 2, 1), Accumulator::EITHER, true, true, hopper_forward},
        {Pattern::BACKWARD, 6, 9, 90000, knobs(2, 1, 2), Accumulator::REFUSED, true, true, hopper_backward},
        {Pattern::BACKWARD, 6, 9, 90000, knobs(2, 1, 2), Accumulator::NEEDED, false, true, hopper_backward},
        {Pattern::BACKWARD, 6, 9, 92500, staged(knobs(2, 1, 2), 4), Accumulator::NEEDED, true, false, hopper_ordered},
        {Pattern::FORWARD, 10, 10, 91300, knobs(3, 2, 1), Accumulator::EITHER, true, true, blackwell_forward},
        {Pattern::BACKWARD, 5, 10, 91800, staged(knobs(3, 2, 2), 2), Accumulator::REFUSED, true, false, blackwell_ordered},
    };
    return known;
}

std::vector<const Operation *> products(const Graph &graph) {
    std::vector<const Operation *> found;
    for (const SharedOperation &operation : graph.operations) {
        if (operation->is_product) {
            found.push_back(operation.get());
        }
    }
    return found;
}

Pattern pattern_of(const Graph &graph) {
    const size_t count = products(graph).size();
    const bool is_attention = graph.operations.size() == 1 && graph.operations[0]->is_attention;
    if (is_attention || count == 2) {
        return Pattern::FORWARD;
    }
    if (count == 5) {
        return Pattern::BACKWARD;
    }
    refuse(CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN, "%d operations with %d products are neither a forward nor a backward attention",
           int(graph.operations.size()), int(count));
}

bool is_ragged(const Graph &graph) {
    return std::any_of(graph.tensors.begin(), graph.tensors.end(), [](const auto &named) { return named.second.offsets != nullptr; });
}

// The first product in the graph's order makes scores, since all others depend on scores.
Extent extent_of(const Graph &graph) {
    Extent extent = {};
    extent.is_ragged = is_ragged(graph);
    if (graph.operations[0]->is_attention) {
        extent.batch = graph.operations[0]->writes.back().dims[0];
    }
    for (const Operation *operation : products(graph)) {
        const Tensor &made = operation->writes[0];
        if (extent.batch == 0) {
            extent.batch = made.dims[0];
            extent.heads = made.dims[1];
            extent.queries = operation->rows;
            extent.keys = operation->columns;
        }
        extent.ragged_products += made.offsets ? 1 : 0;
        extent.accumulates |= made.is_in_memory() && made.type == CUDNN_DATA_FLOAT;
        for (const SharedOperation &other : graph.operations) {
            if (other->is_reduction && other->reads[0] == made && made.is_virtual) {
                extent.full_head_bytes += up(int64_t(made.elements() * made.element_bytes()), PIECE_BYTES);
            }
        }
    }
    return extent;
}

// Where numbers say where sequences begin, they do in everything of bf16, and every product knows how long sequences are.
void check_ragged(const Graph &graph) {
    for (const auto &[uid, tensor] : graph.tensors) {
        if (tensor.is_in_memory() && tensor.type == CUDNN_DATA_BFLOAT16 && !tensor.offsets) {
            refuse(CUDNN_STATUS_NOT_SUPPORTED_LAYOUT, "tensor %d is not ragged, and others are", int(uid));
        }
    }
    for (const SharedOperation &operation : graph.operations) {
        const auto &lengths = operation->lengths;
        if ((operation->is_product || operation->is_attention) && (lengths.size() != 2 || !(lengths[0] == lengths[1]))) {
            refuse(CUDNN_STATUS_NOT_SUPPORTED, "a ragged layout without one length of queries and keys for each sequence: %zu are given",
                   lengths.size());
        }
        for (const Tensor &length : lengths) {
            if (length.type != CUDNN_DATA_INT32 || length.dims != Sizes{operation->writes.back().dims[0], 1, 1, 1}) {
                refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d, %s of type %d, is no i32 for each sequence", int(length.uid),
                       written(length.dims).c_str(), int(length.type));
            }
        }
    }
}

// Graphs that no engine takes, on any device.
void check_support(const Graph &graph) {
    if (is_ragged(graph)) {
        check_ragged(graph);
    }
    for (const auto &[uid, tensor] : graph.tensors) {
        if (!tensor.is_in_memory() || tensor.type != CUDNN_DATA_BFLOAT16) {
            continue;
        }
        const auto inner = std::find(tensor.strides.begin(), tensor.strides.end(), 1);
        const int64_t head_dim = inner == tensor.strides.end() ? 0 : tensor.dims[size_t(inner - tensor.strides.begin())];
        if (head_dim % 8 != 0 || head_dim < 8 || head_dim > 256) {
            refuse(CUDNN_STATUS_NOT_SUPPORTED_SHAPE, "tensor %d has heads of %d: they must be multiples of 8 up to 256", int(uid), int(head_dim));
        }
        for (const int64_t stride : tensor.strides) {
            if (stride != 1 && stride % 8 != 0) {
                refuse(CUDNN_STATUS_NOT_SUPPORTED_LAYOUT, "tensor %d has strides %s: but for one they must be multiples of 8", int(uid),
                       written(tensor.strides).c_str());
            }
        }
        if (tensor.alignment_bytes < 16) {
            refuse(CUDNN_STATUS_NOT_SUPPORTED_LAYOUT, "tensor %d is aligned to %d bytes, not to 16", int(uid), int(tensor.alignment_bytes));
        }
    }
    if (pattern_of(graph) == Pattern::BACKWARD && extent_of(graph).queries == 1) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED_SHAPE, "the backward pass of one query");
    }
}

bool takes(const Way &way, const Graph &graph, int capability) {
    if (way.pattern != pattern_of(graph) || way.capability != capability / 10 || version() < way.since) {
        return false;
    }
    const bool accumulates = extent_of(graph).accumulates;
    return way.accumulator == Accumulator::EITHER || accumulates == (way.accumulator == Accumulator::NEEDED);
}

std::shared_ptr<const Plan> plan_by(const Way &way, const Engine &engine) {
    auto plan = std::make_shared<Plan>();
    plan->graph = engine.graph;
    plan->workspace_bytes = way.workspace_bytes(extent_of(*engine.graph));
    plan->is_ordered = way.is_ordered;
    plan->queries = extent_of(*engine.graph).queries;
    plan->is_ragged = is_ragged(*engine.graph);
    plan->capability = engine.capability;
    plan->is_described = engine.is_described;
    return plan;
}

void check_capability(int capability) {
    if (capability < 90 || capability >= 110) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH, "the stand-in has engines for capabilities 9 and 10, not %d.%d", capability / 10,
               capability % 10);
    }
}

void tell_configuration(Descriptor &descriptor, const Plan &plan) {
    tell(descriptor, CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, CUDNN_TYPE_INT64, {plan.workspace_bytes});
    tell(descriptor, CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED, CUDNN_TYPE_INT32, {227 << 10});
}

void tell_notes(Descriptor &engine) {
    tell(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, {CUDNN_NUMERICAL_NOTE_TENSOR_CORE});
    tell(engine, CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE, {CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION});
}

// A configuration from the heuristic: it is finalized, though no call set its attributes.
Shared offered(const Way &way, const Descriptor &heuristics, int capability) {
    auto engine = std::make_shared<Descriptor>();
    engine->kind = CUDNN_BACKEND_ENGINE_DESCRIPTOR;
    engine->finalized = true;
    tell(*engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, heuristics.descriptors(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH));
    tell(*engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, {way.engine});
    tell_notes(*engine);
    auto made = std::make_shared<Engine>();
    made->graph = heuristics.made_of<Graph>(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
    made->index = way.engine;
    made->capability = capability;
    made->is_described = described_by(heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP) != nullptr;
    engine->made = made;
    std::vector<Shared> choices;
    for (const auto &[type, value] : way.knobs) {
        auto choice = std::make_shared<Descriptor>();
        choice->kind = CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR;
        choice->finalized = true;
        tell(*choice, CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, {type});
        tell(*choice, CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, {value});
        choices.push_back(choice);
    }
    auto configuration = std::make_shared<Descriptor>();
    configuration->kind = CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
    configuration->finalized = true;
    tell(*configuration, CUDNN_ATTR_ENGINECFG_ENGINE, {engine});
    tell(*configuration, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, choices);
    const auto plan = plan_by(way, *made);
    tell_configuration(*configuration, *plan);
    configuration->made = plan;
    return configuration;
}

}  // namespace

std::shared_ptr<const Engine> engine_of(Descriptor &descriptor) {
    auto engine = std::make_shared<Engine>();
    engine->graph = descriptor.made_of<Graph>(CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
    engine->index = descriptor.number(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, -1);
    engine->capability = capability_for(descriptor, CUDNN_ATTR_ENGINE_DEVICEPROP);
    engine->is_described = described_by(descriptor, CUDNN_ATTR_ENGINE_DEVICEPROP) != nullptr;
    check_capability(engine->capability);
    check_written(*engine->graph, NONE);
    check_support(*engine->graph);
    const bool exists = std::any_of(ways().begin(), ways().end(), [&](const Way &way) {
        return way.engine == engine->index && takes(way, *engine->graph, engine->capability);
    });
    if (!exists) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "engine %d does not take this graph on capability %d.%d in version %d", int(engine->index),
               engine->capability / 10, engine->capability % 10, int(version()));
    }
    tell_notes(descriptor);
    return engine;
}

std::shared_ptr<const Plan> configuration_of(Descriptor &descriptor) {
    const auto engine = descriptor.made_of<Engine>(CUDNN_ATTR_ENGINECFG_ENGINE);
    Knobs chosen;
    std::string text;
    for (const Shared &choice : descriptor.descriptors(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES)) {
        const int type = int(choice->number(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, 0));
        const int64_t value = choice->number(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, 0);
        if (!chosen.emplace(type, value).second) {
            refuse(CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES, "knob %d is there twice", type);
        }
        text += " " + std::to_string(type) + "=" + std::to_string(value);
    }
    for (const Way &way : ways()) {
        if (way.engine == engine->index && way.knobs == chosen && takes(way, *engine->graph, engine->capability)) {
            const auto plan = plan_by(way, *engine);
            tell_configuration(descriptor, *plan);
            return plan;
        }
    }
    refuse(CUDNN_STATUS_NOT_SUPPORTED, "engine %d has no knobs%s for this graph in version %d", int(engine->index), text.c_str(), int(version()));
}

std::shared_ptr<const Plan> plan_of(Descriptor &descriptor) {
    const auto plan = descriptor.made_of<Plan>(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    const auto device = described_by(descriptor, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
    if (device && device->capability != plan->capability) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH, "a plan for capability %d of an engine for %d", device->capability, plan->capability);
    }
    // A plan for a present device loads its code.
    if (!plan->is_described && !take_code_memory()) {
        refuse(CUDNN_STATUS_INTERNAL_ERROR, "the device has no room for the code of a plan");
    }
    tell(descriptor, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, {plan->workspace_bytes});
    return plan;
}

void find_configurations(Descriptor &heuristics) {
    const auto graph = heuristics.made_of<Graph>(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
    const int capability = capability_for(heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP);
    check_capability(capability);
    check_written(*graph, NONE);
    check_support(*graph);
    std::vector<Shared> found;
    for (const Way &way : ways()) {
        if (way.is_offered && takes(way, *graph, capability)) {
            found.push_back(offered(way, heuristics, capability));
        }
    }
    tell(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, found);
}

}  // namespace stand_in
