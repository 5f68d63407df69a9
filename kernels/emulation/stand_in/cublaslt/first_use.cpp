// What a product loads when it is first computed: code, which takes memory of the device beside every pool.
#include "first_use.h"
#include "../settings.h"

#include <dlfcn.h>
#include <mutex>
#include <set>
#include <vector>

namespace stand_in {

namespace {

// All that an algorithm is chosen by: types, what is transposed, how the matrices lie.
using Key = std::vector<int64_t>;

Key key_of(const Product &product, const uint32_t (&alignment_bytes)[4]) {
    const Layout *layouts[] = {&product.a, &product.b, &product.c, &product.d};
    Key key = {product.description.a_transposed, product.description.b_transposed};
    for (int matrix = 0; matrix < 4; matrix++) {
        const Layout &layout = *layouts[matrix];
        key.insert(key.end(), {layout.type, int64_t(layout.rows), int64_t(layout.columns), layout.leading,
                               layout.batch, layout.batch_stride, alignment_bytes[matrix]});
    }
    return key;
}

// A function of the driver, which is the library that the program has loaded; null if it is another.
template <typename Function> Function driver(const char *name) {
    void *driver = dlopen("libcuda.so", RTLD_LAZY | RTLD_NOLOAD);
    const auto found = reinterpret_cast<Function>(driver ? dlsym(driver, name) : nullptr);
    if (found == nullptr) {
        say("cuBLASLt", "the driver that stands in is not loaded");
    }
    return found;
}

// The driver keeps the account.
bool take_memory(uint64_t bytes) {
    const auto take = driver<int (*)(uint64_t)>("stand_in_take_library_memory");
    return take != nullptr && take(bytes) == 0;
}

}  // namespace

bool captures(cudaStream_t stream, std::function<void()> work) {
    using Work = std::function<void()>;
    using Captures = int (*)(cudaStream_t, int (*)(void *), void *, void (*)(void *));
    static const auto captures = driver<Captures>("stand_in_captures");
    if (captures == nullptr) {
        return false;
    }
    const auto run = [](void *data) { return (*static_cast<Work *>(data))(), 0; };
    const auto drop = [](void *data) { delete static_cast<Work *>(data); };
    return captures(stream, run, new Work(std::move(work)), drop) != 0;
}

bool load_product(const Product &product, const uint32_t (&alignment_bytes)[4]) {
    static std::mutex lock;
    static std::set<Key> loaded;
    const std::lock_guard<std::mutex> entered(lock);
    const Key key = key_of(product, alignment_bytes);
    if (loaded.count(key) != 0) {
        return true;
    }
    if (!take_memory(number_setting("STAND_IN_PRODUCT_BYTES", 2 << 20))) {
        return false;
    }
    loaded.insert(key);
    return true;
}

}  // namespace stand_in
