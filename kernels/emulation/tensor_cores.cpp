// Instructions of a warp are exchanges of its lanes' registers, after which each lane makes its own part of the result.
#include "tensor_cores.h"

#include "block.h"

namespace emulation {

static const unsigned ALL_LANES = 0xffffffffu;

const Registers *exchange_registers(const Registers &own, Place place) {
    Block &block = current();
    Warp &warp = block.warps[block.running->number / WARP];
    const unsigned turn = warp.turn;
    warp.registers[turn][block.running->lane()] = own;
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

// Lane 4 g + t holds of a, by registers: rows g and g + 8 of columns 2 t and 2 t + 1, then the same rows of columns
// 2 t + 8 and 2 t + 9; of b: rows 2 t and 2 t + 1 of column g, then rows 2 t + 8 and 2 t + 9; of the sums: row g of
// columns 2 t and 2 t + 1, then row g + 8.
void multiply_16x8x16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Place place) {
    const Registers *of = exchange_registers({{a[0], a[1], a[2], a[3], b[0], b[1]}}, place);
    const unsigned row = lane() / 4, column = lane() % 4 * 2;
    for (unsigned k = 0; k < 16; k++) {
        const unsigned t = k % 8 / 2, beyond_eight = k / 8, upper = k % 2;
        const uint32_t *of_row = of[4 * row + t].words + 2 * beyond_eight;
        const float above = half_of(of_row[0], upper), below = half_of(of_row[1], upper);
        const float left = half_of(of[4 * column + t].words[4 + beyond_eight], upper);
        const float right = half_of(of[4 * (column + 1) + t].words[4 + beyond_eight], upper);
        sums[0] += above * left;
        sums[1] += above * right;
        sums[2] += below * left;
        sums[3] += below * right;
    }
}

// Lane 4 g + t receives of each matrix row g, columns 2 t and 2 t + 1; transposed, column g of rows 2 t and 2 t + 1.
void load_matrices(uint32_t (&matrices)[4], const uint32_t (&row)[4], bool transposed, Place place) {
    const Registers *of = exchange_registers({{row[0], row[1], row[2], row[3], 0, 0}}, place);
    const unsigned g = lane() / 4, t = lane() % 4;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        const Registers *rows = of + 8 * matrix;
        if (transposed) {
            const unsigned shift = g % 2 * 16;
            const uint32_t first = rows[2 * t].words[g / 2] >> shift & 0xffff;
            const uint32_t second = rows[2 * t + 1].words[g / 2] >> shift & 0xffff;
            matrices[matrix] = first | second << 16;
        } else {
            matrices[matrix] = rows[g].words[t];
        }
    }
}

void copy_later(SharedArray *array, int64_t index, const void *source, Place place) {
    if (reinterpret_cast<uintptr_t>(source) % array->element_bytes != 0) {
        fail(place, "a copy of %zu bytes is not aligned", array->element_bytes);
    }
    std::memset(element_written(array, index, place), 0xff, array->element_bytes);
    current().running->copies.push_back({array, index, source, place, current().now});
}

void finish_copies() {
    std::vector<Copy> &copies = current().running->copies;
    for (const Copy &copy : copies) {
        read_global(copy.source, copy.array->element_bytes, copy.begin, copy.place);
        std::memcpy(element_written(copy.array, copy.index, copy.place), copy.source, copy.array->element_bytes);
    }
    copies.clear();
}

}  // namespace emulation
