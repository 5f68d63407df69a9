// Kernels by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace emulation {

// A kernel: the file that it comes from, what its parameters are, one letter each, and how it is called with their
// addresses.
struct Kernel {
    std::string file;
    std::string parameters;
    std::function<void(void **)> call;
};

void add_kernel(const char *name, Kernel kernel);

// p: pointer, s: size_t, i: int, f: float.
template <typename T> constexpr char letter_of() {
    if (std::is_pointer<T>::value) return 'p';
    if (std::is_same<T, size_t>::value) return 's';
    if (std::is_same<T, int>::value) return 'i';
    static_assert(std::is_pointer<T>::value || std::is_same<T, size_t>::value || std::is_same<T, int>::value ||
                      std::is_same<T, float>::value,
                  "a kernel takes pointers, size_t, int and float");
    return 'f';
}

template <typename... P, size_t... I>
void call_with(void (*kernel)(P...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<P *>(arguments[I])...);
}

// Adds a kernel to the list when the program starts.
struct Registration {
    template <typename... P> Registration(const char *file, const char *name, void (*kernel)(P...)) {
        const auto call = [kernel](void **arguments) {
            call_with(kernel, arguments, std::index_sequence_for<P...>());
        };
        add_kernel(name, {file, {letter_of<P>()...}, call});
    }
};

}  // namespace emulation
