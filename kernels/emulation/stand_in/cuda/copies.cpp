// Copies and fills. The device's side must lie in a live block. The host's may be any memory where it is written, and must
// be page-locked where it is read: a copy from other memory waits on a real device, which only its speed would show. With
// STAND_IN_PAGEABLE it may be any, for other libraries: as by a driver, it is read before the call returns.
#include "graphs.h"
#include "memory.h"

#include <cstring>
#include <memory>
#include <vector>

namespace stand_in {

static CUresult on_device(const char *function, CUdeviceptr address, size_t bytes) {
    if (is_device_memory(reinterpret_cast<void *>(address), bytes)) {
        return CUDA_SUCCESS;
    }
    say(function, "%zu bytes at %#llx are not within a block of the device", bytes, address);
    return CUDA_ERROR_INVALID_VALUE;
}

// Copies now, or whenever the graph is launched: then the device's side must still be there.
static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUdeviceptr device_side, CUstream stream) {
    const auto work = [=] {
        STAND_IN_CHECK(on_device("a copy", device_side, bytes));
        std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
        return CUDA_SUCCESS;
    };
    return captures(stream, work) ? CUDA_SUCCESS : work();
}

}  // namespace stand_in

using namespace stand_in;

extern "C" CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuMemcpyHtoDAsync", stream));
    STAND_IN_CHECK(on_device("cuMemcpyHtoDAsync", to, bytes));
    if (!is_locked_memory(from, bytes) && number_setting("STAND_IN_PAGEABLE", 0) != 0) {
        const char *first = static_cast<const char *>(from);
        const auto read = std::make_shared<std::vector<char>>(first, first + bytes);
        const auto work = [=] {
            STAND_IN_CHECK(on_device("a copy", to, bytes));
            std::memcpy(reinterpret_cast<void *>(to), read->data(), bytes);
            return CUDA_SUCCESS;
        };
        return captures(stream, work) ? CUDA_SUCCESS : work();
    }
    if (!is_locked_memory(from, bytes)) {
        say("cuMemcpyHtoDAsync", "%zu bytes at %p are not page-locked", bytes, from);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return copy(to, reinterpret_cast<CUdeviceptr>(from), bytes, to, stream);
}

extern "C" CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuMemcpyDtoHAsync", stream));
    STAND_IN_CHECK(on_device("cuMemcpyDtoHAsync", from, bytes));
    if (stream->capture == nullptr && !is_locked_memory(to, bytes)) {
        STAND_IN_CHECK(catch_up(stream));
        std::memcpy(to, reinterpret_cast<void *>(from), bytes);
        return CUDA_SUCCESS;
    }
    return copy(reinterpret_cast<CUdeviceptr>(to), from, bytes, from, stream);
}

extern "C" CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuMemcpyDtoDAsync", stream));
    STAND_IN_CHECK(on_device("cuMemcpyDtoDAsync", to, bytes));
    STAND_IN_CHECK(on_device("cuMemcpyDtoDAsync", from, bytes));
    // Memory that is never computed on need not be copied.
    return is_idle() ? CUDA_SUCCESS : copy(to, from, bytes, to, stream);
}

// Between any two places that the driver knows.
extern "C" CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuMemcpyAsync", stream));
    for (const CUdeviceptr place : {to, from}) {
        if (!is_locked_memory(reinterpret_cast<void *>(place), bytes)) {
            STAND_IN_CHECK(on_device("cuMemcpyAsync", place, bytes));
        }
    }
    STAND_IN_CHECK(not_captured("cuMemcpyAsync"));
    STAND_IN_CHECK(catch_up(stream));
    std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuMemsetD8Async", stream));
    STAND_IN_CHECK(on_device("cuMemsetD8Async", to, bytes));
    const auto work = [=] {
        STAND_IN_CHECK(on_device("cuMemsetD8Async", to, bytes));
        // Memory that is never computed on need not be filled.
        if (!is_idle()) {
            std::memset(reinterpret_cast<void *>(to), value, bytes);
        }
        return CUDA_SUCCESS;
    };
    return captures(stream, work) ? CUDA_SUCCESS : work();
}
