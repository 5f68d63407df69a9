// Device memory, which is host memory under an account of its own.
#pragma once

#include "state.h"

namespace stand_in {

// Whether an address lies in a live block of device or page-locked memory, with so many bytes behind it.
bool is_device_memory(const void *address, size_t bytes);
bool is_locked_memory(const void *address, size_t bytes);

// Counts STAND_IN_MODULE_BYTES more as held, for good, in the current context; an error where so much is not free.
CUresult take_module_memory();

// At a synchronisation, every pool gives back what it holds above its release threshold.
void release_unused();

}  // namespace stand_in

// For the library beside the driver, which finds it by this name: counts so much more as held, and notes the first use
// where STAND_IN_FIRST_USES says so. No function of NVIDIA's.
extern "C" int stand_in_take_library_memory(uint64_t bytes);
