// The sums of what `columns.cuh` and `norm_backward.cuh` leave.
#include "columns.cuh"

// Adds partial sums `[count, width]`: a block's columns, over all parts. Up to three vectors receive the columns: the second
// those from `seconds` on, the third those from `thirds` on.
template <typename G>
__device__ void add_parts(G *first_out, G *second_out, G *third_out, size_t seconds, size_t thirds, const float *parts,
                          size_t count, size_t width, int accumulate) {
    const size_t first = column_pack();
    const auto term = [&](auto known_wide, size_t part) { return load<known_wide>(parts + part * width, first, width); };
    const float sum = column_sums(0, count, first < width && are_wide(width, parts), term);
    store_column_sums<G>(width, sum, accumulate, [&](size_t column) {
        return column < seconds  ? first_out + column
               : column < thirds ? second_out + (column - seconds)
                                 : third_out + (column - thirds);
    });
}

#define OF_ONE_TYPE(G, name)                                                                                   \
    extern "C" __global__ void __launch_bounds__(COLUMN_PACKS *ROW_LANES_MAX)                                  \
        add_parts_##name(G *first_out, G *second_out, G *third_out, size_t seconds, size_t thirds,             \
                         const float *parts, size_t count, size_t width, int accumulate) {                     \
        add_parts(first_out, second_out, third_out, seconds, thirds, parts, count, width, accumulate);         \
    }                                                                                                          \
    EXPORT(add_parts_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
