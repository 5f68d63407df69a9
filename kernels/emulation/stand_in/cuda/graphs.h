// Streams that capture or are late, and what comes of it.
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

// What streams are asked for while they capture.
struct Capture {
    CUstream origin;
    bool is_invalid = false;
    std::vector<Node> nodes;
    // Those that have come to it by waiting, the origin among them.
    std::set<CUstream> streams;
};

// Keeps work that a stream is asked for: as a node where the stream captures, for later where it is late. False where it is neither,
// and the work is to be done now.
bool captures(CUstream stream, std::function<CUresult()> work);

// What was asked of late streams is done when somebody waits for it: of one, of all, or up to where an event was recorded.
CUresult catch_up(CUstream stream);
CUresult catch_up_all();
CUresult catch_up(CUevent event);

// For a call that may wait, or that no graph can hold: an error, which spoils the capture, where this thread captures.
CUresult not_captured(const char *function);

}  // namespace stand_in

struct CUstream_st {
    int priority;
    std::shared_ptr<stand_in::Capture> capture;
    // What its next node comes after.
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
    // How often somebody has looked at it since.
    uint64_t queries;
    // Where it was recorded in a stream that captured: it stands for these nodes, and never comes.
    std::shared_ptr<stand_in::Capture> capture;
    std::vector<size_t> tail;
    // Where it was recorded in a late stream: it comes when the stream has done so much. Null where it comes at once.
    CUstream late;
    uint64_t position;
};

struct CUgraph_st {
    std::vector<stand_in::Node> nodes;
    // How many streams took part.
    size_t streams;
};

struct CUgraphExec_st {
    std::vector<stand_in::Node> nodes;
    // What it has taken of the device since it was uploaded or first launched.
    uint64_t device_bytes = 0;
};

// For the libraries beside the driver, which find it by this name: whether a stream captures; then `run` is called with
// `data` whenever the graph is launched, and `drop` when nobody needs it any more. No function of NVIDIA's.
extern "C" int stand_in_captures(CUstream stream, int (*run)(void *data), void *data, void (*drop)(void *data));
