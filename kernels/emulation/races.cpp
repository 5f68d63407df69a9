// The functions that the compiler calls for a kernel's accesses. Kernels are compiled for ThreadSanitizer, whose
// library is not linked: these functions replace it, and record accesses to global memory in the histories.
#include "block.h"
#include "lines.h"

#include <algorithm>

namespace emulation {

// Describes a byte by the nearest pointer before it among the kernel's arguments.
static std::string name_of_byte(uintptr_t address) {
    const Block &block = current();
    const std::string letters = block.kernel->parameters;
    uintptr_t nearest = 0;
    std::string name = "address " + std::to_string(address);
    for (size_t index = 0; index < letters.size(); index++) {
        const uintptr_t pointer = letters[index] == 'p' ? *static_cast<uintptr_t *>(block.arguments[index]) : 0;
        if (pointer > nearest && pointer <= address) {
            nearest = pointer;
            name = "byte " + std::to_string(address - pointer) + " of argument " + std::to_string(index);
        }
    }
    return name;
}

// The block that ran at a tick.
static uint64_t number_at(uint32_t clock) {
    const auto &starts = current().starts;
    const auto is_later = [](uint32_t clock, const auto &start) { return clock < start.second; };
    return (std::upper_bound(starts.begin(), starts.end(), clock, is_later) - 1)->first;
}

static std::string description_of(const Race &race, Access access) {
    static const char *const DOES[] = {"reads", "writes", "atomically changes"};
    static const char *const HAS[] = {"read", "written", "atomically changed"};
    const Block &block = current();
    const uint64_t number = number_at(race.toucher.clock);
    const bool own = number == block.starts.back().first;
    return std::string("race: ") + DOES[access] + " " + name_of_byte(race.address) + ", which " +
           (own ? "" : "block " + name_of(block_of(number)) + ", ") + "thread " +
           name_of(block.threads[race.toucher.thread].index) + " has " + HAS[race.earlier] +
           (own ? " with no barrier since" : "");
}

// `name` gives the line.
template <typename Name>
static inline void touch(Access access, const void *pointer, size_t bytes, const Moment *begin, Name name) {
    Block *const block = current_block;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (block == nullptr || block->holds(address)) {
        return;
    }
    Race race;
    if (block->global.touch(access, address, bytes, begin != nullptr ? *begin : block->now, block->now, race)) {
        end_launch(name(), description_of(race, access));
    }
}

unsigned add_atomically(unsigned *sum, unsigned value, Place place) {
    touch(ATOMIC, sum, sizeof(*sum), nullptr, [=] { return name_of(place); });
    return (*sum += value) - value;
}

void read_global(const void *address, size_t bytes, const Moment &begin, Place place) {
    touch(READ, address, bytes, &begin, [=] { return name_of(place); });
}

}  // namespace emulation

#define TOUCH(access, address, bytes)                                                                      \
    emulation::touch(emulation::access, address, bytes, nullptr,                                           \
                     [pc = __builtin_return_address(0)] { return emulation::line_of(pc); })

#define ACCESSES_OF(bytes)                                                                                 \
    extern "C" void __tsan_read##bytes(void *address) { TOUCH(READ, address, bytes); }                     \
    extern "C" void __tsan_write##bytes(void *address) { TOUCH(WRITE, address, bytes); }                   \
    extern "C" void __tsan_unaligned_read##bytes(void *address) { TOUCH(READ, address, bytes); }           \
    extern "C" void __tsan_unaligned_write##bytes(void *address) { TOUCH(WRITE, address, bytes); }

ACCESSES_OF(1)
ACCESSES_OF(2)
ACCESSES_OF(4)
ACCESSES_OF(8)
ACCESSES_OF(16)

extern "C" void __tsan_read_range(void *address, unsigned long bytes) { TOUCH(READ, address, bytes); }
extern "C" void __tsan_write_range(void *address, unsigned long bytes) { TOUCH(WRITE, address, bytes); }

// The beginnings and ends of functions are not needed here.
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit(void *) {}
