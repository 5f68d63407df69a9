// State of the stand-in for the driver: devices, the current context, and live handles.
#pragma once

#include "../settings.h"
#include "driver_api.h"

#include <mutex>
#include <set>
#include <vector>

// The primary context of a device.
struct CUctx_st {
    CUdevice device;
    int retained;
};

namespace stand_in {

// Held by every call while it reads or changes this state.
std::recursive_mutex &lock();

bool is_initialised();

// The devices, each by its context.
std::vector<CUctx_st> &contexts();

// The context of the calling thread; null if there is none.
CUcontext &current_context();

// Compute capability of every device: 90 for 9.0.
int capability();

// The driver's CUDA: 12020 for 12.2.
int driver_version();

// Most shared memory of a block, by default and where a function asks for more.
constexpr size_t SHARED_BYTES = 48 << 10;
size_t shared_bytes_max();

// Handles that were given out and not destroyed.
template <typename T> std::set<T *> &alive() {
    static std::set<T *> handles;
    return handles;
}

// How many calls this thread has made.
inline uint64_t &calls() {
    static thread_local uint64_t made = 0;
    return made;
}

// Whether there is work that never ends, as behind an exchange with a rank that is gone. Then nothing that is launched is done,
// and events that are recorded do not come.
bool is_held();

// Waits as long as there is such work, as calls do that wait for the device.
void wait_while_held();

// Takes a launch behind such work: as many as a driver takes, and then the caller waits. False without such work.
bool holds_launch();

// Prints everything that was not given back, a line each on stderr.
void report_what_is_left();

// Whether libraries have loaded code into a device's context.
bool has_loaded_code(CUdevice device);

// Whether the calling thread may make calls that need a context.
inline CUresult ready(const char *function) {
    if (!is_initialised()) {
        say(function, "cuInit has not been called");
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (current_context() == nullptr) {
        say(function, "no context is current");
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    return CUDA_SUCCESS;
}

// As `ready`, for a call that uses a handle.
template <typename T> CUresult ready(const char *function, T *handle) {
    const CUresult result = ready(function);
    if (result != CUDA_SUCCESS || alive<T>().count(handle) != 0) {
        return result;
    }
    say(function, "a handle that does not exist");
    return CUDA_ERROR_INVALID_HANDLE;
}

// The stream 0 is refused too: nothing orders it with streams that do not block, so nothing of ours belongs there.
CUresult ready_on(const char *function, CUstream stream);

}  // namespace stand_in

#define STAND_IN_CHECK(expression)              \
    do {                                        \
        const CUresult result_ = (expression);  \
        if (result_ != CUDA_SUCCESS) {          \
            return result_;                     \
        }                                       \
    } while (false)

// The first line of a call.
#define STAND_IN_ENTER(expression)                                     \
    const std::lock_guard<std::recursive_mutex> entered_(lock()); \
    ::stand_in::calls()++;                                                 \
    STAND_IN_CHECK(expression)
