// Launches of registered kernels.
#pragma once

#include "emulation.h"
#include "registry.h"

#include <string>

namespace emulation {

// A kernel by its name; null if there is none.
const Kernel *kernel_of(const std::string &name);

// What a device would refuse of a launch, whatever the kernel; empty if nothing.
std::string refusal(uint3 grid, uint3 block, size_t shared_bytes);

// Runs a kernel to its end, with the addresses of its arguments. Returns what went wrong; empty if nothing.
std::string run(const Kernel &kernel, uint3 grid, uint3 block, size_t shared_bytes, void **arguments);

}  // namespace emulation
