#include "tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace stand_in {

static float from_bf16(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds to the nearest bf16, ties to even; NaN stays NaN.
static uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) {
        return uint16_t(bits >> 16 | 0x40);
    }
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float rounded(float value, cudnnDataType_t type) {
    switch (type) {
    case CUDNN_DATA_BFLOAT16: return from_bf16(to_bf16(value));
    case CUDNN_DATA_INT32: return std::trunc(value);
    case CUDNN_DATA_BOOLEAN: return value != 0.0f ? 1.0f : 0.0f;
    default: return value;
    }
}

std::string written(const Sizes &sizes) {
    std::string text;
    for (const int64_t size : sizes) {
        text += (text.empty() ? "" : "x") + std::to_string(size);
    }
    return text;
}

size_t elements_of(const Sizes &dims) { return std::accumulate(dims.begin(), dims.end(), size_t{1}, std::multiplies<>()); }

size_t Tensor::elements() const { return elements_of(dims); }

size_t Tensor::element_bytes() const {
    return type == CUDNN_DATA_BOOLEAN ? 1 : type == CUDNN_DATA_BFLOAT16 ? 2 : 4;
}

size_t Tensor::span_bytes() const {
    int64_t last = 0;
    for (size_t axis = 0; axis < dims.size(); axis++) {
        last += (dims[axis] - 1) * strides[axis];
    }
    return size_t(last + 1) * element_bytes();
}

bool Tensor::operator==(const Tensor &other) const {
    return uid == other.uid && type == other.type && dims == other.dims && strides == other.strides &&
           alignment_bytes == other.alignment_bytes && is_virtual == other.is_virtual && is_by_value == other.is_by_value &&
           (offsets ? other.offsets && *offsets == *other.offsets : !other.offsets);
}

// Whether no two elements lie at the same place: each stride is beyond all that smaller ones reach.
static bool is_one_to_one(const Tensor &tensor) {
    std::vector<size_t> axes(tensor.dims.size());
    std::iota(axes.begin(), axes.end(), size_t{0});
    std::sort(axes.begin(), axes.end(), [&](size_t a, size_t b) { return tensor.strides[a] < tensor.strides[b]; });
    int64_t reach = 0;
    for (const size_t axis : axes) {
        if (tensor.dims[axis] > 1 && tensor.strides[axis] <= reach) {
            return false;
        }
        reach += (tensor.dims[axis] - 1) * tensor.strides[axis];
    }
    return true;
}

std::shared_ptr<const Tensor> tensor_of(const Descriptor &descriptor) {
    auto made = std::make_shared<Tensor>();
    Tensor &tensor = *made;
    tensor.uid = descriptor.number(CUDNN_ATTR_TENSOR_UNIQUE_ID, 0);
    tensor.type = cudnnDataType_t(descriptor.number(CUDNN_ATTR_TENSOR_DATA_TYPE, 0));
    tensor.dims = descriptor.numbers(CUDNN_ATTR_TENSOR_DIMENSIONS);
    tensor.strides = descriptor.numbers(CUDNN_ATTR_TENSOR_STRIDES);
    tensor.alignment_bytes = descriptor.number(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 0);
    tensor.is_virtual = descriptor.number(CUDNN_ATTR_TENSOR_IS_VIRTUAL, 0) != 0;
    tensor.is_by_value = descriptor.number(CUDNN_ATTR_TENSOR_IS_BY_VALUE, 0) != 0;
    const int uid = int(tensor.uid);
    const bool is_list = tensor.dims.size() == 4 && tensor.elements() == size_t(tensor.dims[0]);
    if (tensor.type != CUDNN_DATA_FLOAT && tensor.type != CUDNN_DATA_BFLOAT16 &&
        !(tensor.is_virtual && (tensor.type == CUDNN_DATA_INT32 || tensor.type == CUDNN_DATA_BOOLEAN)) &&
        !(is_list && tensor.type == CUDNN_DATA_INT32)) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE, "tensor %d has type %d: f32 and bf16 are known here, and lists of i32", uid,
               int(tensor.type));
    }
    if (tensor.dims.size() != tensor.strides.size()) {
        refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d has %d dimensions and %d strides", uid, int(tensor.dims.size()), int(tensor.strides.size()));
    }
    for (size_t axis = 0; axis < tensor.dims.size(); axis++) {
        if (tensor.dims[axis] < 1 || tensor.strides[axis] < 1) {
            refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d has dimensions %s and strides %s", uid, written(tensor.dims).c_str(),
                   written(tensor.strides).c_str());
        }
    }
    // Nothing lies anywhere of a virtual one.
    if (!tensor.is_virtual && !is_one_to_one(tensor)) {
        refuse(CUDNN_STATUS_BAD_PARAM, "elements of tensor %d, %s, lie at the same place by strides %s", uid,
               written(tensor.dims).c_str(), written(tensor.strides).c_str());
    }
    if (tensor.alignment_bytes < int64_t(tensor.element_bytes()) || (tensor.alignment_bytes & (tensor.alignment_bytes - 1)) != 0) {
        refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d is aligned to %d bytes", uid, int(tensor.alignment_bytes));
    }
    if (tensor.is_by_value && (tensor.is_virtual || !tensor.is_scalar() || tensor.type != CUDNN_DATA_FLOAT)) {
        refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d, %s, is passed by value, and not one number of f32", uid, written(tensor.dims).c_str());
    }
    tensor.offsets = descriptor.made_of<Tensor>(CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC);
    if (tensor.offsets) {
        const Tensor &offsets = *tensor.offsets;
        if (tensor.dims.size() != 4 || offsets.dims != Sizes{tensor.dims[0] + 1, 1, 1, 1} || offsets.type != CUDNN_DATA_INT32 ||
            !offsets.is_in_memory()) {
            refuse(CUDNN_STATUS_BAD_PARAM, "tensor %d, %s, begins where tensor %d, %s of type %d, says: there must be one i32 more than sequences",
                   uid, written(tensor.dims).c_str(), int(offsets.uid), written(offsets.dims).c_str(), int(offsets.type));
        }
    }
    return made;
}

const Tensor &tensor_at(const Descriptor &descriptor, cudnnBackendAttributeName_t name) {
    const auto found = descriptor.made_of<Tensor>(name);
    if (!found) {
        refuse(CUDNN_STATUS_BAD_PARAM, "a %s lacks its tensor %d", name_of(descriptor.kind).c_str(), int(name));
    }
    // Held by the descriptor that names it.
    return *found;
}

size_t shared_place(const Sizes &index, const Sizes &dims, const Sizes &of) {
    size_t place = 0;
    for (size_t axis = 0; axis < of.size(); axis++) {
        place = place * size_t(of[axis]) + size_t(index[axis] / (dims[axis] / of[axis]));
    }
    return place;
}

bool divides(const Sizes &parts, const Sizes &whole) {
    return parts.size() == whole.size() &&
           std::equal(parts.begin(), parts.end(), whole.begin(), [](int64_t part, int64_t all) { return all % part == 0; });
}

static size_t offset(const Tensor &tensor, const Sizes &index) {
    return size_t(std::inner_product(index.begin(), index.end(), tensor.strides.begin(), int64_t{0}));
}

bool Sequences::has(const Tensor &tensor, const Sizes &index) const {
    return begins.count(tensor.uid) == 0 || index[tensor.token_axis()] < lengths[size_t(index[0])];
}

size_t Sequences::place(const Tensor &tensor, const Sizes &index) const {
    const auto found = begins.find(tensor.uid);
    if (found == begins.end()) {
        return offset(tensor, index);
    }
    Sizes within = index;
    within[0] = 0;
    return size_t(found->second[size_t(index[0])]) + offset(tensor, within);
}

size_t Sequences::span_bytes(const Tensor &tensor) const {
    if (begins.count(tensor.uid) == 0) {
        return tensor.span_bytes();
    }
    size_t end = 0;
    for (size_t number = 0; number < lengths.size(); number++) {
        Sizes last = tensor.dims;
        last[tensor.token_axis()] = lengths[number];
        for (int64_t &place : last) {
            place--;
        }
        last[0] = int64_t(number);
        end = lengths[number] == 0 ? end : std::max(end, place(tensor, last) + 1);
    }
    return end * tensor.element_bytes();
}

// What lies beyond the length of a sequence reads as zero.
const Dense &Values::read(const Tensor &tensor) {
    const auto found = known.find(tensor.uid);
    if (found != known.end()) {
        return found->second;
    }
    const void *memory = pointers.at(tensor.uid);
    Dense values(tensor.elements());
    each_index(tensor.dims, [&](const Sizes &index, size_t number) {
        if (!sequences.has(tensor, index)) {
            return;
        }
        const size_t at = sequences.place(tensor, index);
        switch (tensor.type) {
        case CUDNN_DATA_BFLOAT16: values[number] = from_bf16(static_cast<const uint16_t *>(memory)[at]); break;
        case CUDNN_DATA_INT32: values[number] = float(static_cast<const int32_t *>(memory)[at]); break;
        default: values[number] = static_cast<const float *>(memory)[at];
        }
    });
    return known[tensor.uid] = std::move(values);
}

void Values::write(const Tensor &tensor, Dense values) {
    for (float &value : values) {
        value = rounded(value, tensor.type);
    }
    if (tensor.is_in_memory()) {
        void *memory = pointers.at(tensor.uid);
        each_index(tensor.dims, [&](const Sizes &index, size_t number) {
            if (!sequences.has(tensor, index)) {
                return;
            }
            const size_t at = sequences.place(tensor, index);
            if (tensor.type == CUDNN_DATA_BFLOAT16) {
                static_cast<uint16_t *>(memory)[at] = to_bf16(values[number]);
            } else {
                static_cast<float *>(memory)[at] = values[number];
            }
        });
    }
    known[tensor.uid] = std::move(values);
}

}  // namespace stand_in
