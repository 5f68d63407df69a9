// Which threads touched a piece of memory: only as much as is needed to tell whether the next access is a race.
#pragma once

#include <cstdint>

namespace emulation {

constexpr unsigned WARP = 32;

// When a thread does something. The clock ticks when a launch or a block begins, and when threads meet at a barrier or
// an exchange. If two threads have met, everything with an earlier tick comes before all that either does afterwards.
struct Moment {
    uint32_t clock;
    // The ticks at which the launch and the block began, and its threads and those of the warp last met.
    uint32_t launch, block, barrier, exchange;
    uint16_t thread;
};

// A thread, and when it touched the memory; a time before the clock's first tick means no thread.
struct Toucher {
    uint32_t clock = 0;
    uint16_t thread = 0;

    explicit operator bool() const { return clock != 0; }
};

// The accesses of one kind since some tick. Older ones are ignored, so nothing ever has to be cleared.
class History {
  public:
    bool has_any(uint32_t since) const { return last >= since; }

    // A thread whose access may come before or after one at this moment. Blocks never meet.
    Toucher rival(const Moment &now, uint32_t since) const {
        if (!has_any(since)) {
            return {};
        }
        if (first < now.block) {
            return {first, first_thread};
        }
        const bool by_lane = is_in_warp(last_thread, now);
        if (last_thread != now.thread && last >= (by_lane ? now.exchange : now.barrier)) {
            return {last, last_thread};
        }
        const bool by_others = (by_warps && last >= now.barrier) || (by_lanes && last >= now.exchange);
        return by_others ? Toucher{last, other_thread} : Toucher{};
    }

    void note(const Moment &now, uint32_t since) {
        if (!has_any(since)) {
            first = now.clock;
            first_thread = now.thread;
        }
        if (!has_any(since) || last < now.barrier) {
            by_lanes = by_warps = false;
        } else if (!is_in_warp(last_thread, now)) {
            by_warps = true;
            other_thread = last_thread;
        } else if (last < now.exchange) {
            by_lanes = false;
        } else if (last_thread != now.thread) {
            by_lanes = true;
            other_thread = by_warps ? other_thread : last_thread;
        }
        last = now.clock;
        last_thread = now.thread;
    }

  private:
    static bool is_in_warp(unsigned thread, const Moment &now) { return thread / WARP == now.thread / WARP; }

    uint32_t first = 0, last = 0;
    uint16_t first_thread, last_thread;
    // Since the last thread's block, or warp, has met: one of another warp, if any has touched the memory, or else
    // another lane of the last thread's warp.
    uint16_t other_thread;
    bool by_warps = false, by_lanes = false;
};

}  // namespace emulation
