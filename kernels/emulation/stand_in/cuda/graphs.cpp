// Capture: a stream that captures runs nothing; each call becomes a node of a graph, with its arguments. A launched
// graph runs its nodes in an order that its edges allow but the program did not have: of the nodes that can run, the
// last first. So results are wrong if only the program's order ordered two calls, or if a value was read during the
// capture. As NVIDIA documents it, a stream joins a capture by waiting for an event of it. A wait for an earlier event,
// a call that waits, and one that loads or allocates invalidate the capture. At its end all streams that joined must
// have been waited for.
#include "graphs.h"
#include "memory.h"

#include <algorithm>
#include <fstream>

namespace stand_in {

namespace {

// The capture that this thread began, while it lasts: the mode of all captures is that of one thread.
std::weak_ptr<Capture> &of_this_thread() {
    static thread_local std::weak_ptr<Capture> capture;
    return capture;
}

// Adds a line to the file that STAND_IN_GRAPHS names.
void note(const std::string &what) {
    const std::string path = setting("STAND_IN_GRAPHS", "");
    if (!path.empty()) {
        std::ofstream(path, std::ios::app) << what << '\n';
    }
}

// All nodes that some nodes depend on, these included.
std::set<size_t> reached(const Capture &capture, const std::vector<size_t> &from) {
    std::set<size_t> found;
    std::vector<size_t> left = from;
    while (!left.empty()) {
        const size_t node = left.back();
        left.pop_back();
        if (found.insert(node).second) {
            const std::vector<size_t> &after = capture.nodes[node].after;
            left.insert(left.end(), after.begin(), after.end());
        }
    }
    return found;
}

// Whether the origin has waited for all work of the other streams.
bool is_joined(const Capture &capture) {
    const std::set<size_t> found = reached(capture, capture.origin->tail);
    const auto waited_for = [&](CUstream stream) {
        const std::vector<size_t> &tail = stream->tail;
        return std::all_of(tail.begin(), tail.end(), [&](size_t node) { return found.count(node) != 0; });
    };
    return std::all_of(capture.streams.begin(), capture.streams.end(), waited_for);
}

// Runs nodes: of those that can run, the last.
CUresult run(const std::vector<Node> &nodes) {
    std::vector<size_t> waits(nodes.size(), 0);
    std::vector<std::vector<size_t>> before(nodes.size());
    std::set<size_t> ready;
    for (size_t node = 0; node < nodes.size(); node++) {
        waits[node] = nodes[node].after.size();
        for (const size_t other : nodes[node].after) {
            before[other].push_back(node);
        }
        if (waits[node] == 0) {
            ready.insert(node);
        }
    }
    while (!ready.empty()) {
        const size_t node = *ready.rbegin();
        ready.erase(node);
        STAND_IN_CHECK(nodes[node].work());
        for (const size_t next : before[node]) {
            if (--waits[next] == 0) {
                ready.insert(next);
            }
        }
    }
    return CUDA_SUCCESS;
}

// Takes a graph's memory of the device, unless it has it.
CUresult upload(CUgraphExec graph) {
    const uint64_t bytes = graph->nodes.size() * number_setting("STAND_IN_GRAPH_NODE_BYTES", 0);
    STAND_IN_CHECK(take_memory(bytes - graph->device_bytes));
    graph->device_bytes = bytes;
    return CUDA_SUCCESS;
}

}  // namespace

bool captures(CUstream stream, std::function<CUresult()> work) {
    const std::lock_guard<std::recursive_mutex> entered(lock());
    if (stream->capture == nullptr) {
        if (stream->is_late) {
            stream->later.push_back(std::move(work));
        }
        return stream->is_late;
    }
    std::vector<Node> &nodes = stream->capture->nodes;
    nodes.push_back({stream->tail, std::move(work)});
    stream->tail = {nodes.size() - 1};
    return true;
}

CUresult not_captured(const char *function) {
    const std::shared_ptr<Capture> capture = of_this_thread().lock();
    if (capture == nullptr) {
        return CUDA_SUCCESS;
    }
    say(function, "a stream of this thread captures");
    capture->is_invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

}  // namespace stand_in

using namespace stand_in;

extern "C" int stand_in_captures(CUstream stream, int (*run)(void *data), void *data, void (*drop)(void *data)) {
    const std::shared_ptr<void> held(data, drop);
    return captures(stream, [run, held] { return run(held.get()) == 0 ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_FAILED; });
}

extern "C" CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    STAND_IN_ENTER(ready_on("cuStreamBeginCapture", stream));
    if (mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL || stream->capture != nullptr) {
        say("cuStreamBeginCapture", "a mode that is not built, or a stream that captures already");
        return CUDA_ERROR_INVALID_VALUE;
    }
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = stream;
    stream->capture->streams = {stream};
    stream->tail.clear();
    of_this_thread() = stream->capture;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    STAND_IN_ENTER(ready_on("cuStreamEndCapture", stream));
    *graph = nullptr;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (capture == nullptr || capture->origin != stream) {
        return capture == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    const bool joined = is_joined(*capture);
    for (const CUstream of : capture->streams) {
        of->capture = nullptr;
        of->tail.clear();
    }
    of_this_thread().reset();
    if (capture->is_invalid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (!joined) {
        say("cuStreamEndCapture", "work of another stream is not waited for");
        return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    *graph = new CUgraph_st{std::move(capture->nodes), capture->streams.size()};
    alive<CUgraph_st>().insert(*graph);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuGraphInstantiateWithFlags(CUgraphExec *ready_graph, CUgraph graph, unsigned long long flags) {
    STAND_IN_ENTER(ready("cuGraphInstantiate", graph));
    if (flags != 0 || graph->nodes.size() > number_setting("STAND_IN_GRAPH_NODES_MAX", UINT64_MAX)) {
        return flags != 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *ready_graph = new CUgraphExec_st{graph->nodes};
    alive<CUgraphExec_st>().insert(*ready_graph);
    note("captured " + std::to_string(graph->nodes.size()) + " " + std::to_string(graph->streams));
    return CUDA_SUCCESS;
}

extern "C" CUresult cuGraphDestroy(CUgraph graph) {
    STAND_IN_ENTER(ready("cuGraphDestroy", graph));
    alive<CUgraph_st>().erase(graph);
    delete graph;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuGraphExecDestroy(CUgraphExec graph) {
    STAND_IN_ENTER(ready("cuGraphExecDestroy", graph));
    alive<CUgraphExec_st>().erase(graph);
    give_back_memory(graph->device_bytes);
    delete graph;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuGraphUpload(CUgraphExec graph, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuGraphUpload", stream));
    STAND_IN_CHECK(ready("cuGraphUpload", graph));
    STAND_IN_CHECK(not_captured("cuGraphUpload"));
    return upload(graph);
}

extern "C" CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    {
        STAND_IN_ENTER(ready_on("cuGraphLaunch", stream));
        STAND_IN_CHECK(ready("cuGraphLaunch", graph));
        STAND_IN_CHECK(not_captured("cuGraphLaunch"));
        STAND_IN_CHECK(upload(graph));
    }
    note("launched " + std::to_string(graph->nodes.size()));
    const auto work = [nodes = graph->nodes] { return run(nodes); };
    return captures(stream, work) ? CUDA_SUCCESS : work();
}
