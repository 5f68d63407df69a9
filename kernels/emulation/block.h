// The running block of threads, and where its threads wait.
#pragma once

#include "emulation.h"
#include "fiber.h"
#include "global.h"
#include "registry.h"
#include "tensor_cores.h"

#include <memory>
#include <string>
#include <vector>

namespace emulation {

constexpr size_t THREADS_MAX = 1024;
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
    Moment begin;
    // Groups that the thread had closed when it asked for this copy.
    unsigned group;
};

struct Thread {
    uint3 index;
    unsigned number;
    State state = State::Ready;
    Place place = {"", 0};
    unsigned mask = 0;
    bool vote = false;
    std::vector<Copy> copies;
    unsigned copy_groups;

    unsigned lane() const { return number % WARP; }
};

struct Warp {
    // Two values of each lane, since a lane may be at the next exchange while others still read this one's values.
    uint64_t values[2][WARP];
    Registers registers[2][WARP];
    // Whether the sums were computed: the first lane that goes on computes them for all.
    bool is_multiplied[2] = {};
    unsigned turn = 0;
    // When its lanes last met.
    uint32_t exchange = 0;
};

// What is known of an element of shared memory.
struct Cell {
    History written, read;
};

struct SharedArray {
    Place place;
    const void *type;
    size_t element_bytes, count, offset;
    // Of its cells in the block.
    size_t first_cell;
    // A kernel took its address, so not all accesses are seen any more.
    bool unchecked = false;
};

// The blocks of a launch, of which one runs at a time.
struct Block {
    const Kernel *kernel = nullptr;
    void **arguments = nullptr;
    std::vector<Thread> threads;
    Warp warps[THREADS_MAX / WARP];
    Stacks stacks{THREADS_MAX};
    std::vector<std::unique_ptr<Fiber>> fibers;
    Thread *running = nullptr;
    // Threads that had their turn in this round; whether the order is from the last thread to the first.
    size_t turn = 0;
    bool reversed = false;
    Moment now{};
    // The number of each block since the launch began, and when it began.
    std::vector<std::pair<uint64_t, uint32_t>> starts;
    Votes votes{};
    std::string error;
    GlobalMemory global;

    alignas(128) unsigned char memory[SHARED_BYTES_MAX + (16 << 10)];
    std::vector<std::unique_ptr<SharedArray>> arrays;
    std::vector<Cell> cells;
    size_t cells_used = 0, memory_used = 0, dynamic_bytes = 0, static_bytes = 0;
    SharedArray *dynamic = nullptr;

    void begin_launch(const Kernel &kernel, void **arguments);
    void begin_block(uint64_t number, size_t shared_bytes);
    // Runs all threads to their end, or to an error.
    void run(bool from_the_last);

    void prepare(size_t shared_bytes);
    SharedArray *add_array(Place place, const void *type, size_t element_bytes, size_t count);
    void check_guards();
    void suspend();

    size_t warp_count() const { return (threads.size() + WARP - 1) / WARP; }
    // Whether an address is on a stack, in shared memory or the emulation's own.
    bool holds(uintptr_t address) const {
        return stacks.hold(address) || address - reinterpret_cast<uintptr_t>(this) < sizeof(*this) ||
               address - reinterpret_cast<uintptr_t>(&indices) < sizeof(indices);
    }

  private:
    bool advance();
    bool release_warp(size_t warp);
    bool release_barrier();
    std::string who_waits() const;
    void start_fibers();
};

// The block that runs on this thread of the host, between the start and the end of a launch; null otherwise.
extern __thread Block *current_block;
inline Block &current() { return *current_block; }

// Ends the launch with an error at a line; does not return.
[[noreturn]] void end_launch(const std::string &where, const std::string &what);

std::string name_of(Place place);
std::string name_of(uint3 index);

// The index of a block of the launch, whose blocks are numbered along x first.
uint3 block_of(uint64_t number);

// What the thread that runs reads of global memory at some time between then and now.
void read_global(const void *address, size_t bytes, const Moment &begin, Place place);

}  // namespace emulation
