// Kernels by name.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

// A function that the compiler does not tell the emulation about.
#define EMULATION_UNSEEN __attribute__((no_sanitize("thread")))

namespace emulation {

// A kernel: the file that it comes from, what its parameters are, one letter each, and how it is called with their
// addresses.
struct Kernel {
    const char *file;
    const char *parameters;
    void (*call)(void (*function)(), void **arguments);
    void (*function)();
};

void add_kernel(const char *name, const Kernel &kernel);

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

template <typename... P> struct Parameters {
    static constexpr char LETTERS[] = {letter_of<P>()..., 0};

    template <size_t... I>
    EMULATION_UNSEEN static void pass(void (*kernel)(P...), void **arguments, std::index_sequence<I...>) {
        kernel(*static_cast<P *>(arguments[I])...);
    }
    EMULATION_UNSEEN static void call(void (*function)(), void **arguments) {
        pass(reinterpret_cast<void (*)(P...)>(function), arguments, std::index_sequence_for<P...>());
    }
};

// Adds a kernel to the list when the program starts.
struct Registration {
    template <typename... P> Registration(const char *file, const char *name, void (*kernel)(P...)) {
        typedef Parameters<P...> Of;
        add_kernel(name, {file, Of::LETTERS, &Of::call, reinterpret_cast<void (*)()>(kernel)});
    }
};

}  // namespace emulation
