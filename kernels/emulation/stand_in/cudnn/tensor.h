// Tensors as a graph describes them, and their values while it is computed.
#pragma once

#include "descriptor.h"

#include <functional>

namespace stand_in {

using Sizes = std::vector<int64_t>;
// Values in the order of the dimensions, the last one fastest, whatever the strides.
using Dense = std::vector<float>;

struct Tensor : Made {
    int64_t uid;
    cudnnDataType_t type;
    Sizes dims, strides;
    int64_t alignment_bytes;
    // Lives within the graph alone.
    bool is_virtual;
    // Its address in the variant pack is the processor's, and read when the graph is executed.
    bool is_by_value;
    // Numbers that say where each sequence begins, in elements; null where the strides do.
    std::shared_ptr<const Tensor> offsets;

    size_t elements() const;
    size_t element_bytes() const;
    // From its first element to the end of its last.
    size_t span_bytes() const;
    bool is_scalar() const { return elements() == 1; }
    bool is_in_memory() const { return !is_virtual && !is_by_value; }
    // Of the last two dimensions, that of tokens.
    size_t token_axis() const { return strides[3] > strides[2] ? 3 : 2; }
    bool operator==(const Tensor &other) const;
};

// From a descriptor that is complete.
std::shared_ptr<const Tensor> tensor_of(const Descriptor &descriptor);

// The tensor that an attribute names, which must be there.
const Tensor &tensor_at(const Descriptor &descriptor, cudnnBackendAttributeName_t name);

// "2x8x512x64", for messages.
std::string written(const Sizes &sizes);

size_t elements_of(const Sizes &dims);

// Calls with each index in the order of `Dense`.
template <typename Call> void each_index(const Sizes &dims, const Call &call) {
    Sizes index(dims.size(), 0);
    for (size_t number = 0;; number++) {
        call(index, number);
        size_t axis = dims.size();
        while (axis > 0 && ++index[axis - 1] == dims[axis - 1]) {
            index[--axis] = 0;
        }
        if (axis == 0) {
            return;
        }
    }
}

// Where an index of one tensor falls in `Dense` of another, whose dimensions divide the first one's: neighbours share an
// element. So heads of keys are shared by groups of query heads, and rows of one element by whole rows.
size_t shared_place(const Sizes &index, const Sizes &dims, const Sizes &of);

// Whether every size divides the other's.
bool divides(const Sizes &parts, const Sizes &whole);

// As the type keeps it.
float rounded(float value, cudnnDataType_t type);

// How long sequences are, and where they begin in tensors that have numbers for that.
struct Sequences {
    std::vector<int64_t> lengths;
    // By the number of the tensor, in its elements.
    std::map<int64_t, std::vector<int64_t>> begins;

    // Whether an index of a tensor is within its sequence.
    bool has(const Tensor &tensor, const Sizes &index) const;
    // Where it lies, in elements.
    size_t place(const Tensor &tensor, const Sizes &index) const;
    // From the first element of a tensor to the end of the last that is there.
    size_t span_bytes(const Tensor &tensor) const;
};

// What tensors hold while a graph is computed.
class Values {
public:
    Values(std::map<int64_t, void *> pointers, Sequences sequences) : pointers(std::move(pointers)), sequences(std::move(sequences)) {}

    // Reads memory the first time.
    const Dense &read(const Tensor &tensor);
    // Rounds to the tensor's type; in memory too, if it has any.
    void write(const Tensor &tensor, Dense values);
    // Whether an index of a tensor whose sequences have lengths is within its own.
    bool has(const Tensor &tensor, const Sizes &index) const { return sequences.has(tensor, index); }

private:
    std::map<int64_t, void *> pointers;
    Sequences sequences;
    std::map<int64_t, Dense> known;
};

}  // namespace stand_in
