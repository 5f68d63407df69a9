// Rounding as a device may have it, for a build with EMULATION_ROUNDING=device: the suite's tolerances must allow it.
//
// Products and sums are fused wherever a compiler may fuse them. `expf`, `exp2f` and `logf` are off by as much as NVIDIA
// documents ("CUDA C++ Programming Guide", mathematical functions: 2, 2 and 1 ulp), one way or the other by a hash of
// the argument, so that equal arguments have equal results as they do on a device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulation {

inline float off_by(float exact, float argument, int ulps) {
    uint32_t bits, hash;
    std::memcpy(&bits, &exact, sizeof(bits));
    std::memcpy(&hash, &argument, sizeof(hash));
    hash = (hash ^ hash >> 15) * 0x2c1b3c6du;
    hash = (hash ^ hash >> 12) * 0x297a2d39u;
    if (!std::isfinite(exact) || exact == 0.0f || exact == 1.0f) {
        return exact;
    }
    bits += uint32_t(int(hash >> 16) % (2 * ulps + 1) - ulps);
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return std::isfinite(result) ? result : exact;
}

inline float device_expf(float x) { return off_by(expf(x), x, 2); }
inline float device_exp2f(float x) { return off_by(exp2f(x), x, 2); }
inline float device_logf(float x) { return off_by(logf(x), x, 1); }

// Keeps an operation from being fused: the compiler cannot look through this.
inline float alone(float x) {
    asm volatile("" : "+x"(x));
    return x;
}

}  // namespace emulation

#define expf emulation::device_expf
#define exp2f emulation::device_exp2f
#define logf emulation::device_logf
