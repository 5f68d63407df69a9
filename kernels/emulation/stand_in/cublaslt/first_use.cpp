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
    const Description &description = product.description;
    Key key = {description.a_transposed, description.b_transposed, description.has_bias};
    for (int matrix = 0; matrix < 4; matrix++) {
        const Layout &layout = *layouts[matrix];
        key.insert(key.end(), {layout.type, int64_t(layout.rows), int64_t(layout.columns), layout.leading,
                               layout.batch, layout.batch_stride, alignment_bytes[matrix]});
    }
    return key;
}

// The driver keeps the account; it is the library that the program has loaded.
bool take_memory(uint64_t bytes) {
    void *driver = dlopen("libcuda.so", RTLD_LAZY | RTLD_NOLOAD);
    const auto take = reinterpret_cast<int (*)(uint64_t)>(driver ? dlsym(driver, "stand_in_take_library_memory") : nullptr);
    if (take == nullptr) {
        say("cuBLASLt", "the driver that stands in is not loaded");
        return false;
    }
    return take(bytes) == 0;
}

}  // namespace

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
