// Threads run one after the other, each until it waits or ends. Then threads at complete barriers and exchanges go on.
// If none is complete and threads still wait, a device would hang, so this is an error.
#include "block.h"

#include <cstdarg>
#include <cstdio>
#include <map>

namespace emulation {

__thread Indices indices;
__thread Block *current_block;

static std::string text(const char *format, va_list arguments) {
    char buffer[512];
    std::vsnprintf(buffer, sizeof(buffer), format, arguments);
    return buffer;
}

std::string name_of(Place place) {
    const std::string file = place.file;
    return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(place.line);
}

std::string name_of(uint3 index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

void fail(Place place, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const std::string what = text(format, arguments);
    va_end(arguments);
    end_launch(name_of(place), what);
}

void end_launch(const std::string &where, const std::string &what) {
    Block &block = current();
    block.error = where + ": block " + name_of(blockIdx) + ", thread " + name_of(threadIdx) + ": " + what;
    block.suspend();
    __builtin_unreachable();
}

// Restart the clock if it might overflow within the next launch. It cannot overflow in one launch: that would take
// hours.
void Block::begin_launch(const Kernel &of, void **with) {
    kernel = &of;
    arguments = with;
    if (now.clock > UINT32_MAX / 2) {
        now = {};
        cells.clear();
        global.forget();
    }
    now.launch = ++now.clock;
    starts.clear();
}

void Block::begin_block(uint64_t number, size_t shared_bytes) {
    now.block = now.barrier = ++now.clock;
    starts.emplace_back(number, now.clock);
    for (Thread &thread : threads) {
        thread.state = State::Ready;
        thread.copies.clear();
        thread.copy_groups = 0;
    }
    for (size_t warp = 0; warp < warp_count(); warp++) {
        warps[warp].exchange = now.clock;
    }
    prepare(shared_bytes);
}

// Makes the next thread of this round that can go on the running one. Returns whether there is any; after an error
// there is none.
bool Block::advance() {
    while (error.empty() && turn < threads.size()) {
        Thread &thread = threads[reversed ? threads.size() - 1 - turn : turn];
        turn++;
        if (thread.state == State::Ready) {
            running = &thread;
            threadIdx = thread.index;
            now.thread = uint16_t(thread.number);
            now.exchange = warps[thread.number / WARP].exchange;
            return true;
        }
    }
    return false;
}

// Threads of a round switch directly to one another: switching to `run` and back for each would cost twice as much.
void Block::suspend() {
    Fiber &own = *fibers[running->number];
    if (advance()) {
        own.hand_over(*fibers[running->number]);
    } else {
        own.suspend();
    }
}

// A fiber runs the threads of its number in one block after the other.
void Block::start_fibers() {
    while (fibers.size() < threads.size()) {
        fibers.emplace_back(new Fiber(stacks.stack(fibers.size()), [this] {
            for (;;) {
                kernel->call(kernel->function, arguments);
                if (!running->copies.empty()) {
                    fail(running->copies[0].place, "the thread ends and has not waited for this copy");
                }
                running->state = State::Finished;
                suspend();
            }
        }));
    }
}

void Block::run(bool from_the_last) {
    start_fibers();
    reversed = from_the_last;
    for (;;) {
        turn = 0;
        if (advance()) {
            fibers[running->number]->resume();
        }
        if (!error.empty()) {
            // Fibers in the middle of a kernel never finish it, so they cannot be reused.
            fibers.clear();
            return;
        }
        bool released = release_barrier();
        for (size_t warp = 0; warp < warp_count(); warp++) {
            released |= release_warp(warp);
        }
        if (!released) {
            break;
        }
    }
    error = who_waits();
    if (error.empty()) {
        check_guards();
    } else {
        fibers.clear();
    }
}

// Complete when all threads of the block wait at the same line.
bool Block::release_barrier() {
    const Place place = threads[0].place;
    Votes counted = {false, true};
    for (const Thread &thread : threads) {
        if (thread.state != State::AtBarrier || thread.place.line != place.line || thread.place.file != place.file) {
            return false;
        }
        counted.any |= thread.vote;
        counted.all &= thread.vote;
    }
    votes = counted;
    now.barrier = ++now.clock;
    for (Thread &thread : threads) {
        thread.state = State::Ready;
    }
    for (size_t warp = 0; warp < warp_count(); warp++) {
        warps[warp].exchange = now.clock;
    }
    return true;
}

// Complete when all lanes of a mask wait at the same line with the same mask.
bool Block::release_warp(size_t warp) {
    const size_t start = warp * WARP, end = std::min(start + WARP, threads.size());
    for (size_t first = start; first < end; first++) {
        const Thread &caller = threads[first];
        if (caller.state != State::AtExchange) {
            continue;
        }
        unsigned arrived = 0;
        for (size_t other = start; other < end; other++) {
            const Thread &thread = threads[other];
            const bool same = thread.state == State::AtExchange && thread.mask == caller.mask &&
                              thread.place.line == caller.place.line && thread.place.file == caller.place.file;
            arrived |= unsigned(same) << (other - start);
        }
        if (arrived == caller.mask) {
            for (size_t other = start; other < end; other++) {
                if (arrived >> (other - start) & 1) {
                    threads[other].state = State::Ready;
                }
            }
            warps[warp].turn ^= 1;
            warps[warp].exchange = ++now.clock;
            return true;
        }
    }
    return false;
}

// Empty if all threads have ended.
std::string Block::who_waits() const {
    std::map<std::string, size_t> counts;
    for (const Thread &thread : threads) {
        if (thread.state == State::Finished) {
            counts["have ended"]++;
        } else {
            const char *what = thread.state == State::AtBarrier ? "wait at the barrier of " : "wait for their warp at ";
            counts[what + name_of(thread.place)]++;
        }
    }
    if (counts.size() == 1 && counts.count("have ended")) {
        return "";
    }
    std::string message = "block " + name_of(blockIdx) + " goes separate ways:";
    for (const auto &count : counts) {
        message += " " + std::to_string(count.second) + " threads " + count.first + ";";
    }
    message.pop_back();
    return message;
}

Votes block_barrier(bool vote, Place place) {
    Block &block = current();
    block.running->state = State::AtBarrier;
    block.running->place = place;
    block.running->vote = vote;
    block.suspend();
    return block.votes;
}

unsigned lane() { return current().running->lane(); }

const uint64_t *exchange(unsigned mask, uint64_t value, Place place) {
    Block &block = current();
    Thread &thread = *block.running;
    if (!(mask >> thread.lane() & 1)) {
        fail(place, "the thread is not in the mask %#x that it gives", mask);
    }
    Warp &warp = block.warps[thread.number / WARP];
    const unsigned turn = warp.turn;
    warp.values[turn][thread.lane()] = value;
    thread.state = State::AtExchange;
    thread.place = place;
    thread.mask = mask;
    block.suspend();
    return warp.values[turn];
}

}  // namespace emulation
