// Streams that capture or are late, and the graphs that they capture.
#pragma once

#include "state.h"

#include <chrono>
#include <deque>
#include <functional>
#include <memory>

namespace stand_in {

// A piece of work in a graph, after others of the same graph.
struct Node {
    std::vector<size_t> after;
    std::function<CUresult()> work;
};

// The calls of streams while they capture.
struct Capture {
    CUstream origin;
    bool is_invalid = false;
    std::vector<Node> nodes;
    // The streams that joined by waiting, and the origin.
    std::set<CUstream> streams;
};

// Keeps the work that a stream is asked for, and returns true: as a node if the stream captures, for later if it is late.
// Else returns false, and the caller does the work now.
bool captures(CUstream stream, std::function<CUresult()> work);

// Does what late streams were asked for, because somebody waits for it: of one stream, of all, or up to an event.
CUresult catch_up(CUstream stream);
CUresult catch_up_all();
CUresult catch_up(CUevent event);

// For a call that may wait, or that no graph can hold: if this thread captures, an error, which invalidates the
// capture.
CUresult not_captured(const char *function);

}  // namespace stand_in

struct CUstream_st {
    int priority;
    std::shared_ptr<stand_in::Capture> capture;
    // The nodes that its next node depends on.
    std::vector<size_t> tail;
    // A late stream does nothing until somebody waits for it. What it was asked for and has not done, and how much it has.
    bool is_late;
    std::deque<std::function<CUresult()>> later;
    uint64_t done;

    uint64_t asked() const { return done + later.size(); }
};

struct CUevent_st {
    bool timed, recorded;
    std::chrono::steady_clock::time_point at;
    // How often it was queried since.
    uint64_t queries;
    // If it was recorded in a capturing stream, the nodes that it stands for; it is then never complete.
    std::shared_ptr<stand_in::Capture> capture;
    std::vector<size_t> tail;
    // Where it was recorded in a late stream: it comes when the stream has done so much. Null where it comes at once.
    CUstream late;
    uint64_t position;
    // Whether it was recorded behind work that never ends, and the call of a thread that last asked for it.
    bool is_held = false;
    uint64_t asked_at = 0;
};

struct CUgraph_st {
    std::vector<stand_in::Node> nodes;
    // How many streams took part.
    size_t streams;
};

struct CUgraphExec_st {
    std::vector<stand_in::Node> nodes;
    // Device memory that it holds since it was uploaded or first launched.
    uint64_t device_bytes = 0;
};

// For the libraries beside the driver, which find them by these names; no functions of NVIDIA's. From now on there is work that
// never ends, or no longer.
extern "C" void stand_in_hold(int holds);

// Whether a stream captures; then `run` is called with `data` whenever the graph is launched, and `drop` when the graph no longer
// needs `data`.
extern "C" int stand_in_captures(CUstream stream, int (*run)(void *data), void *data, void (*drop)(void *data));
