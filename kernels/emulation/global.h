// Global memory: which threads of a launch have touched each byte, and which accesses are races.
#pragma once

#include "history.h"

#include <cstddef>
#include <memory>
#include <vector>

namespace emulation {

enum Access { READ, WRITE, ATOMIC };

// An access that is not ordered with an earlier one, of a byte that both touch.
struct Race {
    uintptr_t address;
    Access earlier;
    Toucher toucher;
};

// Histories of the memory that the current launch has touched, one for each grain. The grains of a page are as large as
// its smallest access, so that races are found to the byte.
class GlobalMemory {
  public:
    // Records an access that may happen at any time between two moments. Returns whether it is a race.
    bool touch(Access access, uintptr_t address, size_t bytes, const Moment &begin, const Moment &end, Race &race);

    // Forgets everything, for a restart of the clock.
    void forget();

  private:
    static const unsigned PAGE_SHIFT = 12, GRAIN_SHIFT_MAX = 4;
    static const size_t PAGE_BYTES = size_t(1) << PAGE_SHIFT;

    struct Page {
        uintptr_t number = 0;
        // The launch that the other fields belong to.
        uint32_t launch = 0;
        unsigned grain_shift = 0;
        // Of each kind of access; null if there was none.
        History *histories[3] = {};
    };

    Page &page_of(uintptr_t number, uint32_t launch, unsigned grain_shift);
    Page &slot_of(uintptr_t number, uint32_t launch);
    void grow(uint32_t launch);
    void refine(Page &page, unsigned grain_shift);
    History *take_histories(unsigned grain_shift);

    // A hash table with open addressing: slots of earlier launches are free.
    std::vector<Page> pages;
    size_t pages_used = 0;
    uint32_t launch = 0;

    // Histories are handed out from the first chunk on in every launch.
    static const size_t CHUNK = 16 * PAGE_BYTES;
    std::vector<std::unique_ptr<History[]>> chunks;
    size_t histories_used = 0;
};

}  // namespace emulation
