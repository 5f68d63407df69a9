// Shared memory of a block, in which every access by index is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace emulation {

// A line of a kernel source.
struct Place {
    const char *file;
    int line;
};

// Ends the launch with an error; does not return.
[[noreturn]] void fail(Place place, const char *format, ...) __attribute__((format(printf, 2, 3)));

// An array of shared memory, of the block that runs. Its bytes are NaN, as f32 and as bf16, until they are written.
struct SharedArray;

// The array declared at a place with elements of a type, of which `type` is a token; made by the block's first thread
// that gets there.
SharedArray *static_array(const void *type, size_t element_bytes, size_t count, Place place);

// All of the dynamic shared memory.
SharedArray *dynamic_array(size_t element_bytes, Place place);

// The bytes of an element, as a value: a kernel then needs no memory for it, whose accesses would be checked.
struct Bytes {
    uint64_t words[2];
};

// Reads or writes an element. Checks that it is within the array, is read only after it was written, and is no race
// with another thread since their last common barrier.
Bytes read_element(SharedArray *array, int64_t index, Place place);
void write_element(SharedArray *array, int64_t index, Bytes bytes, Place place);

// The address of an element that is written, as above.
void *element_written(SharedArray *array, int64_t index, Place place);

// The first element, for accesses that are checked only by the zones before and after the array.
void *unchecked(SharedArray *array);

// An element as the left or right side of an assignment.
template <typename T> struct Element {
    static_assert(sizeof(T) <= sizeof(Bytes), "elements are at most as wide as a device's widest access");
    SharedArray *array;
    int64_t index;
    Place place;

    operator T() const {
        const Bytes bytes = read_element(array, index, place);
        T value;
        std::memcpy(&value, &bytes, sizeof(T));
        return value;
    }
    const Element &operator=(T value) const {
        Bytes bytes = {};
        std::memcpy(&bytes, &value, sizeof(T));
        write_element(array, index, bytes, place);
        return *this;
    }
    const Element &operator=(const Element &other) const { return *this = T(other); }
    const Element &operator+=(T value) const { return *this = T(*this) + value; }
    const Element &operator-=(T value) const { return *this = T(*this) - value; }
    const Element &operator*=(T value) const { return *this = T(*this) * value; }
};

// Takes an index with the place where it was taken.
struct Index {
    int64_t value;
    Place place;

    template <typename I>
    Index(I value, const char *file = __builtin_FILE(), int line = __builtin_LINE())
        : value(int64_t(value)), place{file, line} {}
};

// What stands in for an array in shared memory.
template <typename T> struct Shared {
    SharedArray *array;

    Element<T> operator[](Index index) const { return {array, index.value, index.place}; }
};

template <typename T> const void *token_of_type() {
    static const char token = 0;
    return &token;
}

}  // namespace emulation

#define SHARED(type, name, count)                                                                  \
    const emulation::Shared<type> name = {                                                         \
        emulation::static_array(emulation::token_of_type<type>(), sizeof(type), count, {__FILE__, __LINE__})}

#define DYNAMIC_SHARED(type, name) \
    const emulation::Shared<type> name = {emulation::dynamic_array(sizeof(type), {__FILE__, __LINE__})}

template <typename T> using SharedArray = emulation::Shared<T>;

template <typename T> T *shared_pointer(emulation::Shared<T> shared) {
    return static_cast<T *>(emulation::unchecked(shared.array));
}
