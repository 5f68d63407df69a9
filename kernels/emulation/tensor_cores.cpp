// Instructions of a warp are exchanges of its lanes' registers, after which each lane makes its own part of the result.
#include "tensor_cores.h"

#include <algorithm>

#include "block.h"

namespace emulation {

static const unsigned ALL_LANES = 0xffffffffu;

// The registers of all lanes, valid until the warp's next exchange; all lanes take part.
static Registers *exchange_registers(const Registers &own, bool **is_multiplied, Place place) {
    Block &block = current();
    Warp &warp = block.warps[block.running->number / WARP];
    const unsigned turn = warp.turn;
    warp.registers[turn][block.running->lane()] = own;
    warp.is_multiplied[turn] = false;
    *is_multiplied = &warp.is_multiplied[turn];
    exchange(ALL_LANES, 0, place);
    return warp.registers[turn];
}

// The lower or upper bf16 of a register.
static float half_of(uint32_t word, unsigned upper) {
    const uint32_t bits = upper ? word & 0xffff0000u : word << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Multiplies for all lanes at once. Lane 4 g + t holds of a, by registers: rows g and g + 8 of columns 2 t and 2 t + 1, then the same rows
// of columns 2 t + 8 and 2 t + 9; of b: rows 2 t and 2 t + 1 of column g, then rows 2 t + 8 and 2 t + 9; of the sums: row g of
// columns 2 t and 2 t + 1, then row g + 8.
static void multiply(Registers *of) {
    float a[16][16], b[16][8], sums[16][8];
    for (unsigned lane = 0; lane < WARP; lane++) {
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = g + i % 2 * 8, column = 2 * t + i / 2 * 8, upper = i % 2;
            a[row][column] = half_of(of[lane].a.at[i], 0);
            a[row][column + 1] = half_of(of[lane].a.at[i], 1);
            b[2 * t + i / 2 * 8 + upper][g] = half_of(of[lane].b.at[i / 2], upper);
            sums[g + i / 2 * 8][2 * t + i % 2] = of[lane].sums.at[i];
        }
    }
    for (unsigned row = 0; row < 16; row++) {
        for (unsigned k = 0; k < 16; k++) {
            for (unsigned column = 0; column < 8; column++) {
                sums[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (unsigned lane = 0; lane < WARP; lane++) {
        for (unsigned i = 0; i < 4; i++) {
            of[lane].sums.at[i] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
        }
    }
}

Sums multiply_16x8x16(Sums sums, Words a, Words b, Place place) {
    bool *is_multiplied;
    Registers *const of = exchange_registers({sums, a, b}, &is_multiplied, place);
    if (!*is_multiplied) {
        multiply(of);
        *is_multiplied = true;
    }
    return of[lane()].sums;
}

// Lane 4 g + t receives of each matrix row g, columns 2 t and 2 t + 1; transposed, column g of rows 2 t and 2 t + 1.
Words load_matrices(Words row, bool transposed, Place place) {
    bool *is_multiplied;
    const Registers *of = exchange_registers({{}, row, {}}, &is_multiplied, place);
    const unsigned g = lane() / 4, t = lane() % 4;
    Words matrices;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        const Registers *rows = of + 8 * matrix;
        if (transposed) {
            const unsigned shift = g % 2 * 16;
            const uint32_t first = rows[2 * t].a.at[g / 2] >> shift & 0xffff;
            const uint32_t second = rows[2 * t + 1].a.at[g / 2] >> shift & 0xffff;
            matrices.at[matrix] = first | second << 16;
        } else {
            matrices.at[matrix] = rows[g].a.at[t];
        }
    }
    return matrices;
}

void copy_later(SharedArray *array, int64_t index, const void *source, Place place) {
    if (reinterpret_cast<uintptr_t>(source) % array->element_bytes != 0) {
        fail(place, "a copy of %zu bytes is not aligned", array->element_bytes);
    }
    std::memset(element_written(array, index, place), 0xff, array->element_bytes);
    current().running->copies.push_back({array, index, source, place, current().now, current().running->copy_groups});
}

void close_copy_group() { current().running->copy_groups++; }

void finish_copies(unsigned under_way) {
    std::vector<Copy> &copies = current().running->copies;
    const unsigned closed = current().running->copy_groups;
    const auto is_under_way = [&](const Copy &copy) { return copy.group + under_way >= closed; };
    // In the order in which they were asked for, so that those under way are the last.
    const auto first_under_way = std::find_if(copies.begin(), copies.end(), is_under_way);
    for (auto at = copies.begin(); at != first_under_way; ++at) {
        const Copy &copy = *at;
        read_global(copy.source, copy.array->element_bytes, copy.begin, copy.place);
        std::memcpy(element_written(copy.array, copy.index, copy.place), copy.source, copy.array->element_bytes);
    }
    copies.erase(copies.begin(), first_under_way);
}

}  // namespace emulation
