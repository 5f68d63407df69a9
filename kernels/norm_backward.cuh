// The backward pass of RMS and of layer normalisation in one pass over the rows: gradients of the input, and parts of
// those of weight and bias, which `columns.cu` adds.
#pragma once

#include "pack.cuh"
#include "reduce.cuh"

// Threads of a block whose rows are lanes of a warp, and most of one whose rows are the block's, a pack a thread.
constexpr int NARROW_THREADS = 256;
constexpr int ROW_THREADS_MAX = 512;

// Packs of a wide row that a thread holds, and most threads of a block of such rows.
constexpr int HELD = 4;
constexpr int HELD_THREADS_MAX = 256;

// Of an operation on `rows` rows, of which a block takes `part_rows`. Its sums of the weight's gradient go to its row of
// `parts`, those of the bias's to its row of the next `[gridDim.x, width]`.
template <typename T> struct NormBackward {
    T *dx;
    float *parts;
    const T *dy, *x, *weight;
    const float *means, *rstds;
    size_t rows, part_rows, width;
    int accumulate;

    __device__ size_t start() const { return blockIdx.x * part_rows; }
    __device__ size_t end() const { return start() + part_rows < rows ? start() + part_rows : rows; }
    __device__ bool is_wide() const { return are_wide(width, dx, dy, x, weight); }
    __device__ float *weight_part() const { return parts + blockIdx.x * width; }
    __device__ float *bias_part() const { return parts + (size_t(gridDim.x) + blockIdx.x) * width; }
};

// What a norm multiplies by: its weight, or 1 + weight.
template <bool PLUS_ONE> __device__ float norm_factor(float weight) { return PLUS_ONE ? 1.0f + weight : weight; }

// The formulas of layer normalisation; with the mean and the shift left out, those of RMS normalisation. Its sums over a
// row: of the gradients times the factor times the centred values, and of those without the values.
template <bool IS_CENTRED, bool PLUS_ONE = false> struct NormRow {
    static constexpr bool CENTRED = IS_CENTRED;
    static constexpr int SUMS = CENTRED ? 2 : 1;

    float mean = 0.0f, rstd = 0.0f, slope = 0.0f, shift = 0.0f;

    template <typename T> __device__ static NormRow read(const NormBackward<T> &of, size_t row, bool exists) {
        NormRow own;
        if (exists) {
            own.rstd = of.rstds[row];
            own.mean = CENTRED ? of.means[row] : 0.0f;
        }
        return own;
    }
    __device__ float centred(float value) const { return CENTRED ? value - mean : value; }
    __device__ void add_terms(float (&sums)[SUMS], const Pack &gradients, const Pack &values, const Pack &weights) const {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float weighted = gradients.at[i] * norm_factor<PLUS_ONE>(weights.at[i]);
            sums[0] += weighted * centred(values.at[i]);
            if constexpr (CENTRED) {
                sums[1] += weighted;
            }
        }
    }
    // What the sums are for: `of_each` is one by the number of columns.
    __device__ void know(const float (&sums)[SUMS], float of_each) {
        slope = sums[0] * rstd * rstd * of_each;
        if constexpr (CENTRED) {
            shift = sums[1] * of_each;
        }
    }
    // The gradient of the input.
    __device__ Pack gradient(const Pack &gradients, const Pack &values, const Pack &weights) const {
        Pack found;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const float weighted = gradients.at[i] * norm_factor<PLUS_ONE>(weights.at[i]);
            found.at[i] = ((CENTRED ? weighted - shift : weighted) - centred(values.at[i]) * slope) * rstd;
        }
        return found;
    }
    // Terms of the weight's gradient.
    __device__ Pack weight_terms(const Pack &gradients, const Pack &values) const {
        Pack terms;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            terms.at[i] = gradients.at[i] * (centred(values.at[i]) * rstd);
        }
        return terms;
    }
};

// Stores the sums that every thread of a block has made over its rows, where rows are lanes: those of a column are added
// in the order of the lanes' rows.
__device__ inline void store_lanes_part(float *part, const Pack &sums, size_t width) {
    SHARED(float, of_rows, NARROW_THREADS * PACK);
    const int stride = blockDim.x * PACK, thread = threadIdx.y * blockDim.x + threadIdx.x;
    // Whoever still reads the sums of another gradient comes first.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        of_rows[thread * PACK + i] = sums.at[i];
    }
    __syncthreads();
    if (thread < int(width)) {
        float sum = 0.0f;
        for (int row = 0; row < int(blockDim.y); row++) {
            sum += of_rows[row * stride + thread];
        }
        part[thread] = sum;
    }
}

// A pack of a row that is on its way.
template <typename T> struct AskedFor {
    Held<T> gradients, values;
};

// Rows of up to a pack a thread, of a block or of lanes. While a row is summed, the next is on its way.
template <typename Row, typename T> __device__ void norm_backward(const NormBackward<T> &of) {
    knowing(of.is_wide(), [&](auto wide) {
        constexpr bool WIDE = decltype(wide)();
        const size_t first = threadIdx.x * PACK, width = of.width, end = of.end();
        const float of_each = 1.0f / float(width);
        const bool has_columns = first < width;
        const auto ask = [&](size_t row) {
            const bool exists = row < end && has_columns;
            return AskedFor<T>{hold_if<WIDE>(exists, of.dy + row * width, first, width),
                               hold_if<WIDE>(exists, of.x + row * width, first, width)};
        };
        Pack dweight = {}, dbias = {};
        size_t row = of.start() + threadIdx.y;
        AskedFor<T> next;
        Row next_row;
        // Element by element, too much would be on its way for the registers.
        if constexpr (WIDE) {
            next = ask(row);
            next_row = Row::read(of, row, row < end);
        }
        int turn = 0;
        // Threads of a warp stay together, whether or not they have a row.
        for (size_t together = of.start(); together < end; together += blockDim.y, row += blockDim.y, turn ^= 1) {
            const AskedFor<T> asked = WIDE ? next : ask(row);
            Row own = WIDE ? next_row : Row::read(of, row, row < end);
            const bool exists = row < end && has_columns;
            T *to = of.dx + row * width;
            const Held<T> before = hold_if<WIDE>(exists && of.accumulate, to, first, width);
            // Asked for anew, from cache: they would take registers in f32.
            const Held<T> weights = hold_if<WIDE>(has_columns, of.weight, first, width);
            if constexpr (WIDE) {
                next = ask(row + blockDim.y);
                next_row = Row::read(of, row + blockDim.y, row + blockDim.y < end);
            }
            float sums[Row::SUMS] = {};
            own.add_terms(sums, widen(asked.gradients), widen(asked.values), widen(weights));
            row_sums(sums, turn);
            own.know(sums, of_each);
            if (exists) {
                const Pack gradients = widen(asked.gradients), values = widen(asked.values);
                Pack dx = own.gradient(gradients, values, widen(weights));
                add(dx, widen(before));
                store<WIDE>(to, first, width, dx);
                add(dweight, own.weight_terms(gradients, values));
                add(dbias, gradients);
            }
        }
        if (blockDim.x > WARP) {
            if (has_columns) {
                store<WIDE>(of.weight_part(), first, width, dweight);
                if constexpr (Row::CENTRED) {
                    store<WIDE>(of.bias_part(), first, width, dbias);
                }
            }
        } else {
            store_lanes_part(of.weight_part(), dweight, width);
            if constexpr (Row::CENTRED) {
                store_lanes_part(of.bias_part(), dbias, width);
            }
        }
    });
}

// Rows of any width, of a block: read twice, the second time from cache, and summed where the parts are.
template <typename Row, typename T> __device__ void norm_backward_widest(const NormBackward<T> &of) {
    const size_t width = of.width, begin = threadIdx.x * PACK, stride = blockDim.x * PACK;
    const float of_each = 1.0f / float(width);
    for (size_t row = of.start(); row < of.end(); row++) {
        const size_t start = row * width;
        Row own = Row::read(of, row, true);
        float sums[Row::SUMS] = {};
        for (size_t first = begin; first < width; first += stride) {
            own.add_terms(sums, load(of.dy + start, first, width), load(of.x + start, first, width),
                          load(of.weight, first, width));
        }
        row_sums(sums, (row - of.start()) % 2);
        own.know(sums, of_each);
        const bool follows = row > of.start();
        for (size_t first = begin; first < width; first += stride) {
            const Pack gradients = load(of.dy + start, first, width), values = load(of.x + start, first, width);
            const Pack dx = own.gradient(gradients, values, load(of.weight, first, width));
            store_or_add(of.dx + start, first, width, dx, of.accumulate);
            store_or_add(of.weight_part(), first, width, own.weight_terms(gradients, values), follows);
            if constexpr (Row::CENTRED) {
                store_or_add(of.bias_part(), first, width, gradients, follows);
            }
        }
    }
}

// Rows of up to HELD packs a thread, of a block.
template <typename Row, typename T> __device__ void norm_backward_wide(const NormBackward<T> &of) {
    if (!of.is_wide()) {
        norm_backward_widest<Row>(of);
        return;
    }
    const size_t width = of.width;
    const float of_each = 1.0f / float(width);
    const auto place = [&](int held) { return (held * blockDim.x + threadIdx.x) * size_t(PACK); };
    Pack dweight[HELD] = {}, dbias[HELD] = {};
    for (size_t row = of.start(); row < of.end(); row++) {
        const size_t start = row * width;
        Row own = Row::read(of, row, true);
        Held<T> gradients[HELD], values[HELD];
        float sums[Row::SUMS] = {};
#pragma unroll
        for (int held = 0; held < HELD; held++) {
            gradients[held] = hold_if<true>(place(held) < width, of.dy + start, place(held), width);
            values[held] = hold_if<true>(place(held) < width, of.x + start, place(held), width);
        }
#pragma unroll
        for (int held = 0; held < HELD; held++) {
            const Held<T> weights = hold_if<true>(place(held) < width, of.weight, place(held), width);
            own.add_terms(sums, widen(gradients[held]), widen(values[held]), widen(weights));
        }
        row_sums(sums, (row - of.start()) % 2);
        own.know(sums, of_each);
#pragma unroll
        for (int held = 0; held < HELD; held++) {
            const size_t first = place(held);
            if (first < width) {
                const Pack gradient = widen(gradients[held]), value = widen(values[held]);
                const Pack dx = own.gradient(gradient, value, load<true>(of.weight, first, width));
                store_or_add<true>(of.dx + start, first, width, dx, of.accumulate);
                add(dweight[held], own.weight_terms(gradient, value));
                add(dbias[held], gradient);
            }
        }
    }
#pragma unroll
    for (int held = 0; held < HELD; held++) {
        if (place(held) < width) {
            store<true>(of.weight_part(), place(held), width, dweight[held]);
            if constexpr (Row::CENTRED) {
                store<true>(of.bias_part(), place(held), width, dbias[held]);
            }
        }
    }
}
