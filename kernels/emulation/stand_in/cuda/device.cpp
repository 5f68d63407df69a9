// Devices, what they are, and their contexts.
#include "state.h"

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <sys/file.h>

namespace stand_in {

static bool initialised = false;

std::recursive_mutex &lock() {
    static std::recursive_mutex mutex;
    return mutex;
}

bool is_initialised() { return initialised; }

std::vector<CUctx_st> &contexts() {
    static std::vector<CUctx_st> contexts = [] {
        std::vector<CUctx_st> contexts;
        for (uint64_t device = 0; device < number_setting("STAND_IN_DEVICES", 1); device++) {
            contexts.push_back({CUdevice(device), 0});
        }
        return contexts;
    }();
    return contexts;
}

CUcontext &current_context() {
    static thread_local CUcontext current = nullptr;
    return current;
}

int capability() {
    static const int capability = [] {
        const std::string text = setting("STAND_IN_CAPABILITY", "9.0");
        return 10 * std::atoi(text.c_str()) + std::atoi(text.c_str() + text.find('.') + 1);
    }();
    return capability;
}

int driver_version() {
    static const int version = int(number_setting("STAND_IN_DRIVER_VERSION", 13000));
    return version;
}

// CUDA C++ Programming Guide, technical specifications per compute capability.
size_t shared_bytes_max() {
    switch (capability()) {
        case 75: return 64 << 10;
        case 80: return 163 << 10;
        case 86: case 89: case 120: return 99 << 10;
        default: return 227 << 10;
    }
}

// Adds what CUDA_DEVICE_MAX_CONNECTIONS says when the driver starts, which is when it is read, to the file that
// STAND_IN_CONNECTIONS names.
static void note_connections() {
    const std::string path = setting("STAND_IN_CONNECTIONS", "");
    if (!path.empty()) {
        std::ofstream(path, std::ios::app) << setting("CUDA_DEVICE_MAX_CONNECTIONS", "8") << '\n';
    }
}

// Whether this process may have a context on a device: where STAND_IN_EXCLUSIVE names a file, one process at a time may, as in the
// compute mode EXCLUSIVE_PROCESS. The lock goes with the process.
static bool may_enter(CUdevice device) {
    static std::vector<bool> entered(contexts().size());
    const std::string path = setting("STAND_IN_EXCLUSIVE", "");
    if (path.empty() || entered[size_t(device)]) {
        return true;
    }
    const int file = open((path + std::to_string(device)).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    entered[size_t(device)] = file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0;
    return entered[size_t(device)];
}

// Whether there is such a device.
static CUresult check(CUdevice device) {
    if (!initialised) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    return device >= 0 && size_t(device) < contexts().size() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

}  // namespace stand_in

using namespace stand_in;

extern "C" CUresult cuInit(unsigned int flags) {
    STAND_IN_ENTER(flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    if (!initialised) {
        note_connections();
        // The first call makes what the second one looks at, which so lives longer.
        report_what_is_left();
        std::atexit(report_what_is_left);
    }
    initialised = !contexts().empty();
    return initialised ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

extern "C" CUresult cuDriverGetVersion(int *version) {
    *version = driver_version();
    return CUDA_SUCCESS;
}

extern "C" CUresult cuDeviceGetCount(int *count) {
    *count = int(contexts().size());
    return initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

extern "C" CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    STAND_IN_ENTER(check(ordinal));
    *device = ordinal;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    STAND_IN_ENTER(check(device));
    std::snprintf(name, size_t(length), "%s", setting("STAND_IN_NAME", "Stand-in GPU").c_str());
    return CUDA_SUCCESS;
}

// Each on a bus of its own, from 1.
extern "C" CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    STAND_IN_ENTER(check(device));
    std::snprintf(id, size_t(length), "0000:%02X:00.0", device + 1);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    STAND_IN_ENTER(check(device));
    if (attribute == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID && driver_version() < 12020) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = int(SHARED_BYTES); break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
        // Small, so that what empties it takes no time.
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 32 << 10; break;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 3; break;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
        case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value = 0; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability() / 10; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability() % 10; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = int(shared_bytes_max()); break;
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = int(number_setting("STAND_IN_POOLS", 1)); break;
        default:
            say("cuDeviceGetAttribute", "attribute %d is not known here", int(attribute));
            return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

extern "C" CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    STAND_IN_ENTER(check(device));
    STAND_IN_CHECK(may_enter(device) ? CUDA_SUCCESS : CUDA_ERROR_DEVICE_UNAVAILABLE);
    *context = &contexts()[size_t(device)];
    (*context)->retained++;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    STAND_IN_ENTER(check(device));
    if (contexts()[size_t(device)].retained == 0) {
        say("cuDevicePrimaryCtxRelease", "device %d has no retained context", device);
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (--contexts()[size_t(device)].retained == 0 && has_loaded_code(device)) {
        say("cuDevicePrimaryCtxRelease", "the context of device %d goes, with the code that libraries have loaded into it", device);
    }
    return CUDA_SUCCESS;
}

extern "C" CUresult cuCtxSetCurrent(CUcontext context) {
    STAND_IN_ENTER(context != nullptr && context->retained == 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS);
    current_context() = context;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current_context();
    return initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

extern "C" CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return ready("cuCtxGetStreamPriorityRange");
}
