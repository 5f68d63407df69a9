#include "driver.h"
#include "../settings.h"

#include <dlfcn.h>

namespace stand_in {

// A function of the driver; null where it is not loaded.
template <typename T> static T driver(const char *name) {
    void *library = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<T>(dlsym(library, name));
}

int current_capability() {
    const auto capability = driver<int (*)()>("stand_in_current_capability");
    return capability == nullptr ? 0 : capability();
}

bool is_on_device(const void *memory, size_t bytes, cudaStream_t stream) {
    const auto check = driver<int (*)(const void *, size_t, cudaStream_t)>("stand_in_check_memory");
    return check != nullptr && check(memory, bytes, stream) == 0;
}

bool is_device_memory(const void *memory) {
    const auto is_device = driver<int (*)(const void *)>("stand_in_is_device_memory");
    return is_device != nullptr && is_device(memory) != 0;
}

bool take_code_memory() {
    const auto take = driver<int (*)(uint64_t)>("stand_in_take_library_memory");
    return take != nullptr && take(number_setting("STAND_IN_PRODUCT_BYTES", 2 << 20)) == 0;
}

bool captures(cudaStream_t stream, std::function<void()> work) {
    using Work = std::function<void()>;
    const auto take = driver<int (*)(cudaStream_t, int (*)(void *), void *, void (*)(void *))>("stand_in_captures");
    if (take == nullptr) {
        return false;
    }
    const auto run = [](void *data) { return (*static_cast<Work *>(data))(), 0; };
    const auto drop = [](void *data) { delete static_cast<Work *>(data); };
    return take(stream, run, new Work(std::move(work)), drop) != 0;
}

}  // namespace stand_in
