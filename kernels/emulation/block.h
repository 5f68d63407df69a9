// A block of threads that runs, and where its threads wait.
#pragma once

#include "emulation.h"
#include "fiber.h"
#include "tensor_cores.h"

#include <memory>
#include <string>
#include <vector>

namespace emulation {

constexpr unsigned WARP = 32;
// A block may have this much shared memory on Hopper, and this much of it statically.
constexpr size_t SHARED_BYTES_MAX = 227 << 10;
constexpr size_t STATIC_SHARED_BYTES_MAX = 48 << 10;

enum class State { Ready, AtBarrier, AtExchange, Finished };

// A copy to shared memory that its thread has not waited for.
struct Copy {
    SharedArray *array;
    int64_t index;
    const void *source;
    Place place;
};

struct Thread {
    uint3 index;
    unsigned number;
    State state;
    Place place;
    unsigned mask;
    bool vote;
    std::vector<Copy> copies;
};

struct Warp {
    // Two of each lane: a lane may be at the next exchange while others still read this one's values.
    uint64_t values[2][WARP];
    Registers registers[2][WARP];
    unsigned turn;
    // Counts what parts the accesses of its lanes from each other.
    unsigned epoch;
};

// When a thread did something, in epochs of its block and its warp.
struct Moment {
    int thread = -1;
    unsigned block_epoch = 0, warp_epoch = 0;
};

// What is known of an element of shared memory.
struct Cell {
    Moment written, read;
    // Whether other threads of the reader's warp have read it since the same barrier, and threads of other warps.
    bool read_by_lanes = false, read_by_warps = false;
};

struct SharedArray {
    Place place;
    const void *type;
    size_t element_bytes, count, offset;
    // Addresses were given away: accesses can no longer be told.
    bool unchecked = false;
    std::vector<Cell> cells;
};

struct Block {
    const char *kernel = nullptr;
    std::function<void()> body;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<std::unique_ptr<Fiber>> fibers;
    Thread *running = nullptr;
    unsigned epoch = 0;
    Votes votes{};
    std::string error;

    alignas(128) unsigned char memory[SHARED_BYTES_MAX + (16 << 10)];
    std::vector<std::unique_ptr<SharedArray>> arrays;
    size_t memory_used = 0, dynamic_bytes = 0, static_bytes = 0;
    SharedArray *dynamic = nullptr;

    // Runs all threads to their end, or to an error. `reversed`: the last thread first.
    void run(bool reversed);

    void prepare(size_t shared_bytes);
    SharedArray *add_array(Place place, const void *type, size_t element_bytes, size_t count);
    void check_guards();
    void suspend();

  private:
    bool release_warp(size_t warp);
    bool release_barrier();
    std::string who_waits() const;
    void start_fibers();
};

// The block that runs on this thread of the host, between the start and the end of a launch.
extern __thread Block *current_block;
inline Block &current() { return *current_block; }

}  // namespace emulation
