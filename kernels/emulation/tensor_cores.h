// Instructions that `mma.cuh` writes in PTX, on the host: products of a warp's registers, matrices that a warp loads,
// copies that go on while the thread does. Fragments lie in the lanes as the PTX ISA's tables say.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shared.h"

namespace emulation {

// What a lane gives to an instruction of the whole warp, or gets from it. Passed by value, as in registers: if a kernel
// passed an array's address, every access to it would be checked.
struct Sums {
    float at[4];
};
struct Words {
    uint32_t at[4];
};
struct Registers {
    Sums sums;
    Words a, b;
};

Sums multiply_16x8x16(Sums sums, Words a, Words b, Place place);
Words load_matrices(Words row, bool transposed, Place place);

// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`. Products are exact; each sum is in f32, in the order of k,
// where a device aligns and truncates.
inline void multiply_16x8x16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Place place) {
    const Sums before = {sums[0], sums[1], sums[2], sums[3]};
    const Sums after = multiply_16x8x16(before, {a[0], a[1], a[2], a[3]}, {b[0], b[1], 0, 0}, place);
    std::memcpy(sums, after.at, sizeof(sums));
}

// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`: lane l reads row l % 8 of matrix l / 8, eight elements.
inline void load_matrices(uint32_t (&matrices)[4], const uint32_t (&row)[4], bool transposed, Place place) {
    const Words loaded = load_matrices(Words{row[0], row[1], row[2], row[3]}, transposed, place);
    std::memcpy(matrices, loaded.at, sizeof(matrices));
}

// `cp.async`: from now until this thread waits, the element is NaN.
void copy_later(SharedArray *array, int64_t index, const void *source, Place place);
// All that were asked for since the last call are a group.
void close_copy_group();
// Waits for all groups but the newest so many.
void finish_copies(unsigned under_way);

}  // namespace emulation
