// The sums of what `column_sums` leaves.
#include "columns.cuh"

// Adds partial sums `[count, width]` in their order, a thread a pack of columns.
template <typename G>
__device__ void add_parts(G *out, const float *parts, size_t count, size_t width, int accumulate) {
    const size_t first = flat_pack();
    if (first >= width) {
        return;
    }
    Pack sums = load(parts, first, width);
    knowing(are_wide(width, parts), [&](auto known_wide) {
#pragma unroll 4
        for (size_t part = 1; part < count; part++) {
            add(sums, load<known_wide>(parts + part * width, first, width));
        }
    });
    store_or_add(out, first, width, sums, accumulate);
}

#define OF_ONE_TYPE(G, name)                                                                                   \
    extern "C" __global__ void add_parts_##name(G *out, const float *parts, size_t count, size_t width,        \
                                                int accumulate) {                                              \
        add_parts(out, parts, count, width, accumulate);                                                       \
    }                                                                                                          \
    EXPORT(add_parts_##name)

OF_ONE_TYPE(float, f32);
OF_ONE_TYPE(bf16, bf16);
