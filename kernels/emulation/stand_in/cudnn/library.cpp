// The library's functions: handles, descriptors, execution. A graph is computed when it is executed, whatever the stream,
// unless that captures.
#include "../settings.h"
#include "device.h"
#include "execution.h"

#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <set>

using namespace stand_in;

namespace {

std::mutex lock;
std::set<cudnnHandle_t> handles;
// What a program holds is a pointer to one of these.
std::set<std::shared_ptr<Descriptor> *> held;
thread_local std::string last_error;

// The library needs cuBLASLt: if none is loaded or can be, the real one ends the process.
__attribute__((constructor)) void check_dependencies() {
    for (const char *name : {"libcublasLt.so", "libcublasLt.so.12", "libcublasLt.so.13"}) {
        if (dlopen(name, RTLD_LAZY) != nullptr) {
            return;
        }
    }
    say("libcudnn", "there is no cuBLASLt: the process ends, as it would");
    std::abort();
}

// Makes a call. A refusal becomes its status, and is printed if it is the program's mistake; a lack of memory is not.
template <typename Call> cudnnStatus_t guarded(const char *function, const Call &call) {
    const std::lock_guard<std::mutex> entered(lock);
    try {
        call();
        return CUDNN_STATUS_SUCCESS;
    } catch (const Refusal &refusal) {
        last_error = refusal.reason;
        if (refusal.status != CUDNN_STATUS_INTERNAL_ERROR) {
            say(function, "%s", refusal.reason.c_str());
        }
        return refusal.status;
    }
}

std::shared_ptr<Descriptor> &of(cudnnBackendDescriptor_t descriptor) {
    auto *found = static_cast<std::shared_ptr<Descriptor> *>(descriptor);
    if (held.count(found) == 0) {
        refuse(CUDNN_STATUS_BAD_PARAM, "a descriptor that does not exist");
    }
    return *found;
}

cudnnHandle_t checked(cudnnHandle_t handle) {
    if (handles.count(handle) == 0) {
        refuse(CUDNN_STATUS_BAD_PARAM, "a handle that does not exist");
    }
    return handle;
}

// A finalized descriptor, and what was made of it.
template <typename T> std::shared_ptr<const T> made(cudnnBackendDescriptor_t descriptor) {
    const auto found = of(descriptor);
    if (!found->finalized) {
        refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a %s that is not finalized", name_of(found->kind).c_str());
    }
    const auto whole = std::dynamic_pointer_cast<const T>(found->made);
    if (!whole) {
        refuse(CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE, "a %s in the place of another descriptor", name_of(found->kind).c_str());
    }
    return whole;
}

std::shared_ptr<const Made> make(Descriptor &descriptor) {
    switch (descriptor.kind) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR: return tensor_of(descriptor);
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: return pointwise_of(descriptor);
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR: return matmul_of(descriptor);
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR: return reduction_of(descriptor);
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR: return reshape_of(descriptor);
    case CUDNN_BACKEND_OPERATION_DIAGONAL_BAND_MASK_DESCRIPTOR: return band_mask_of(descriptor);
    case CUDNN_BACKEND_OPERATION_SOFTMAX_DESCRIPTOR: return softmax_of(descriptor);
    case CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR: return attention_of(descriptor);
    case CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR: return device_of(descriptor);
    case CUDNN_BACKEND_ENGINE_DESCRIPTOR: return engine_of(descriptor);
    case CUDNN_BACKEND_ENGINECFG_DESCRIPTOR: return configuration_of(descriptor);
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: return plan_of(descriptor);
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR: return pack_of(descriptor);
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
        tell(descriptor, CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT, CUDNN_TYPE_INT64, {ENGINES});
        return graph_of(descriptor);
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: find_configurations(descriptor); return nullptr;
    // These have nothing beside their attributes.
    default: return nullptr;
    }
}

Value value_of(cudnnBackendAttributeType_t type, int64_t count, const void *elements) {
    if (elements == nullptr || count < 0) {
        refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "%d elements at %p", int(count), elements);
    }
    Value value = {type, count, {}, {}};
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        for (int64_t index = 0; index < count; index++) {
            value.descriptors.push_back(of(static_cast<const cudnnBackendDescriptor_t *>(elements)[index]));
        }
    } else {
        const auto *bytes = static_cast<const unsigned char *>(elements);
        value.bytes.assign(bytes, bytes + size_t(count) * element_bytes(type));
    }
    return value;
}

// Fills what the caller has room for; descriptors are put into those that it has made.
void hand_out(const Value &value, int64_t room, void *elements) {
    const int64_t count = std::min(value.count, room);
    if (value.type != CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        std::memcpy(elements, value.bytes.data(), size_t(count) * element_bytes(value.type));
        return;
    }
    for (int64_t index = 0; index < count; index++) {
        auto &place = of(static_cast<cudnnBackendDescriptor_t *>(elements)[index]);
        const Shared &found = value.descriptors[size_t(index)];
        if (place->kind != found->kind) {
            refuse(CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE, "a %s in the place of a %s", name_of(place->kind).c_str(), name_of(found->kind).c_str());
        }
        *place = *found;
    }
}

}  // namespace

extern "C" size_t cudnnGetVersion() { return version(); }

extern "C" size_t cudnnGetCudartVersion() { return number_setting("STAND_IN_CUDNN_CUDA", 12090); }

extern "C" const char *cudnnGetErrorString(cudnnStatus_t status) {
    switch (status) {
    case CUDNN_STATUS_SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_NOT_INITIALIZED: return "CUDNN_STATUS_NOT_INITIALIZED";
    case CUDNN_STATUS_EXECUTION_FAILED: return "CUDNN_STATUS_EXECUTION_FAILED";
    default: return status < 3000 ? "CUDNN_STATUS_BAD_PARAM" : "CUDNN_STATUS_NOT_SUPPORTED";
    }
}

extern "C" void cudnnGetLastErrorString(char *message, size_t room) { std::snprintf(message, room, "%s", last_error.c_str()); }

extern "C" cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    return guarded("cudnnCreate", [&] {
        const auto device = Descriptor{CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, false, {}, nullptr};
        device_of(device);
        *handle = new cudnnContext;
        handles.insert(*handle);
    });
}

extern "C" cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    return guarded("cudnnDestroy", [&] {
        handles.erase(checked(handle));
        delete handle;
    });
}

extern "C" cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    return guarded("cudnnSetStream", [&] { checked(handle)->stream = stream; });
}

extern "C" cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind, cudnnBackendDescriptor_t *descriptor) {
    return guarded("cudnnBackendCreateDescriptor", [&] {
        check_kind(kind);
        auto *made = new std::shared_ptr<Descriptor>(std::make_shared<Descriptor>());
        (*made)->kind = kind;
        held.insert(made);
        *descriptor = made;
    });
}

// Descriptors that name it keep what they need of it.
extern "C" cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    return guarded("cudnnBackendDestroyDescriptor", [&] {
        auto *found = &of(descriptor);
        held.erase(found);
        delete found;
    });
}

extern "C" cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                                  cudnnBackendAttributeType_t type, int64_t count, const void *elements) {
    return guarded("cudnnBackendSetAttribute", [&] { set(*of(descriptor), name, value_of(type, count, elements)); });
}

extern "C" cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    return guarded("cudnnBackendFinalize", [&] {
        const auto found = of(descriptor);
        if (found->finalized) {
            refuse(CUDNN_STATUS_BAD_PARAM, "a %s is finalized twice", name_of(found->kind).c_str());
        }
        check_complete(*found);
        found->made = make(*found);
        found->finalized = true;
    });
}

extern "C" cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                                  cudnnBackendAttributeType_t type, int64_t room, int64_t *count, void *elements) {
    return guarded("cudnnBackendGetAttribute", [&] {
        const auto found = of(descriptor);
        if (!found->finalized) {
            refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a %s that is not finalized", name_of(found->kind).c_str());
        }
        if (!found->has(name)) {
            refuse(CUDNN_STATUS_NOT_SUPPORTED, "a %s has no attribute %d", name_of(found->kind).c_str(), int(name));
        }
        const Value &value = found->attributes.at(name);
        if (value.type != type) {
            refuse(CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE, "attribute %d has type %d, not %d", int(name), int(value.type), int(type));
        }
        if (count != nullptr) {
            *count = value.count;
        }
        if (elements != nullptr) {
            hand_out(value, room, elements);
        }
    });
}

extern "C" cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
    return guarded("cudnnBackendExecute", [&] { execute(made<Plan>(plan), *made<Pack>(pack), checked(handle)->stream); });
}
