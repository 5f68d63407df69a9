// Sums and maxima of neighbours, and other views of the same elements.
#include "operation.h"

#include <algorithm>
#include <limits>

namespace stand_in {

SharedOperation reduction_of(const Descriptor &descriptor) {
    const Shared reduction = descriptor.descriptor(CUDNN_ATTR_OPERATION_REDUCTION_DESC);
    const auto way = cudnnReduceTensorOp_t(reduction->number(CUDNN_ATTR_REDUCTION_OPERATOR, 0));
    const Tensor &x = tensor_at(descriptor, CUDNN_ATTR_OPERATION_REDUCTION_XDESC), &y = tensor_at(descriptor, CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
    if (way != CUDNN_REDUCE_TENSOR_ADD && way != CUDNN_REDUCE_TENSOR_MAX) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "reductions of kind %d are not known here", int(way));
    }
    if (!divides(y.dims, x.dims)) {
        refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "%s does not reduce to %s", written(x.dims).c_str(), written(y.dims).c_str());
    }
    auto made = std::make_shared<Operation>();
    made->reads = {x};
    made->writes = {y};
    made->is_reduction = true;
    made->compute = [x, y, way](Values &values, Order) {
        const Dense &read = values.read(x);
        const bool adds = way == CUDNN_REDUCE_TENSOR_ADD;
        Dense result(y.elements(), adds ? 0.0f : -std::numeric_limits<float>::infinity());
        each_index(x.dims, [&](const Sizes &index, size_t number) {
            float &to = result[shared_place(index, x.dims, y.dims)];
            to = adds ? to + read[number] : std::max(to, read[number]);
        });
        values.write(y, std::move(result));
    };
    return made;
}

// For each axis of a view, the axis of what is viewed that has its size and stride: nothing moves.
static std::vector<size_t> axes_of(const Tensor &y, const Tensor &x) {
    std::vector<size_t> axes, left;
    for (size_t axis = 0; axis < x.dims.size(); axis++) {
        left.push_back(axis);
    }
    for (size_t axis = 0; axis < y.dims.size(); axis++) {
        const auto same = std::find_if(left.begin(), left.end(), [&](size_t other) {
            return x.dims[other] == y.dims[axis] && (x.strides[other] == y.strides[axis] || y.dims[axis] == 1);
        });
        if (same == left.end()) {
            break;
        }
        axes.push_back(*same);
        left.erase(same);
    }
    if (axes.size() != x.dims.size() || y.dims.size() != x.dims.size()) {
        refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "%s by strides %s has not the places of %s by %s", written(y.dims).c_str(),
               written(y.strides).c_str(), written(x.dims).c_str(), written(x.strides).c_str());
    }
    return axes;
}

// Another view of the same places, such as a transpose; views that split or join dimensions are not known here.
SharedOperation reshape_of(const Descriptor &descriptor) {
    const Tensor &x = tensor_at(descriptor, CUDNN_ATTR_OPERATION_RESHAPE_XDESC), &y = tensor_at(descriptor, CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
    if (descriptor.number(CUDNN_ATTR_OPERATION_RESHAPE_MODE, CUDNN_RESHAPE_VIEW_ONLY) != CUDNN_RESHAPE_VIEW_ONLY) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "reshapes that move elements are not known here");
    }
    auto made = std::make_shared<Operation>();
    made->reads = {x};
    made->writes = {y};
    made->compute = [x, y, axes = axes_of(y, x)](Values &values, Order) {
        const Dense &read = values.read(x);
        Dense result(y.elements());
        Sizes viewed(x.dims.size());
        each_index(y.dims, [&](const Sizes &index, size_t number) {
            for (size_t axis = 0; axis < axes.size(); axis++) {
                viewed[axes[axis]] = index[axis];
            }
            result[number] = read[shared_place(viewed, x.dims, x.dims)];
        });
        values.write(y, std::move(result));
    };
    return made;
}

}  // namespace stand_in
