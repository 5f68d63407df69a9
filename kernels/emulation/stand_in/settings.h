// Settings that a test makes in the environment, and messages of the stand-in.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace stand_in {

inline std::string setting(const char *name, const char *otherwise) {
    const char *value = std::getenv(name);
    return value != nullptr ? value : otherwise;
}

inline uint64_t number_setting(const char *name, uint64_t otherwise) {
    return std::strtoull(setting(name, std::to_string(otherwise).c_str()).c_str(), nullptr, 10);
}

// Whether kernels and products are checked but not computed, for programs that measure their own speed.
inline bool is_idle() {
    static const bool idle = number_setting("STAND_IN_IDLE", 0) != 0;
    return idle;
}

// A call that no correct program makes, or that a device would answer with an error.
inline void say(const char *function, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::fprintf(stderr, "stand-in: %s: ", function);
    std::vfprintf(stderr, format, arguments);
    std::fputc('\n', stderr);
    va_end(arguments);
}

}  // namespace stand_in
