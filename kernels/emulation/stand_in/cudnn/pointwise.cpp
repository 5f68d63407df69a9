// Operations on each element by itself, and the mask of a diagonal band.
#include "operation.h"

#include <cmath>
#include <limits>

namespace stand_in {

namespace {

using Two = float (*)(float x, float b);

// What a mode makes of one operand or two; null for a mode that is not known here.
Two function_of(cudnnPointwiseMode_t mode) {
    switch (mode) {
    case CUDNN_POINTWISE_ADD: return [](float x, float b) { return x + b; };
    case CUDNN_POINTWISE_SUB: return [](float x, float b) { return x - b; };
    case CUDNN_POINTWISE_MUL: return [](float x, float b) { return x * b; };
    case CUDNN_POINTWISE_DIV: return [](float x, float b) { return x / b; };
    case CUDNN_POINTWISE_CMP_GE: return [](float x, float b) { return x >= b ? 1.0f : 0.0f; };
    case CUDNN_POINTWISE_CMP_LT: return [](float x, float b) { return x < b ? 1.0f : 0.0f; };
    case CUDNN_POINTWISE_LOGICAL_AND: return [](float x, float b) { return x != 0.0f && b != 0.0f ? 1.0f : 0.0f; };
    case CUDNN_POINTWISE_EXP: return [](float x, float) { return std::exp(x); };
    case CUDNN_POINTWISE_LOG: return [](float x, float) { return std::log(x); };
    case CUDNN_POINTWISE_IDENTITY: return [](float x, float) { return x; };
    default: return nullptr;
    }
}

bool has_one_operand(cudnnPointwiseMode_t mode) {
    return mode == CUDNN_POINTWISE_EXP || mode == CUDNN_POINTWISE_LOG || mode == CUDNN_POINTWISE_IDENTITY ||
           mode == CUDNN_POINTWISE_GEN_INDEX;
}

// Each dimension is the result's, or 1.
void check_broadcast(const Tensor &operand, const Tensor &y) {
    bool fits = operand.dims.size() == y.dims.size();
    for (size_t axis = 0; fits && axis < y.dims.size(); axis++) {
        fits = operand.dims[axis] == y.dims[axis] || operand.dims[axis] == 1;
    }
    if (!fits) {
        refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "%s does not spread to %s", written(operand.dims).c_str(), written(y.dims).c_str());
    }
}

// Calls for each element of the result with each operand's.
Dense each(const Tensor &y, const std::vector<Tensor> &operands, Values &values,
           const std::function<float(const float *elements, const Sizes &index)> &function) {
    std::vector<const Dense *> read;
    for (const Tensor &operand : operands) {
        read.push_back(&values.read(operand));
    }
    Dense result(y.elements());
    float elements[3] = {};
    each_index(y.dims, [&](const Sizes &index, size_t number) {
        for (size_t operand = 0; operand < read.size(); operand++) {
            elements[operand] = (*read[operand])[shared_place(index, y.dims, operands[operand].dims)];
        }
        result[number] = function(elements, index);
    });
    return result;
}

SharedOperation made_of(std::vector<Tensor> operands, const Tensor &y, std::function<float(const float *, const Sizes &)> function) {
    auto made = std::make_shared<Operation>();
    for (const Tensor &operand : operands) {
        check_broadcast(operand, y);
    }
    made->reads = operands;
    made->writes = {y};
    made->compute = [operands, y, function](Values &values, Order) { values.write(y, each(y, operands, values, function)); };
    return made;
}

}  // namespace

SharedOperation pointwise_of(const Descriptor &descriptor) {
    const Shared pointwise = descriptor.descriptor(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const auto mode = cudnnPointwiseMode_t(pointwise->number(CUDNN_ATTR_POINTWISE_MODE, 0));
    const Tensor &x = tensor_at(descriptor, CUDNN_ATTR_OPERATION_POINTWISE_XDESC), &y = tensor_at(descriptor, CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    if (has_one_operand(mode) == descriptor.has(CUDNN_ATTR_OPERATION_POINTWISE_BDESC)) {
        refuse(CUDNN_STATUS_BAD_PARAM, "mode %d has another number of operands", int(mode));
    }
    if (mode == CUDNN_POINTWISE_GEN_INDEX) {
        const auto axis = size_t(pointwise->number(CUDNN_ATTR_POINTWISE_AXIS, -1));
        if (axis >= y.dims.size()) {
            refuse(CUDNN_STATUS_BAD_PARAM, "indices along no axis of %s", written(y.dims).c_str());
        }
        return made_of({x}, y, [axis](const float *, const Sizes &index) { return float(index[axis]); });
    }
    if (mode == CUDNN_POINTWISE_BINARY_SELECT) {
        const Tensor &b = tensor_at(descriptor, CUDNN_ATTR_OPERATION_POINTWISE_BDESC), &t = tensor_at(descriptor, CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
        return made_of({x, b, t}, y, [](const float *elements, const Sizes &) { return elements[2] != 0.0f ? elements[0] : elements[1]; });
    }
    const Two function = function_of(mode);
    if (function == nullptr) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "mode %d of pointwise operations is not known here", int(mode));
    }
    const float alpha1 = descriptor.real(CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, 1.0f), alpha2 = descriptor.real(CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2, 1.0f);
    std::vector<Tensor> operands = {x};
    if (!has_one_operand(mode)) {
        operands.push_back(tensor_at(descriptor, CUDNN_ATTR_OPERATION_POINTWISE_BDESC));
    }
    return made_of(operands, y, [=](const float *elements, const Sizes &) { return function(alpha1 * elements[0], alpha2 * elements[1]); });
}

// Keeps what lies on the diagonal and below, by the comparison of row and column; the rest is what the scalar says.
SharedOperation band_mask_of(const Descriptor &descriptor) {
    const Tensor &x = tensor_at(descriptor, CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_XDESC), &fill = tensor_at(descriptor, CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_BDESC),
                 &y = tensor_at(descriptor, CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_YDESC);
    const int64_t mode = descriptor.number(CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE, 0);
    if (mode != CUDNN_POINTWISE_CMP_GE) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "a mask by comparison %d is not known here", int(mode));
    }
    if (!fill.is_scalar() || x.dims != y.dims || y.dims.size() < 2) {
        refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "a mask makes %s of %s", written(y.dims).c_str(), written(x.dims).c_str());
    }
    return made_of({x, fill}, y, [](const float *elements, const Sizes &index) {
        return index[index.size() - 2] >= index[index.size() - 1] ? elements[0] : elements[1];
    });
}

}  // namespace stand_in
