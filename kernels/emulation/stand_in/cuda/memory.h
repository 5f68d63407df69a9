// Device memory: host memory that is counted separately.
#pragma once

#include "state.h"

namespace stand_in {

// Whether an address lies in a live block of device or page-locked memory, with so many bytes behind it.
bool is_device_memory(const void *address, size_t bytes);
bool is_locked_memory(const void *address, size_t bytes);

// Counts so many bytes as held on the current context's device, until they are given back; an error if fewer are free.
CUresult take_memory(uint64_t bytes);
void give_back_memory(uint64_t bytes);

// At a synchronisation, every pool gives back what it holds above its release threshold.
void release_unused();

}  // namespace stand_in

// For the library beside the driver, which finds it by this name: counts so much more as held, and notes the first use
// where STAND_IN_FIRST_USES says so. No function of NVIDIA's.
extern "C" int stand_in_take_library_memory(uint64_t bytes);

// For the library of products: so much has passed on the clock of a test that says how long they take.
extern "C" void stand_in_pass_time(double microseconds);

// For libraries beside the driver too: the compute capability of the current context's device, 0 where there is none.
extern "C" int stand_in_current_capability();
