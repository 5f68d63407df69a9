// Engines, their configurations, and plans: what the library has for a graph on a device.
#pragma once

#include "graph.h"

namespace stand_in {

struct Engine : Made {
    std::shared_ptr<const Graph> graph;
    int64_t index;
    int capability;
    // For a device that is described, not present.
    bool is_described;
};

// A configuration, and the plan that is made of it.
struct Plan : Made {
    std::shared_ptr<const Graph> graph;
    int64_t workspace_bytes;
    // Whether sums in memory are added up in an order that only depends on the shape.
    bool is_ordered;
    // Tokens of a sequence.
    int64_t queries;
    // Whether numbers on the device say where sequences begin.
    bool is_ragged;
    // Compute capability of the devices that it is for.
    int capability;
    // Whether the device is only described, so that no code is loaded.
    bool is_described;
};

std::shared_ptr<const Engine> engine_of(Descriptor &descriptor);
std::shared_ptr<const Plan> configuration_of(Descriptor &descriptor);
std::shared_ptr<const Plan> plan_of(Descriptor &descriptor);

// Tells the configurations that the library would choose, best first.
void find_configurations(Descriptor &heuristics);

// Engines of all graphs together, as the real library counts.
const int64_t ENGINES = 22;

}  // namespace stand_in
