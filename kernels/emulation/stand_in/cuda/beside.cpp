// Functions for the other stand-ins: cuDNN's finds them by name.
#include "memory.h"

using namespace stand_in;

extern "C" int stand_in_check_memory(const void *address, size_t bytes, CUstream stream) {
    STAND_IN_ENTER(ready_on("a library", stream));
    return is_device_memory(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

extern "C" int stand_in_is_device_memory(const void *address) {
    const std::lock_guard<std::recursive_mutex> entered(lock());
    return is_device_memory(address, 1);
}

extern "C" int stand_in_current_capability() {
    const std::lock_guard<std::recursive_mutex> entered(lock());
    return current_context() == nullptr ? 0 : capability();
}
