// Descriptors: attributes by name, checked against what a descriptor of its kind may have.
#pragma once

#include "backend_api.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace stand_in {

// Why a call is refused. Thrown within a call, which returns it to its caller as a status.
struct Refusal {
    cudnnStatus_t status;
    std::string reason;
};

// Formats as printf does.
[[noreturn]] void refuse(cudnnStatus_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));

// The version that this library says it is: STAND_IN_CUDNN_VERSION.
uint64_t version();

struct Descriptor;
using Shared = std::shared_ptr<const Descriptor>;

struct Value {
    cudnnBackendAttributeType_t type;
    int64_t count;
    // The elements, unless they are descriptors.
    std::vector<unsigned char> bytes;
    std::vector<Shared> descriptors;
};

// The result of finalizing a descriptor, beside its attributes; every kind derives its own.
struct Made {
    virtual ~Made() = default;
};

struct Descriptor {
    cudnnBackendDescriptorType_t kind;
    bool finalized = false;
    std::map<int, Value> attributes;
    std::shared_ptr<const Made> made;

    bool has(cudnnBackendAttributeName_t name) const { return attributes.count(name) != 0; }
    // The first element; `otherwise` where the attribute is not set.
    int64_t number(cudnnBackendAttributeName_t name, int64_t otherwise) const;
    float real(cudnnBackendAttributeName_t name, float otherwise) const;
    std::vector<int64_t> numbers(cudnnBackendAttributeName_t name) const;
    std::vector<void *> pointers(cudnnBackendAttributeName_t name) const;
    std::string text(cudnnBackendAttributeName_t name) const;
    // Null where the attribute is not set.
    Shared descriptor(cudnnBackendAttributeName_t name) const;
    std::vector<Shared> descriptors(cudnnBackendAttributeName_t name) const;

    // What finalizing has made of a descriptor that an attribute names.
    template <typename T> std::shared_ptr<const T> made_of(cudnnBackendAttributeName_t name) const {
        const Shared found = descriptor(name);
        return found ? std::dynamic_pointer_cast<const T>(found->made) : nullptr;
    }
};

// Whether there are descriptors of this kind in this version of the library.
void check_kind(cudnnBackendDescriptorType_t kind);

// Sets an attribute that a program may set.
void set(Descriptor &descriptor, cudnnBackendAttributeName_t name, Value value);

// Refuses a descriptor that lacks what it must have.
void check_complete(const Descriptor &descriptor);

// Sets what only the library knows; numbers alone.
void tell(Descriptor &descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::vector<int64_t> numbers);
void tell(Descriptor &descriptor, cudnnBackendAttributeName_t name, std::vector<Shared> descriptors);

// Bytes of an element of an attribute.
size_t element_bytes(cudnnBackendAttributeType_t type);

// As messages call a kind: "TENSOR".
std::string name_of(cudnnBackendDescriptorType_t kind);

}  // namespace stand_in
