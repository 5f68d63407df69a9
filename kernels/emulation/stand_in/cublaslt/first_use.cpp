// The code that a product loads when it is first computed, which takes device memory outside of all pools.
#include "first_use.h"
#include "../settings.h"

#include <dlfcn.h>
#include <mutex>
#include <set>
#include <sstream>
#include <vector>

namespace stand_in {

namespace {

// The algorithm, and everything that it is chosen by: types, transposes, and strides of the matrices.
using Key = std::vector<int64_t>;

Key key_of(const Product &product, const uint32_t (&alignment_bytes)[4], uint64_t algorithm) {
    const Layout *layouts[] = {&product.a, &product.b, &product.c, &product.d};
    const Description &description = product.description;
    Key key = {int64_t(algorithm), description.a_transposed, description.b_transposed, description.has_bias};
    for (int matrix = 0; matrix < 4; matrix++) {
        const Layout &layout = *layouts[matrix];
        key.insert(key.end(), {layout.type, int64_t(layout.rows), int64_t(layout.columns), layout.leading,
                               layout.batch, layout.batch_stride, alignment_bytes[matrix]});
    }
    return key;
}

// A function of the driver that the program has loaded, which counts memory. Null if that is not the stand-in.
template <typename F> F *of_driver(const char *name) {
    void *driver = dlopen("libcuda.so", RTLD_LAZY | RTLD_NOLOAD);
    const auto function = reinterpret_cast<F *>(driver ? dlsym(driver, name) : nullptr);
    if (function == nullptr) {
        say("cuBLASLt", "the driver that stands in is not loaded");
    }
    return function;
}

bool take_memory(uint64_t bytes) {
    const auto take = of_driver<int(uint64_t)>("stand_in_take_library_memory");
    return take != nullptr && take(bytes) == 0;
}

}  // namespace

int current_capability() {
    const auto capability = of_driver<int()>("stand_in_current_capability");
    return capability == nullptr ? 0 : capability();
}

bool captures(cudaStream_t stream, std::function<void()> work) {
    using Work = std::function<void()>;
    using Captures = int(cudaStream_t, int (*)(void *), void *, void (*)(void *));
    static const auto captures = of_driver<Captures>("stand_in_captures");
    if (captures == nullptr) {
        return false;
    }
    const auto run = [](void *data) { return (*static_cast<Work *>(data))(), 0; };
    const auto drop = [](void *data) { delete static_cast<Work *>(data); };
    return captures(stream, run, new Work(std::move(work)), drop) != 0;
}

bool load_product(const Product &product, const uint32_t (&alignment_bytes)[4], uint64_t algorithm) {
    static std::mutex lock;
    static std::set<Key> loaded;
    const std::lock_guard<std::mutex> entered(lock);
    const Key key = key_of(product, alignment_bytes, algorithm);
    if (loaded.count(key) != 0) {
        return true;
    }
    if (!take_memory(number_setting("STAND_IN_PRODUCT_BYTES", 2 << 20))) {
        return false;
    }
    loaded.insert(key);
    return true;
}

void pass_time(uint64_t algorithm) {
    static const std::string listed = setting("STAND_IN_ALGORITHM_US", "");
    if (listed.empty()) {
        return;
    }
    std::istringstream times(listed);
    std::string microseconds;
    for (uint64_t number = 0; number <= algorithm && std::getline(times, microseconds, ','); number++) {
    }
    if (const auto pass = of_driver<void(double)>("stand_in_pass_time")) {
        pass(std::strtod(microseconds.c_str(), nullptr));
    }
}

}  // namespace stand_in
