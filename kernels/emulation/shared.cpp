// Shared memory: one piece for each array, between zones that nothing may write.
#include "block.h"

#include <algorithm>

namespace emulation {

// NaN as f32, f64 and bf16, and what the zones around an array hold.
static const unsigned char POISON = 0xff;
static const size_t GUARD_BYTES = 128;
static const size_t ALIGNMENT = 128;

void Block::prepare(size_t shared_bytes) {
    std::fill(memory, memory + GUARD_BYTES, POISON);
    arrays.clear();
    memory_used = GUARD_BYTES;
    cells_used = 0;
    static_bytes = 0;
    dynamic_bytes = shared_bytes;
    dynamic = nullptr;
}

SharedArray *Block::add_array(Place place, const void *type, size_t element_bytes, size_t count) {
    const size_t bytes = (element_bytes * count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (memory_used + bytes + GUARD_BYTES > sizeof(memory)) {
        fail(place, "a block has no more than %zu bytes of shared memory", SHARED_BYTES_MAX);
    }
    arrays.emplace_back(new SharedArray{place, type, element_bytes, count, memory_used, cells_used, false});
    cells_used += count;
    if (cells_used > cells.size()) {
        cells.resize(cells_used);
    }
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

static Cell &cell_of(SharedArray *array, int64_t index, Place place) {
    if (index < 0 || size_t(index) >= array->count) {
        fail(place, "element %lld of a shared array of %zu", static_cast<long long>(index), array->count);
    }
    return current().cells[array->first_cell + size_t(index)];
}

static void *address_of(const SharedArray *array, int64_t index) {
    return current().memory + array->offset + size_t(index) * array->element_bytes;
}

static void expect_alone(const History &history, const char *what, int64_t index, Place place) {
    const Moment &now = current().now;
    if (const Toucher toucher = history.rival(now, now.block)) {
        fail(place, "race: element %lld of a shared array was %s by thread %u with no barrier since",
             static_cast<long long>(index), what, toucher.thread);
    }
}

Bytes read_element(SharedArray *array, int64_t index, Place place) {
    Cell &cell = cell_of(array, index, place);
    if (!array->unchecked) {
        const Moment &now = current().now;
        if (!cell.written.has_any(now.block)) {
            fail(place, "element %lld of a shared array is read before it is written",
                 static_cast<long long>(index));
        }
        expect_alone(cell.written, "written", index, place);
        cell.read.note(now, now.block);
    }
    // Behind the last element is a zone as long as this.
    Bytes bytes;
    std::memcpy(&bytes, address_of(array, index), sizeof(bytes));
    return bytes;
}

void *element_written(SharedArray *array, int64_t index, Place place) {
    Cell &cell = cell_of(array, index, place);
    if (!array->unchecked) {
        const Moment &now = current().now;
        expect_alone(cell.read, "read", index, place);
        expect_alone(cell.written, "written", index, place);
        cell.written.note(now, now.block);
    }
    return address_of(array, index);
}

void write_element(SharedArray *array, int64_t index, Bytes bytes, Place place) {
    std::memcpy(element_written(array, index, place), &bytes, array->element_bytes);
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
