// Instructions that `mma.cuh` writes in PTX, on the host: products of a warp's registers, matrices that a warp loads,
// copies that go on while the thread does. Fragments lie in the lanes as the PTX ISA's tables say.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shared.h"

namespace emulation {

// What a lane brings to an instruction of the whole warp.
struct Registers {
    uint32_t words[6];
};

// The registers of all 32 lanes, valid until the warp's next exchange; all lanes take part.
const Registers *exchange_registers(const Registers &own, Place place);

// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`. Products are exact; each sum is in f32, in the order of k,
// where a device aligns and truncates.
void multiply_16x8x16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Place place);

// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`: lane l reads row l % 8 of matrix l / 8, eight elements.
void load_matrices(uint32_t (&matrices)[4], const uint32_t (&row)[4], bool transposed, Place place);

// `cp.async`: from now until this thread waits, the element is NaN.
void copy_later(SharedArray *array, int64_t index, const void *source, Place place);
void finish_copies();

}  // namespace emulation
