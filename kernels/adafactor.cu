// Adafactor (Shazeer and Stern 2018) on ranges of a tensor of matrices with `rows` rows and `width` columns each. Products are
// not fused, and every form gives the CPU's bits.
#include "reduce.cuh"
#include "states.cuh"

// A square is kept as whole numbers: its multiples of 2^-26, what is left in those of 2^-52, and of 2^-78. Their sums are exact,
// so their order does not show.
constexpr int PARTS = 3;
constexpr double PART = 67108864.0;
// Adding and subtracting this rounds to the nearest whole number.
constexpr double WHOLE = 6755399441055744.0;

// Threads of a block that is alone, or has a matrix for itself.
constexpr int BLOCK_THREADS = 1024;

// Threads of a block that sums columns: along x columns, a sector or two of gradients, along y rows.
constexpr int COLUMN_THREADS = 16;
constexpr int ROW_THREADS = 64;

// The next power of two above a number; 1 for what is 0 or not finite.
__device__ inline double above(double bound) {
    const long long exponent = __double_as_longlong(bound) >> 52 & 0x7ff;
    if (exponent == 0 || exponent == 0x7ff) {
        return 1.0;
    }
    return __longlong_as_double((exponent < 0x7fe ? exponent + 1 : 0x7fe) << 52);
}

struct LargestGrain {
    __device__ double operator()(double a, double b) const { return a > b ? a : b; }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
variance_scale(double *out, const double *grains, size_t count, const float *clip) {
    double largest = 0.0;
    for (size_t grain = threadIdx.x; grain < count; grain += blockDim.x) {
        largest = LargestGrain()(largest, grains[grain]);
    }
    largest = block_reduce(largest, 0.0, LargestGrain());
    if (threadIdx.x == 0) {
        out[0] = above(sqrt(largest) * double(clip[1]));
    }
}
EXPORT(variance_scale);

// Adds the square of a clipped gradient, in units of the scale's. All but the sums is exact.
__device__ inline void add_square(double (&sums)[PARTS], float gradient, float factor, double inverse) {
    const double x = double(__fmul_rn(gradient, factor)) * inverse;
    double rest = x * x;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        rest *= PART;
        const double part = (rest + WHOLE) - WHOLE;
        sums[i] += part;
        rest -= part;
    }
}

// Adds the squares of a tensor's gradients from element `at` to before `end`, `stride` apart. `gradients` are those from element `first`
// on. Several are loaded before the first is added.
template <typename T>
__device__ void add_squares(double (&sums)[PARTS], const T *gradients, size_t first, size_t at, size_t end, size_t stride,
                            float factor, double inverse) {
    constexpr int AHEAD = 4;
    for (; at < end; at += AHEAD * stride) {
        float next[AHEAD], factors[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const size_t own = at + i * stride;
            const bool inside = own < end;
            next[i] = inside ? widen(gradients[own - first]) : 0.0f;
            factors[i] = inside ? factor : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            add_square(sums, next[i], factors[i], inverse);
        }
    }
}

// A warp sums what a range of `n` elements from `first` on has of a row.
template <typename T>
__device__ void variance_rows(double *sums, const T *gradients, const float *clip, const double *scale, size_t first,
                              size_t n, size_t rows, size_t width) {
    const size_t row = own_row();
    if (row >= rows) {
        return;
    }
    const size_t start = row * width, end = start + width < first + n ? start + width : first + n;
    const double inverse = 1.0 / scale[0];
    double own[PARTS] = {};
    const size_t at = (start < first ? first : start) + threadIdx.x;
    add_squares(own, gradients, first, at, end, WARP, clip[1], inverse);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const double sum = warp_reduce(own[i], Sum());
        if (threadIdx.x == 0) {
            sums[i * rows + row] = sum;
        }
    }
}

// A block sums what the range has of some columns of a matrix.
template <typename T>
__device__ void variance_columns(double *sums, const T *gradients, const float *clip, const double *scale, size_t first,
                                 size_t n, size_t rows, size_t width) {
    SHARED(double, parts, PARTS * ROW_THREADS * COLUMN_THREADS);
    const size_t column = size_t(blockIdx.y) * COLUMN_THREADS + threadIdx.x, matrix = blockIdx.x;
    const double inverse = 1.0 / scale[0];
    double own[PARTS] = {};
    if (column < width) {
        const size_t top = matrix * rows * width + column, bottom = top + rows * width, stride = ROW_THREADS * width;
        const size_t end = bottom < first + n ? bottom : first + n;
        size_t at = top + threadIdx.y * width;
        if (at < first) {
            at += (first - at + stride - 1) / stride * stride;
        }
        add_squares(own, gradients, first, at, end, stride, clip[1], inverse);
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        parts[(i * ROW_THREADS + threadIdx.y) * COLUMN_THREADS + threadIdx.x] = own[i];
    }
    __syncthreads();
    if (threadIdx.y < PARTS && column < width) {
        double sum = 0.0;
        for (int row = 0; row < ROW_THREADS; row++) {
            const double part = parts[(threadIdx.y * ROW_THREADS + row) * COLUMN_THREADS + threadIdx.x];
            sum += part;
        }
        sums[(threadIdx.y * gridDim.x + matrix) * width + column] = sum;
    }
}

#define VARIANCE_SUMS(T, name)                                                                                          \
    extern "C" __global__ void variance_rows_##name(double *sums, const T *gradients, const float *clip,                \
                                                    const double *scale, size_t first, size_t n, size_t rows,           \
                                                    size_t width) {                                                     \
        variance_rows(sums, gradients, clip, scale, first, n, rows, width);                                             \
    }                                                                                                                   \
    EXPORT(variance_rows_##name);                                                                                       \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS *COLUMN_THREADS)                                           \
        variance_columns_##name(double *sums, const T *gradients, const float *clip, const double *scale, size_t first, \
                                size_t n, size_t rows, size_t width) {                                                  \
        variance_columns(sums, gradients, clip, scale, first, n, rows, width);                                          \
    }                                                                                                                   \
    EXPORT(variance_columns_##name)

VARIANCE_SUMS(float, f32);
VARIANCE_SUMS(bf16, bf16);

// The mean of `terms` squares whose sum is in whole numbers, in all of `ranks` rows of sums. `count`: how many sums there are.
__device__ inline float mean_square(const double *sums, size_t ranks, size_t stride, size_t count, double scale,
                                    size_t terms) {
    constexpr double SMALLER = 1.0 / PART;
    double sum = 0.0;
#pragma unroll
    for (int i = PARTS - 1; i >= 0; i--) {
        double part = 0.0;
        for (size_t rank = 0; rank < ranks; rank++) {
            part += sums[rank * stride + i * count];
        }
        sum = (sum + part) * SMALLER;
    }
    return float(sum * scale * scale / double(terms));
}

__device__ inline float moved(float state, float mean, float rate) {
    return (Unfused{state} + Unfused{rate} * (Unfused{mean} - Unfused{state})).value;
}

// A block moves the variances of a matrix, of `matrices`.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
factor_variance(float *row_states, float *column_states, float *factors, const double *sums,
                                           size_t ranks, const double *scale, const float *rates, const float *clip,
                                           float eps, size_t rows, size_t width) {
    const size_t matrix = blockIdx.x, all_rows = gridDim.x * rows, all_columns = gridDim.x * width;
    if (!isfinite(clip[1])) {
        for (size_t row = threadIdx.x; row < rows; row += blockDim.x) {
            factors[matrix * rows + row] = 0.0f;
        }
        return;
    }
    const size_t stride = PARTS * (all_rows + all_columns);
    const double *column_sums = sums + PARTS * all_rows;
    double total = 0.0;
    for (size_t row = matrix * rows + threadIdx.x; row < (matrix + 1) * rows; row += blockDim.x) {
        const float mean = mean_square(sums + row, ranks, stride, all_rows, scale[0], width);
        const float state = moved(row_states[row], mean, rates[0]);
        row_states[row] = state;
        total += double(state);
    }
    for (size_t column = matrix * width + threadIdx.x; column < (matrix + 1) * width; column += blockDim.x) {
        const float mean = mean_square(column_sums + column, ranks, stride, all_columns, scale[0], rows);
        column_states[column] = moved(column_states[column], mean, rates[0]);
    }
    const float divisor = fmaxf(float(block_sum(total) / double(rows)), eps);
    for (size_t row = matrix * rows + threadIdx.x; row < (matrix + 1) * rows; row += blockDim.x) {
        factors[row] = __fdiv_rn(row_states[row], divisor);
    }
}
EXPORT(factor_variance);

// The variances of a range that begins at the tensor's element `start`, from its factors.
struct Factors {
    const float *factors, *columns;
    size_t start, rows, width;

    // The columns of a row's matrix; only a stack of matrices costs a division.
    __device__ size_t base_of(size_t row) const { return row < rows ? 0 : row / rows * width; }
    template <bool WIDE> __device__ Pack after(const Pack &, float, size_t first, size_t n) const {
        size_t row = (start + first) / width, column = start + first - row * width, base = base_of(row);
        Pack variance;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            variance.at[i] = first + i < n ? factors[row] * columns[base + column] : 0.0f;
            column++;
            if (column == width) {
                column = 0;
                row++;
                base = base_of(row);
            }
        }
        return variance;
    }
    template <bool WIDE> __device__ void keep(const Pack &, size_t, size_t) const {}
};

// The variances of a range, an element each.
struct Elementwise {
    float *states;

    template <bool WIDE> __device__ Pack after(const Pack &gradient, float rate, size_t first, size_t n) const {
        const Pack before = load<WIDE>(states, first, n);
        Pack variance;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            variance.at[i] = moved(before.at[i], __fmul_rn(gradient.at[i], gradient.at[i]), rate);
        }
        return variance;
    }
    template <bool WIDE> __device__ void keep(const Pack &variance, size_t first, size_t n) const {
        store_together<WIDE>(states, first, n, variance);
    }
};

// Clipped gradients divided by the roots of their variances.
struct Updates {
    Pack updates, variance;
};

template <bool WIDE, typename Variance, typename G>
__device__ Updates updates_of(const G *gradients, const Variance &variance, float factor, float rate, float eps, size_t first,
                              size_t n) {
    Pack gradient = load<WIDE>(gradients, first, n);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        gradient.at[i] = __fmul_rn(gradient.at[i], factor);
    }
    const Pack after = variance.template after<WIDE>(gradient, rate, first, n);
    const float least = __fmul_rn(eps, eps);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        gradient.at[i] = (Unfused{gradient.at[i]} / root(Unfused{fmaxf(after.at[i], least)})).value;
    }
    return {gradient, after};
}

// A warp writes the sum of its block's squares.
__device__ inline void set_block(double *squares, const Pack &pack, size_t first, size_t n) {
    double lanes[PACK];
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        lanes[i] = double(pack.at[i]) * double(pack.at[i]);
    }
    const double sum = warp_reduce(pack_sum(lanes), Sum());
    if (threadIdx.x % WARP == 0 && first < n) {
        squares[first / BLOCK] = sum;
    }
}

template <typename Variance, typename G>
__device__ void update_squares(double *squares, const G *gradients, const Variance &variance, const float *rates,
                              const float *clip, float eps, size_t n) {
    const size_t first = flat_pack();
    set_block(squares, updates_of<false>(gradients, variance, clip[1], rates[0], eps, first, n).updates, first, n);
}

// `state` has an element for each gradient; or else factors and columns have the variance.
#define UPDATE_SQUARES(G, name)                                                                                            \
    extern "C" __global__ void update_squares_factors_##name(double *squares, const G *gradients, const float *factors,     \
                                                            const float *columns, size_t start, size_t rows,              \
                                                            size_t width, const float *rates, const float *clip,          \
                                                            float eps, size_t n) {                                        \
        update_squares(squares, gradients, Factors{factors, columns, start, rows, width}, rates, clip, eps, n);             \
    }                                                                                                                     \
    EXPORT(update_squares_factors_##name);                                                                                 \
    extern "C" __global__ void update_squares_elements_##name(double *squares, const G *gradients, float *state,            \
                                                             const float *rates, const float *clip, float eps, size_t n) { \
        update_squares(squares, gradients, Elementwise{state}, rates, clip, eps, n);                                        \
    }                                                                                                                     \
    EXPORT(update_squares_elements_##name)

UPDATE_SQUARES(float, f32);
UPDATE_SQUARES(bf16, bf16);

// `beside` is null where a form has no use for it.
#define WEIGHT_SQUARES(W, name)                                                                                   \
    extern "C" __global__ void weight_squares_##name(double *squares, void *parameters, void *beside, size_t n) { \
        const size_t first = flat_pack();                                                                        \
        set_block(squares, W(parameters, beside).template read<false>(first, n), first, n);                       \
    }                                                                                                            \
    EXPORT(weight_squares_##name)

WEIGHT_SQUARES(F32Weights, f32);
WEIGHT_SQUARES(MasterWeights, master);
WEIGHT_SQUARES(SplitWeights, split);
WEIGHT_SQUARES(Split24Weights, split24);
WEIGHT_SQUARES(RoundedWeights, rounded);

// One block. The first `count` grains are those of updates, the others those of weights.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
adafactor_rate(float *out, const double *grains, size_t count, const float *rates,
                                          size_t elements, float least_rms, float threshold) {
    const double updates = sqrt(block_sum(sum_of_grains(grains, count)) / double(elements));
    const double weights = sqrt(block_sum(sum_of_grains(grains + count, count)) / double(elements));
    const double size = fmax(weights, double(least_rms)), excess = fmax(updates / double(threshold), 1.0);
    if (threadIdx.x == 0) {
        out[0] = float(double(rates[1]) * size / excess);
    }
}
EXPORT(adafactor_rate);

template <typename WeightsForm, typename Variance, typename G>
__device__ void adafactor_step(const WeightsForm &weights, const Variance &variance, const G *gradients, bool aligned,
                               float step, const float *rates, float factor, float weight_decay, float eps,
                               const Random &random, size_t n) {
    const Unfused keep = Unfused{1.0f} - Unfused{rates[2]} * Unfused{weight_decay}, size = {step};
    in_rounds(aligned, n, [&](auto whole, size_t first) {
        constexpr bool WIDE = decltype(whole)();
        const Updates along = updates_of<WIDE>(gradients, variance, factor, rates[0], eps, first, n);
        variance.template keep<WIDE>(along.variance, first, n);
        Pack weight = weights.template read<WIDE>(first, n);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            weight.at[i] = (Unfused{weight.at[i]} * keep - size * Unfused{along.updates.at[i]}).value;
        }
        weights.template write<WIDE>(weight, first, n, random);
    });
}

// A factor that is not finite leaves weights and variances as they were.
#define ADAFACTOR(W, G, name)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) adafactor_factors_##name(                                        \
        void *parameters, void *beside, const float *factors, const float *columns, size_t start, size_t rows,             \
        size_t width, const G *gradients, const float *rate, const float *rates, const float *clip, const uint32_t *key,   \
        size_t first_index, float weight_decay, float eps, size_t n) {                                                     \
        if (isfinite(clip[1])) {                                                                                           \
            adafactor_step(W(parameters, beside), Factors{factors, columns, start, rows, width}, gradients,                \
                           are_wide(PACK, parameters, beside, gradients), rate[0], rates, clip[1], weight_decay, eps,      \
                           Random(key, first_index), n);                                                                   \
        }                                                                                                                  \
    }                                                                                                                      \
    EXPORT(adafactor_factors_##name);                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) adafactor_elements_##name(                                       \
        void *parameters, void *beside, float *state, const G *gradients, const float *rate, const float *rates,           \
        const float *clip, const uint32_t *key, size_t first_index, float weight_decay, float eps, size_t n) {             \
        if (isfinite(clip[1])) {                                                                                           \
            adafactor_step(W(parameters, beside), Elementwise{state}, gradients,                                           \
                           are_wide(PACK, parameters, beside, state, gradients), rate[0], rates, clip[1], weight_decay,    \
                           eps, Random(key, first_index), n);                                                              \
        }                                                                                                                  \
    }                                                                                                                      \
    EXPORT(adafactor_elements_##name)

#define ADAFACTOR_OF(W, name)         \
    ADAFACTOR(W, float, name##_f32);  \
    ADAFACTOR(W, bf16, name##_bf16)

ADAFACTOR_OF(F32Weights, f32);
ADAFACTOR_OF(MasterWeights, master);
ADAFACTOR_OF(SplitWeights, split);
ADAFACTOR_OF(Split24Weights, split24);
ADAFACTOR_OF(RoundedWeights, rounded);
