// The sums of what `columns.cuh` and `norm_backward.cuh` leave.
#include "columns.cuh"

// Adds partial sums `[count, width]`: a block's columns, over all parts.
template <typename G>
__device__ void add_parts(G *out, const float *parts, size_t count, size_t width, int accumulate) {
    const size_t first = column_pack();
    const auto term = [&](auto known_wide, size_t part) { return load<known_wide>(parts + part * width, first, width); };
    const float sum = column_sums(0, count, first < width && are_wide(width, parts), term);
    store_column_sums(out, width, sum, accumulate);
}

#define OF_ONE_TYPE(G, name)                                                                                   \
    extern "C" __global__ void __launch_bounds__(COLUMN_PACKS *ROW_LANES_MAX)                                  \
        add_parts_##name(G *out, const float *parts, size_t count, size_t width, int accumulate) {             \
        add_parts(out, parts, count, width, accumulate);                                                       \
    }                                                                                                          \
    EXPORT(add_parts_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
