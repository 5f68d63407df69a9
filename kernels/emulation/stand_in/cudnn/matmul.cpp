// Products of matrices.
#include "operation.h"

#include <algorithm>

namespace stand_in {

namespace {

// Elements of a sum that are one part of it where its order is not kept.
const int64_t PART = 8;

struct Shape {
    int64_t rows, columns, depth;
};

// The matrices of a batch without what is left of the dimensions.
Sizes batch_of(const Sizes &dims) { return Sizes(dims.begin(), dims.end() - 2); }

// One row of a product, added to what is there.
void add_row(float *sums, const float *a_row, const float *b, int64_t from, int64_t to, int64_t columns) {
    for (int64_t k = from; k < to; k++) {
        for (int64_t column = 0; column < columns; column++) {
            sums[column] += a_row[k] * b[k * columns + column];
        }
    }
}

void add_row_in_parts(float *sums, const float *a_row, const float *b, const Shape &shape, Order order) {
    const int64_t parts = (shape.depth + PART - 1) / PART;
    for (int64_t number = 0; number < parts; number++) {
        const int64_t part = order == Order::REVERSED_IN_PARTS ? parts - 1 - number : number;
        add_row(sums, a_row, b, part * PART, std::min((part + 1) * PART, shape.depth), shape.columns);
        for (int64_t column = 0; column < shape.columns; column++) {
            sums[column] = rounded(sums[column], CUDNN_DATA_BFLOAT16);
        }
    }
}

void multiply(const float *a, const float *b, float *c, const Shape &shape, Order order) {
    for (int64_t row = 0; row < shape.rows; row++) {
        float *sums = c + row * shape.columns;
        const float *a_row = a + row * shape.depth;
        if (order == Order::KEPT) {
            add_row(sums, a_row, b, 0, shape.depth, shape.columns);
        } else {
            add_row_in_parts(sums, a_row, b, shape, order);
        }
    }
}

}  // namespace

Dense product(const Sizes &a_dims, const Dense &a, const Sizes &b_dims, const Dense &b, const Sizes &c_dims, Order order) {
    const size_t rank = c_dims.size();
    const Shape shape = {c_dims[rank - 2], c_dims[rank - 1], a_dims[rank - 1]};
    const Sizes batch = batch_of(c_dims);
    Dense c(elements_of(c_dims));
    each_index(batch, [&](const Sizes &index, size_t number) {
        const size_t left = shared_place(index, batch, batch_of(a_dims)), right = shared_place(index, batch, batch_of(b_dims));
        multiply(&a[left * size_t(shape.rows * shape.depth)], &b[right * size_t(shape.depth * shape.columns)],
                 &c[number * size_t(shape.rows * shape.columns)], shape, order);
    });
    return c;
}

SharedOperation matmul_of(const Descriptor &descriptor) {
    const Tensor &a = tensor_at(descriptor, CUDNN_ATTR_OPERATION_MATMUL_ADESC), &b = tensor_at(descriptor, CUDNN_ATTR_OPERATION_MATMUL_BDESC),
                 &c = tensor_at(descriptor, CUDNN_ATTR_OPERATION_MATMUL_CDESC);
    const size_t rank = c.dims.size();
    if (rank < 3 || a.dims.size() != rank || b.dims.size() != rank || a.dims[rank - 1] != b.dims[rank - 2] ||
        a.dims[rank - 2] != c.dims[rank - 2] || b.dims[rank - 1] != c.dims[rank - 1] ||
        !divides(batch_of(a.dims), batch_of(c.dims)) || !divides(batch_of(b.dims), batch_of(c.dims))) {
        refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "%s times %s is not %s", written(a.dims).c_str(), written(b.dims).c_str(),
               written(c.dims).c_str());
    }
    auto made = std::make_shared<Operation>();
    made->reads = {a, b};
    made->writes = {c};
    for (const auto name : {CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC,
                            CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC}) {
        if (descriptor.has(name)) {
            made->lengths.push_back(tensor_at(descriptor, name));
            made->reads.push_back(made->lengths.back());
        }
    }
    made->is_product = true;
    made->rows = c.dims[rank - 2];
    made->columns = c.dims[rank - 1];
    made->compute = [a, b, c](Values &values, Order order) {
        // Sums in f32 of memory alone are what a device adds up block by block.
        const bool is_ordered = c.is_virtual || c.type != CUDNN_DATA_FLOAT;
        values.write(c, product(a.dims, values.read(a), b.dims, values.read(b), c.dims, is_ordered ? Order::KEPT : order));
    };
    return made;
}

}  // namespace stand_in
