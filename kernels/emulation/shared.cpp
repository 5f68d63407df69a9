// Shared memory: one piece for each array, between zones that nothing may write.
#include "block.h"

#include <algorithm>

namespace emulation {

// NaN as f32, f64 and bf16, and what the zones around an array hold.
static const unsigned char POISON = 0xff;
static const size_t GUARD_BYTES = 128;
static const size_t ALIGNMENT = 128;

void Block::prepare(size_t shared_bytes) {
    std::fill(memory, memory + std::max(memory_used, GUARD_BYTES), POISON);
    arrays.clear();
    memory_used = GUARD_BYTES;
    static_bytes = 0;
    dynamic_bytes = shared_bytes;
    dynamic = nullptr;
    epoch = 0;
    error.clear();
}

SharedArray *Block::add_array(Place place, const void *type, size_t element_bytes, size_t count) {
    const size_t bytes = (element_bytes * count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (memory_used + bytes + GUARD_BYTES > sizeof(memory)) {
        fail(place, "a block has no more than %zu bytes of shared memory", SHARED_BYTES_MAX);
    }
    arrays.emplace_back(new SharedArray{place, type, element_bytes, count, memory_used, false, {}});
    arrays.back()->cells.resize(count);
    std::fill(memory + memory_used, memory + memory_used + bytes + GUARD_BYTES, POISON);
    memory_used += bytes + GUARD_BYTES;
    return arrays.back().get();
}

SharedArray *static_array(const void *type, size_t element_bytes, size_t count, Place place) {
    Block &block = current();
    for (const auto &array : block.arrays) {
        if (array->type == type && array->place.line == place.line && array->place.file == place.file) {
            return array.get();
        }
    }
    block.static_bytes += element_bytes * count;
    if (block.static_bytes > STATIC_SHARED_BYTES_MAX ||
        block.static_bytes + block.dynamic_bytes > SHARED_BYTES_MAX) {
        fail(place, "%zu bytes of static and %zu of dynamic shared memory are more than a block may have",
             block.static_bytes, block.dynamic_bytes);
    }
    return block.add_array(place, type, element_bytes, count);
}

SharedArray *dynamic_array(size_t element_bytes, Place place) {
    Block &block = current();
    if (block.dynamic == nullptr) {
        block.dynamic = block.add_array(place, nullptr, element_bytes, block.dynamic_bytes / element_bytes);
    }
    return block.dynamic;
}

static Moment now() {
    const Block &block = current();
    const unsigned thread = block.running->number;
    return {int(thread), block.epoch, block.warps[thread / WARP].epoch};
}

// Whether something that another thread did may come before or after what is done now.
static bool is_unordered(const Moment &then, const Moment &now) {
    if (then.thread < 0 || then.thread == now.thread) {
        return false;
    }
    const bool same_warp = then.thread / int(WARP) == now.thread / int(WARP);
    return same_warp ? then.warp_epoch == now.warp_epoch : then.block_epoch == now.block_epoch;
}

static Cell &cell_of(SharedArray *array, int64_t index, Place place) {
    if (index < 0 || size_t(index) >= array->count) {
        fail(place, "element %lld of a shared array of %zu", static_cast<long long>(index), array->count);
    }
    return array->cells[size_t(index)];
}

static void *address_of(const SharedArray *array, int64_t index) {
    return current().memory + array->offset + size_t(index) * array->element_bytes;
}

void *element_read(SharedArray *array, int64_t index, Place place) {
    Cell &cell = cell_of(array, index, place);
    if (!array->unchecked) {
        const Moment moment = now();
        if (cell.written.thread < 0) {
            fail(place, "element %lld of a shared array is read before it is written",
                 static_cast<long long>(index));
        }
        if (is_unordered(cell.written, moment)) {
            fail(place, "race: element %lld of a shared array was written by thread %d with no barrier since",
                 static_cast<long long>(index), cell.written.thread);
        }
        const bool first = cell.read.thread < 0 || cell.read.block_epoch != moment.block_epoch;
        const bool other = !first && cell.read.thread != moment.thread;
        const bool same_warp = cell.read.thread / int(WARP) == moment.thread / int(WARP);
        cell.read_by_lanes = !first && (cell.read_by_lanes || (other && same_warp));
        cell.read_by_warps = !first && (cell.read_by_warps || (other && !same_warp));
        cell.read = moment;
    }
    return address_of(array, index);
}

void *element_written(SharedArray *array, int64_t index, Place place) {
    Cell &cell = cell_of(array, index, place);
    if (!array->unchecked) {
        const Moment moment = now();
        const bool read_since = cell.read.thread >= 0 && cell.read.block_epoch == moment.block_epoch;
        const bool by_lanes = cell.read_by_lanes && cell.read.warp_epoch == moment.warp_epoch;
        if (is_unordered(cell.read, moment) || (read_since && (cell.read_by_warps || by_lanes))) {
            fail(place, "race: element %lld of a shared array was read by thread %d with no barrier since",
                 static_cast<long long>(index), cell.read.thread);
        }
        if (is_unordered(cell.written, moment)) {
            fail(place, "race: element %lld of a shared array was written by thread %d with no barrier since",
                 static_cast<long long>(index), cell.written.thread);
        }
        cell.written = moment;
    }
    return address_of(array, index);
}

void *unchecked(SharedArray *array) {
    array->unchecked = true;
    return address_of(array, 0);
}

void Block::check_guards() {
    for (const auto &array : arrays) {
        const size_t end = array->offset + array->count * array->element_bytes;
        const size_t next = (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + GUARD_BYTES;
        const bool before = std::all_of(memory + array->offset - GUARD_BYTES, memory + array->offset,
                                        [](unsigned char byte) { return byte == POISON; });
        const bool after = std::all_of(memory + end, memory + next, [](unsigned char byte) { return byte == POISON; });
        if (!before || !after) {
            const std::string file = array->place.file;
            error = file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(array->place.line) + ": block (" +
                    std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                    std::to_string(blockIdx.z) + ") has written beyond the shared array declared here";
            return;
        }
    }
}

}  // namespace emulation
