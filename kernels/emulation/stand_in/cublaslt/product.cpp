#include "product.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace stand_in {

bool Layout::operator==(const Layout &other) const {
    return type == other.type && rows == other.rows && columns == other.columns && leading == other.leading &&
           batch == other.batch && batch_stride == other.batch_stride;
}

// The value of a code with so many bits of fraction; e4m3 has no infinity, and one NaN of each sign.
static float value_of_code(uint8_t code, int fraction_bits, int bias) {
    const int exponent = (code & 0x7f) >> fraction_bits, fraction = code & ((1 << fraction_bits) - 1);
    const int last = (0x7f >> fraction_bits);
    const float part = float(fraction) / float(1 << fraction_bits);
    float size = exponent == 0 ? std::ldexp(part, 1 - bias) : std::ldexp(1.0f + part, exponent - bias);
    if (fraction_bits == 2 && exponent == last) {
        size = fraction == 0 ? INFINITY : NAN;
    }
    if (fraction_bits == 3 && (code & 0x7f) == 0x7f) {
        size = NAN;
    }
    return code & 0x80 ? -size : size;
}

static float widened(const void *data, cudaDataType type, int64_t index) {
    if (type == CUDA_R_32F) {
        return static_cast<const float *>(data)[index];
    }
    if (type == CUDA_R_8F_E4M3) {
        return value_of_code(static_cast<const uint8_t *>(data)[index], 3, 7);
    }
    if (type == CUDA_R_8F_E5M2) {
        return value_of_code(static_cast<const uint8_t *>(data)[index], 2, 15);
    }
    const uint32_t bits = uint32_t(static_cast<const uint16_t *>(data)[index]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Rounds to the nearest bf16, ties to even; NaN stays NaN.
static uint16_t narrowed(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (value != value) {
        return uint16_t(bits >> 16 | 0x40);
    }
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One matrix of a batch, column by column without gaps, after its transpose where that is asked for.
static std::vector<float> column_major(const Layout &layout, bool transposed, const void *data, int64_t number) {
    const int64_t rows = int64_t(layout.rows), columns = int64_t(layout.columns);
    std::vector<float> matrix(size_t(rows * columns));
    for (int64_t column = 0; column < columns; column++) {
        for (int64_t row = 0; row < rows; row++) {
            const int64_t from = number * layout.batch_stride + column * layout.leading + row;
            const int64_t to = transposed ? row * columns + column : column * rows + row;
            matrix[size_t(to)] = widened(data, layout.type, from);
        }
    }
    return matrix;
}

static void scale(std::vector<float> &matrix, const void *by) {
    if (by != nullptr) {
        for (float &value : matrix) {
            value *= *static_cast<const float *>(by);
        }
    }
}

// As tensor cores that keep sums in 14 bits, and cut off what is beyond.
static float cut(float sum) {
    uint32_t bits;
    std::memcpy(&bits, &sum, sizeof(bits));
    bits &= ~0x3ffu;
    std::memcpy(&sum, &bits, sizeof(sum));
    return sum;
}

static void write_column(const Layout &layout, void *data, int64_t first, const std::vector<float> &values) {
    for (size_t row = 0; row < values.size(); row++) {
        if (layout.type == CUDA_R_32F) {
            static_cast<float *>(data)[size_t(first) + row] = values[row];
        } else {
            static_cast<uint16_t *>(data)[size_t(first) + row] = narrowed(values[row]);
        }
    }
}

void compute(const Product &product, size_t parts, float alpha, const void *a, const void *b, float beta, const void *c, void *d) {
    const auto &[description, a_layout, b_layout, c_layout, d_layout] = product;
    const size_t rows = d_layout.rows, columns = d_layout.columns;
    const size_t depth = description.a_transposed ? a_layout.rows : a_layout.columns;
    for (int64_t number = 0; number < d_layout.batch; number++) {
        std::vector<float> left = column_major(a_layout, description.a_transposed, a, number);
        std::vector<float> right = column_major(b_layout, description.b_transposed, b, number);
        scale(left, description.a_scale);
        scale(right, description.b_scale);
        for (size_t column = 0; column < columns; column++) {
            std::vector<float> sums(rows);
            for (size_t part = 0; part < parts; part++) {
                std::vector<float> of_part(rows);
                for (size_t k = depth * part / parts; k < depth * (part + 1) / parts; k++) {
                    const float factor = right[column * depth + k];
                    for (size_t row = 0; row < rows; row++) {
                        const float sum = of_part[row] + left[k * rows + row] * factor;
                        of_part[row] = description.fast_accumulation ? cut(sum) : sum;
                    }
                }
                for (size_t row = 0; row < rows; row++) {
                    sums[row] += of_part[row];
                }
            }
            const int64_t from = number * c_layout.batch_stride + int64_t(column) * c_layout.leading;
            for (size_t row = 0; row < rows; row++) {
                sums[row] *= alpha;
                sums[row] += beta == 0.0f ? 0.0f : beta * widened(c, c_layout.type, from + int64_t(row));
                sums[row] += description.has_bias ? widened(description.bias, description.bias_type, int64_t(row)) : 0.0f;
            }
            write_column(d_layout, d, number * d_layout.batch_stride + int64_t(column) * d_layout.leading, sums);
        }
    }
}

}  // namespace stand_in
