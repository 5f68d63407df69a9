// Streams and events. Every call is done at once, in the order of the calls, on whatever stream, unless it is captured
// (graphs.cpp). That is one of the orders that streams allow. To find a missing wait for an event, set
// STAND_IN_LATE_STREAMS: streams then do nothing until somebody waits for them.
#include "graphs.h"
#include "memory.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <unistd.h>

using Clock = std::chrono::steady_clock;

namespace stand_in {

CUresult ready_on(const char *function, CUstream stream) { return ready(function, stream); }

// Whether an event belongs to a capture that has not ended.
static bool is_captured(CUevent event) {
    return event->capture != nullptr && event->capture->origin->capture == event->capture;
}

// The effect of a wait on captures: none if neither side takes part in one.
static CUresult wait_in_capture(CUstream stream, CUevent event) {
    if (event->capture == nullptr) {
        if (stream->capture == nullptr || !event->recorded) {
            return CUDA_SUCCESS;
        }
        say("cuStreamWaitEvent", "a stream that captures waits for an event from before");
        stream->capture->is_invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!is_captured(event)) {
        say("cuStreamWaitEvent", "the event was captured, and never comes");
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (stream->capture != nullptr && stream->capture != event->capture) {
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    stream->capture = event->capture;
    stream->capture->streams.insert(stream);
    stream->tail.insert(stream->tail.end(), event->tail.begin(), event->tail.end());
    std::sort(stream->tail.begin(), stream->tail.end());
    stream->tail.erase(std::unique(stream->tail.begin(), stream->tail.end()), stream->tail.end());
    return CUDA_SUCCESS;
}

// Does what a late stream was asked for, up to a position.
static CUresult catch_up_to(CUstream stream, uint64_t position) {
    while (stream->done < position && !stream->later.empty()) {
        const std::function<CUresult()> work = std::move(stream->later.front());
        stream->later.pop_front();
        stream->done++;
        STAND_IN_CHECK(work());
    }
    return CUDA_SUCCESS;
}

CUresult catch_up(CUstream stream) { return catch_up_to(stream, stream->asked()); }

CUresult catch_up_all() {
    const std::set<CUstream> streams = alive<CUstream_st>();
    for (const CUstream stream : streams) {
        STAND_IN_CHECK(catch_up(stream));
    }
    return CUDA_SUCCESS;
}

// Whether an event is still to come. What a stream that is gone was asked for is done.
static bool is_to_come(CUevent event) {
    return event->late != nullptr && alive<CUstream_st>().count(event->late) != 0 && event->late->done < event->position;
}

CUresult catch_up(CUevent event) { return is_to_come(event) ? catch_up_to(event->late, event->position) : CUDA_SUCCESS; }

// A wait outside of captures: a late stream waits later, for where the event is now.
static CUresult wait_for_late(CUstream stream, CUevent event) {
    if (!is_to_come(event)) {
        return CUDA_SUCCESS;
    }
    const auto work = [of = event->late, position = event->position] {
        return alive<CUstream_st>().count(of) != 0 ? catch_up_to(of, position) : CUDA_SUCCESS;
    };
    if (stream->is_late) {
        stream->later.push_back(work);
        return CUDA_SUCCESS;
    }
    return work();
}

static std::atomic<bool> held{false};
static std::atomic<uint64_t> held_launches{0};

// What a driver takes ahead of the device before a launch waits.
const uint64_t LAUNCHES_AHEAD = 1024;

bool is_held() { return held; }

// A real driver would wait forever. A program that lets itself be held so long has lost; it ends, so that no test hangs.
constexpr auto HELD_MAX = std::chrono::minutes(5);

void wait_while_held() {
    const auto end = std::chrono::steady_clock::now() + HELD_MAX;
    while (held) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        if (std::chrono::steady_clock::now() > end) {
            say("the driver", "a call has waited for five minutes behind work that never ends");
            _exit(99);
        }
    }
}

bool holds_launch() {
    static std::atomic<uint64_t> launches{0};
    if (++launches == number_setting("STAND_IN_ENDLESS_LAUNCH", 0)) {
        stand_in_hold(1);
    }
    if (!held) {
        return false;
    }
    if (++held_launches > LAUNCHES_AHEAD) {
        say("cuLaunchKernel", "%llu launches are ahead of the device, and this one waits", (unsigned long long)LAUNCHES_AHEAD);
        wait_while_held();
    }
    return true;
}

// Whether STAND_IN_LATE_STREAMS names streams of this kind.
static bool are_late(const char *kind) {
    static const std::string late = setting("STAND_IN_LATE_STREAMS", "");
    return late == kind;
}

static CUresult create(CUstream *stream, unsigned int flags, int priority, const char *kind) {
    STAND_IN_ENTER(ready("cuStreamCreate"));
    if (flags > CU_STREAM_NON_BLOCKING) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *stream = new CUstream_st{priority, nullptr, {}, are_late(kind), {}, 0};
    alive<CUstream_st>().insert(*stream);
    return CUDA_SUCCESS;
}

// For a call that asks whether an event has come, or waits for it.
static CUresult may_come(const char *function, CUevent event) {
    STAND_IN_CHECK(not_captured(function));
    return event->capture != nullptr ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}

}  // namespace stand_in

using namespace stand_in;

namespace {

// The time on a virtual clock, on which products take the time that a test sets, and everything else takes none.
std::atomic<int64_t> passed_ns{0};

Clock::time_point now() {
    static const bool is_told = !setting("STAND_IN_ALGORITHM_US", "").empty();
    return is_told ? Clock::time_point(std::chrono::nanoseconds(passed_ns.load())) : Clock::now();
}

}  // namespace

extern "C" void stand_in_hold(int holds) {
    held_launches = 0;
    held = holds != 0;
}

extern "C" void stand_in_pass_time(double microseconds) { passed_ns += int64_t(1e3 * microseconds); }

extern "C" CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    return create(stream, flags, priority, "with priority");
}

extern "C" CUresult cuStreamCreate(CUstream *stream, unsigned int flags) { return create(stream, flags, 0, "plain"); }

extern "C" CUresult cuStreamDestroy_v2(CUstream stream) {
    STAND_IN_ENTER(ready_on("cuStreamDestroy", stream));
    STAND_IN_CHECK(catch_up(stream));
    alive<CUstream_st>().erase(stream);
    delete stream;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuStreamQuery(CUstream stream) {
    STAND_IN_ENTER(ready_on("cuStreamQuery", stream));
    STAND_IN_CHECK(not_captured("cuStreamQuery"));
    return stream->later.empty() && !is_held() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

extern "C" CUresult cuStreamSynchronize(CUstream stream) {
    wait_while_held();
    STAND_IN_ENTER(ready_on("cuStreamSynchronize", stream));
    STAND_IN_CHECK(not_captured("cuStreamSynchronize"));
    STAND_IN_CHECK(catch_up(stream));
    release_unused();
    return CUDA_SUCCESS;
}

extern "C" CUresult cuCtxSynchronize() {
    wait_while_held();
    STAND_IN_ENTER(ready("cuCtxSynchronize"));
    STAND_IN_CHECK(not_captured("cuCtxSynchronize"));
    STAND_IN_CHECK(catch_up_all());
    release_unused();
    return CUDA_SUCCESS;
}

extern "C" CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    STAND_IN_ENTER(ready_on("cuStreamWaitEvent", stream));
    STAND_IN_CHECK(ready("cuStreamWaitEvent", event));
    STAND_IN_CHECK(flags == 0 ? wait_in_capture(stream, event) : CUDA_ERROR_INVALID_VALUE);
    return wait_for_late(stream, event);
}

// Waits in this thread, where a device would make the stream wait. It does not hold the lock, since the thread that
// raises the number may make calls.
extern "C" CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    const auto *number = reinterpret_cast<const volatile uint32_t *>(address);
    {
        STAND_IN_ENTER(ready_on("cuStreamWaitValue32", stream));
        if (!is_locked_memory(const_cast<const uint32_t *>(number), sizeof *number) || address % sizeof *number != 0) {
            say("cuStreamWaitValue32", "no number in page-locked memory is at %#llx", address);
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (flags != CU_STREAM_WAIT_VALUE_GEQ) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        STAND_IN_CHECK(not_captured("cuStreamWaitValue32"));
        STAND_IN_CHECK(catch_up(stream));
    }
    while (static_cast<int32_t>(__atomic_load_n(number, __ATOMIC_ACQUIRE) - value) < 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return CUDA_SUCCESS;
}

extern "C" CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    STAND_IN_ENTER(ready("cuEventCreate"));
    if (flags > (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *event = new CUevent_st{(flags & CU_EVENT_DISABLE_TIMING) == 0, false, {}, 0, nullptr, {}, nullptr, 0};
    alive<CUevent_st>().insert(*event);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuEventDestroy_v2(CUevent event) {
    STAND_IN_ENTER(ready("cuEventDestroy", event));
    alive<CUevent_st>().erase(event);
    delete event;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuEventRecord(CUevent event, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuEventRecord", stream));
    STAND_IN_CHECK(ready("cuEventRecord", event));
    event->recorded = true;
    event->at = now();
    event->queries = 0;
    event->capture = stream->capture;
    event->tail = stream->tail;
    event->late = stream->is_late && stream->capture == nullptr ? stream : nullptr;
    event->position = stream->asked();
    event->is_held = is_held();
    return CUDA_SUCCESS;
}

// An event that was never recorded is complete; others are complete after so many queries. A thread that asks twice in a row waits
// for a late stream.
extern "C" CUresult cuEventQuery(CUevent event) {
    STAND_IN_ENTER(ready("cuEventQuery", event));
    STAND_IN_CHECK(may_come("cuEventQuery", event));
    if (event->asked_at + 1 == calls()) {
        STAND_IN_CHECK(catch_up(event));
    }
    event->asked_at = calls();
    if (event->is_held && is_held()) {
        return CUDA_ERROR_NOT_READY;
    }
    const bool late = event->recorded && event->queries++ < number_setting("STAND_IN_LATE_EVENTS", 0);
    return late || is_to_come(event) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

extern "C" CUresult cuEventSynchronize(CUevent event) {
    wait_while_held();
    STAND_IN_ENTER(ready("cuEventSynchronize", event));
    STAND_IN_CHECK(may_come("cuEventSynchronize", event));
    STAND_IN_CHECK(catch_up(event));
    release_unused();
    return CUDA_SUCCESS;
}

// The version that every driver has: one that is not there yet on drivers before CUDA 12.8 is not here either.
extern "C" CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    STAND_IN_ENTER(ready("cuEventElapsedTime", start));
    STAND_IN_CHECK(ready("cuEventElapsedTime", end));
    for (const CUevent event : {start, end}) {
        if (!event->timed || !event->recorded) {
            say("cuEventElapsedTime", "an event that was not recorded, or without a time");
            return CUDA_ERROR_INVALID_HANDLE;
        }
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
    return CUDA_SUCCESS;
}
