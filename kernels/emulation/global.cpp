#include "global.h"

#include <algorithm>

namespace emulation {

void GlobalMemory::forget() {
    pages.clear();
    chunks.clear();
    launch = 0;
}

// All sizes of grains divide the size of a chunk.
History *GlobalMemory::take_histories(unsigned grain_shift) {
    const size_t count = PAGE_BYTES >> grain_shift;
    if (histories_used % CHUNK + count > CHUNK) {
        histories_used = (histories_used / CHUNK + 1) * CHUNK;
    }
    const size_t chunk = histories_used / CHUNK, start = histories_used % CHUNK;
    if (chunk == chunks.size()) {
        chunks.emplace_back(new History[CHUNK]);
    }
    histories_used += count;
    return &chunks[chunk][start];
}

GlobalMemory::Page &GlobalMemory::slot_of(uintptr_t number, uint32_t launch) {
    const uint64_t fraction_of_golden_ratio = 0x9e3779b97f4a7c15;
    size_t slot = (number * fraction_of_golden_ratio) >> 32 & (pages.size() - 1);
    while (pages[slot].launch == launch && pages[slot].number != number) {
        slot = (slot + 1) & (pages.size() - 1);
    }
    return pages[slot];
}

void GlobalMemory::grow(uint32_t launch) {
    std::vector<Page> smaller(std::max<size_t>(64, pages.size() * 2));
    smaller.swap(pages);
    for (const Page &page : smaller) {
        if (page.launch == launch) {
            slot_of(page.number, launch) = page;
        }
    }
}

GlobalMemory::Page &GlobalMemory::page_of(uintptr_t number, uint32_t now, unsigned grain_shift) {
    if (launch != now) {
        launch = now;
        pages_used = histories_used = 0;
    }
    if (pages_used * 2 >= pages.size()) {
        grow(now);
    }
    Page &page = slot_of(number, now);
    if (page.launch != now) {
        page = {number, now, grain_shift, {}};
        pages_used++;
    }
    return page;
}

void GlobalMemory::refine(Page &page, unsigned grain_shift) {
    for (History *&histories : page.histories) {
        if (histories != nullptr) {
            History *const finer = take_histories(grain_shift);
            for (size_t grain = 0; grain < PAGE_BYTES >> grain_shift; grain++) {
                finer[grain] = histories[grain >> (page.grain_shift - grain_shift)];
            }
            histories = finer;
        }
    }
    page.grain_shift = grain_shift;
}

// The largest grain that an access consists of.
static unsigned grain_shift_of(uintptr_t address, size_t bytes, unsigned most) {
    return std::min(most, unsigned(__builtin_ctzll(address | bytes)));
}

bool GlobalMemory::touch(Access access, uintptr_t address, size_t bytes, const Moment &begin, const Moment &end,
                         Race &race) {
    for (size_t part; bytes > 0; address += part, bytes -= part) {
        const size_t offset = address % PAGE_BYTES;
        part = std::min(bytes, PAGE_BYTES - offset);
        const unsigned grain_shift = grain_shift_of(offset, part, GRAIN_SHIFT_MAX);
        Page &page = page_of(address >> PAGE_SHIFT, end.launch, grain_shift);
        if (grain_shift < page.grain_shift) {
            refine(page, grain_shift);
        }
        const size_t first = offset >> page.grain_shift, last = (offset + part - 1) >> page.grain_shift;
        for (const Access other : {READ, WRITE, ATOMIC}) {
            const History *histories = page.histories[other];
            const bool is_harmless = other == access && access != WRITE;
            for (size_t grain = first; histories != nullptr && !is_harmless && grain <= last; grain++) {
                if (const Toucher toucher = histories[grain].rival(begin, begin.launch)) {
                    race = {address - offset + std::max(offset, grain << page.grain_shift), other, toucher};
                    return true;
                }
            }
        }
        History *&own = page.histories[access];
        own = own != nullptr ? own : take_histories(page.grain_shift);
        for (size_t grain = first; grain <= last; grain++) {
            own[grain].note(end, end.launch);
        }
    }
    return false;
}

}  // namespace emulation
